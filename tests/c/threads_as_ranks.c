/* The flag protocol of src/host with threads as ranks over one block, for the thread sanitizer (`make sanitize`):
 * dispatch and combine, then low-latency dispatch and combine, each step as epcy/backends/host*.pyx makes it.
 *
 *   threads_as_ranks RANKS ROUNDS
 *
 * Every token says who sent it; each row that comes is looked at. Exit code 0: all were right. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "epcy/host.h"

enum { TOKENS = 6, TOPK = 2, LOCAL = 2, HIDDEN = 64, FAILED = 1 };

static int num_ranks, num_rounds;
static char **base;
static epcy_shape shape;

typedef struct rank {
  epcy_host h;
  int64_t bytes;
  pthread_t thread;
  unsigned seed;
  int next_slot[2];
  uint64_t input_epoch; /* of the last low-latency combine */
  const char *wrong;
} rank;

static int64_t random_below(rank *r, int64_t n) { return (int64_t)(rand_r(&r->seed) % (unsigned)n); }

static void loiter(rank *r) {
  if (random_below(r, 4) == 0) usleep((useconds_t)random_below(r, 200));
}

static int wait_all(rank *r, int word, uint64_t value) {
  for (int slice = 0; slice < 300; slice++)
    if (epcy_host_wait(&r->h, word, value, 100000000) == EPCY_WAIT_DONE) return 0;
  r->wrong = "a wait took 30 s";
  return FAILED;
}

static epcy_record *begin(rank *r, int op) {
  if (wait_all(r, EPCY_WORD_ARRIVED, r->h.epoch)) return NULL;
  r->h.epoch++;
  epcy_record *record = epcy_host_record(&r->h, r->h.rank, r->h.epoch);
  memset(record, 0, sizeof *record);
  record->epoch = r->h.epoch;
  record->op = op;
  epcy_host_phase(&r->h, op, EPCY_PHASE_ARRIVAL);
  return record;
}

static int arrive(rank *r) {
  epcy_host_store(&r->h, EPCY_WORD_ARRIVED, r->h.epoch);
  if (wait_all(r, EPCY_WORD_ARRIVED, r->h.epoch)) return FAILED;
  for (int64_t q = 0; q < num_ranks; q++)
    if (epcy_host_record(&r->h, q, r->h.epoch)->epoch != r->h.epoch) r->wrong = "a record is of another call";
  loiter(r);
  return 0;
}

static int finish(rank *r) {
  epcy_host_store(&r->h, EPCY_WORD_DONE, r->h.epoch);
  return wait_all(r, EPCY_WORD_DONE, r->h.epoch);
}

static void draw(rank *r, int64_t *idx, float *x) {
  for (int i = 0; i < TOKENS * TOPK; i++) idx[i] = random_below(r, shape.num_experts + 1) - 1;
  for (int t = 0; t < TOKENS; t++)
    for (int i = 0; i < HIDDEN; i++) x[t * HIDDEN + i] = (float)(r->h.rank * 1000 + t);
}

/* The sum of what ranks, or lanes, bring back, all of them the token itself. */
static void look_at_sums(rank *r, const float *sums, const int64_t *idx, int by_rank) {
  for (int t = 0; t < TOKENS; t++) {
    int copies = 0;
    for (int k = 0; k < TOPK; k++) {
      const int64_t e = idx[t * TOPK + k];
      const int again = k > 0 && e >= 0 && idx[t * TOPK] >= 0 && idx[t * TOPK] / LOCAL == e / LOCAL;
      copies += e >= 0 && !(by_rank && again);
    }
    for (int i = 0; i < HIDDEN; i++)
      if (sums[t * HIDDEN + i] != (float)copies * (float)(r->h.rank * 1000 + t)) r->wrong = "a sum is wrong";
  }
}

static int high_throughput(rank *r) {
  int64_t idx[TOKENS * TOPK], counts[LOCAL], offsets[LOCAL + 1];
  float x[TOKENS * HIDDEN], out[TOKENS * HIDDEN];
  epcy_route routes[TOKENS * TOPK];
  epcy_bad_id bad;
  epcy_host *h = &r->h;
  draw(r, idx, x);
  epcy_record *record = begin(r, EPCY_OP_DISPATCH);
  if (!record) return FAILED;
  epcy_host_count(h, idx, 1, TOKENS, EPCY_LAYOUT_RANK, routes, epcy_host_counts(h, h->rank, h->epoch),
                  epcy_host_expert_counts(h, h->rank, h->epoch), &bad);
  const int64_t area = h->heap.receive[h->epoch / 2 % 2];
  record->dtype = EPCY_FP32, record->alignment = 1, record->num_tokens = TOKENS;
  record->limit = shape.num_rows, record->area_offset = area;
  if (arrive(r)) return FAILED;
  epcy_host_dispatch d = {.x = (char *)x, .x_stride_bytes = HIDDEN * 4, .row_bytes = HIDDEN * 4, .num_tokens = TOKENS,
                          .routes = routes, .expert_counts = counts, .expert_offsets = offsets};
  epcy_host_place(h, &d);
  epcy_host_send(h, &d);
  epcy_host_fill(h, &d);
  if (finish(r)) return FAILED;
  const float *rows = (const float *)(h->base[h->rank] + area);
  for (int64_t row = 0, s = 0, left = 0; row < d.num_rows; row++, left--) {
    while (left == 0) left = epcy_host_counts(h, s++, h->epoch)[h->rank];
    for (int i = 0; i < HIDDEN; i++)
      if ((int)rows[row * HIDDEN + i] / 1000 != s - 1) r->wrong = "a row is another rank's";
  }

  record = begin(r, EPCY_OP_COMBINE);
  if (!record) return FAILED;
  record->dtype = EPCY_FP32, record->alignment = 1, record->area_offset = area, record->num_tokens = TOKENS;
  if (arrive(r)) return FAILED;
  epcy_host_combine c = {.routes = routes, .num_tokens = TOKENS, .dtype = EPCY_FP32, .out = (char *)out};
  epcy_host_combine_rows(h, &c);
  if (finish(r)) return FAILED;
  look_at_sums(r, out, idx, 1);
  return 0;
}

static epcy_low_latency_header *take_slot(rank *r, int kind) {
  epcy_low_latency_header *header = epcy_low_latency_header_at(&r->h, r->h.rank, kind, r->next_slot[kind]);
  if (wait_all(r, EPCY_WORD_RECEIVED_DISPATCH + kind, header->epoch)) return NULL;
  header->op = EPCY_OP_LOW_LATENCY_DISPATCH + kind;
  return header;
}

static uint64_t send(rank *r, int kind, epcy_low_latency_header *header) {
  epcy_low_latency_publish(header, ++r->h.epoch);
  r->next_slot[kind] ^= 1;
  epcy_host_store(&r->h, EPCY_WORD_ARRIVED, r->h.epoch);
  loiter(r);
  return r->h.epoch;
}

static int low_latency(rank *r) {
  int64_t idx[TOKENS * TOPK], counts[LOCAL], tokens[2 * num_ranks];
  float x[TOKENS * HIDDEN], out[TOKENS * HIDDEN];
  epcy_route routes[TOKENS * TOPK];
  uint8_t everybody[num_ranks];
  int32_t bases[num_ranks * LOCAL], before[num_ranks * LOCAL];
  epcy_host *h = &r->h;
  memset(everybody, 1, sizeof everybody);
  draw(r, idx, x);
  int slot = r->next_slot[0];
  epcy_low_latency_header *header = take_slot(r, 0);
  if (!header) return FAILED;
  epcy_low_latency_send s = {.x = (char *)x, .x_stride_bytes = HIDDEN * 4, .num_tokens = TOKENS, .topk_idx = idx,
                             .is_int64 = 1, .dtype = EPCY_FP32, .slot = slot, .routes = routes};
  epcy_host_low_latency_send(h, &s);
  const uint64_t dispatched = send(r, 0, header);
  const epcy_low_latency_area layout = epcy_low_latency_area_layout(&shape);
  char *area = h->base[h->rank] + h->heap.low_latency_x[slot];
  epcy_low_latency_receive g = {.epoch = dispatched, .payload = area + layout.payload, .counts = counts,
                                .row_bytes = HIDDEN * 4, .routes = routes, .num_tokens = TOKENS,
                                .tokens = tokens, .sources = everybody, .bases = bases, .before = before};
  if (wait_all(r, EPCY_WORD_ARRIVED, dispatched)) return FAILED;
  if (epcy_host_low_latency_receive(h, &g) >= 0) r->wrong = "lists make no sense";
  epcy_host_store(h, EPCY_WORD_RECEIVED_DISPATCH, h->epoch);

  const int64_t y = h->heap.low_latency_y[r->next_slot[1]];
  slot = r->next_slot[1];
  header = take_slot(r, 1);
  if (!header || wait_all(r, EPCY_WORD_RECEIVED_COMBINE, header->epoch)) return FAILED;
  epcy_host_low_latency_stage(h, h->base[h->rank] + y, area + layout.payload, counts, HIDDEN * 4);
  header->dtype = EPCY_FP32, header->y_offset = y, header->routing = dispatched;
  memcpy(epcy_low_latency_bases(h, h->rank, 1, slot), bases, sizeof bases);
  const uint64_t combined = send(r, 1, header);
  if (wait_all(r, EPCY_WORD_ARRIVED, combined)) return FAILED;
  epcy_low_latency_combine c = {.epoch = combined, .from = everybody, .at_source = 1,
                                .sum = {.routes = routes, .num_tokens = TOKENS, .dtype = EPCY_FP32, .out = (char *)out}};
  if (epcy_host_low_latency_combine(h, &c) >= 0) r->wrong = "a rank left a combine";
  epcy_host_store(h, EPCY_WORD_RECEIVED_COMBINE, h->epoch);
  look_at_sums(r, out, idx, 0);
  return 0;
}

static void *life(void *argument) {
  rank *r = argument;
  for (int round = 0; round < num_rounds && !r->wrong; round++) {
    if (round % 3 != 2 ? high_throughput(r) : 0) break;
    if (low_latency(r)) break;
    loiter(r);
  }
  return NULL;
}

int main(int argc, char **argv) {
  num_ranks = argc > 1 ? atoi(argv[1]) : 3;
  num_rounds = argc > 2 ? atoi(argv[2]) : 300;
  shape = (epcy_shape){.num_ranks = num_ranks, .num_experts = LOCAL * num_ranks, .num_topk = TOPK,
                       .num_max_tokens = TOKENS, .hidden = HIDDEN, .row_bytes = HIDDEN * 4,
                       .num_rows = TOKENS * num_ranks, .num_low_latency_tokens = TOKENS};
  const epcy_heap heap = epcy_heap_layout(&shape, epcy_host_control_bytes(&shape));
  rank *ranks = calloc((size_t)num_ranks, sizeof *ranks);
  base = calloc((size_t)num_ranks, sizeof *base);
  for (int r = 0; r < num_ranks; r++) base[r] = aligned_alloc(EPCY_PAGE_BYTES, (size_t)heap.bytes);
  for (int r = 0; r < num_ranks; r++) {
    ranks[r].h.shape = shape, ranks[r].h.rank = r, ranks[r].h.base = base, ranks[r].seed = (unsigned)r + 1;
    if (epcy_host_open(&ranks[r].h, 2.0, r % 2 + 1)) return 2;
  }
  for (int r = 0; r < num_ranks; r++) pthread_create(&ranks[r].thread, NULL, life, &ranks[r]);
  int code = 0;
  for (int r = 0; r < num_ranks; r++) {
    pthread_join(ranks[r].thread, NULL);
    if (ranks[r].wrong) fprintf(stderr, "rank %d, call %lu: %s\n", r, (unsigned long)ranks[r].h.epoch, ranks[r].wrong), code = 1;
  }
  for (int r = 0; r < num_ranks; r++) epcy_host_close(&ranks[r].h), free(base[r]);
  free(base);
  free(ranks);
  return code;
}
