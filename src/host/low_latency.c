/* Low-latency dispatch: a rank writes its rows once, into a slot of its own; whoever receives copies the rows of its
 * experts out of everybody's slots.
 *
 * There is no count exchange before the data, so that sending waits for nobody: the slot says which tokens go to which
 * expert, and the place of a row follows from what all slots say. A slot is used again when every rank has received the
 * call that it held. */
#include <stdatomic.h>
#include <string.h>

#include "epcy/host.h"
#include "low_latency.h"
#include "pool.h"
#include "routes.h"
#include "simd.h"

int64_t epcy_low_latency_header_bytes(const epcy_shape *s) {
  return epcy_round_up((int64_t)sizeof(epcy_low_latency_header) + s->num_experts * 4, EPCY_LINE_BYTES);
}

slot_layout epcy_slot_layout(const epcy_shape *s) {
  const int64_t tokens = s->num_low_latency_tokens;
  slot_layout l;
  l.firsts = 0;
  l.tokens = epcy_round_up(l.firsts + (s->num_experts + 1) * 4, EPCY_LINE_BYTES);
  l.rows = epcy_round_up(l.tokens + tokens * s->num_topk * 4, EPCY_LINE_BYTES);
  l.scales = epcy_round_up(l.rows + tokens * s->row_bytes, EPCY_LINE_BYTES);
  l.bytes = epcy_round_up(l.scales + tokens * epcy_num_scales(s->hidden) * 4, EPCY_LINE_BYTES);
  return l;
}

static int64_t slots_at(const epcy_shape *s) {
  return EPCY_NUM_LOW_LATENCY_KINDS * EPCY_NUM_SLOTS * epcy_low_latency_header_bytes(s);
}

int64_t epcy_low_latency_wire_bytes(const epcy_shape *s) {
  return s->num_low_latency_tokens ? slots_at(s) + EPCY_NUM_SLOTS * epcy_slot_layout(s).bytes : 0;
}

epcy_low_latency_header *epcy_low_latency_header_at(const epcy_host *h, int64_t rank, int kind, int slot) {
  return (epcy_low_latency_header *)(epcy_host_wire(h, rank) +
                                     (kind * EPCY_NUM_SLOTS + slot) * epcy_low_latency_header_bytes(&h->shape));
}

static int find_slot(const epcy_host *h, int64_t rank, int kind, uint64_t epoch) {
  for (int slot = 0; slot < EPCY_NUM_SLOTS; slot++) {
    epcy_low_latency_header *header = epcy_low_latency_header_at(h, rank, kind, slot);
    if (__atomic_load_n(&header->epoch, __ATOMIC_RELAXED) == epoch) return slot;
  }
  return -1;
}

const epcy_low_latency_header *epcy_low_latency_find(const epcy_host *h, int64_t rank, int kind, uint64_t epoch) {
  const int slot = find_slot(h, rank, kind, epoch);
  return slot < 0 ? NULL : epcy_low_latency_header_at(h, rank, kind, slot);
}

int32_t *epcy_low_latency_bases(const epcy_host *h, int64_t rank, int kind, int slot) {
  return (int32_t *)(epcy_low_latency_header_at(h, rank, kind, slot) + 1);
}

void epcy_low_latency_publish(epcy_low_latency_header *header, uint64_t epoch) {
  __atomic_store_n(&header->epoch, epoch, __ATOMIC_RELAXED); /* others look at it at any time, for another call */
}

/* A rank that is masked here may be reading all the same: it looks at the epoch again when it has read. */
void epcy_low_latency_invalidate(epcy_host *h, int kind, uint64_t epoch) {
  const int slot = find_slot(h, h->rank, kind, epoch);
  if (slot < 0) return;
  __atomic_store_n(&epcy_low_latency_header_at(h, h->rank, kind, slot)->epoch, 0, __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

char *epcy_slot_at(const epcy_host *h, int64_t rank, int slot) {
  return epcy_host_wire(h, rank) + slots_at(&h->shape) + slot * epcy_slot_layout(&h->shape).bytes;
}

/* Which tokens go to which expert, an expert that a token names twice once; routes get ordinals for rows. */
static void count_tokens(const epcy_host *h, epcy_low_latency_send *call, int32_t *firsts, int32_t *tokens) {
  const int64_t num_experts = h->shape.num_experts, num_topk = h->shape.num_topk;
  const int64_t num_local = epcy_num_local_experts(&h->shape);
  int64_t *last = h->scratch; /* the last token of each expert */
  memset(firsts, 0, (size_t)(num_experts + 1) * 4);
  memset(last, 0xFF, (size_t)num_experts * 8);
  memset(&call->bad, 0, sizeof call->bad);
  for (int64_t t = 0; t < call->num_tokens; t++) {
    epcy_route *routes = call->routes + t * num_topk;
    int64_t used = 0;
    for (int64_t k = 0; k < num_topk; k++) {
      const int64_t expert = read_id(call->topk_idx, call->is_int64, t * num_topk + k);
      if (expert < 0 || expert >= num_experts) {
        if (expert != -1 && call->bad.num_bad++ == 0) call->bad.token = t, call->bad.lane = k, call->bad.value = expert;
        continue;
      }
      epcy_route route = {0};
      route.rank = (int32_t)epcy_rank_of_expert(expert, num_local);
      route.lane = (int32_t)k;
      route.local_expert = (int32_t)epcy_local_expert(expert, num_local);
      if (h->masked[route.rank]) {
        route.row = -1;
      } else {
        if (last[expert] != t) firsts[expert + 1]++;
        last[expert] = t;
        route.row = firsts[expert + 1] - 1;
      }
      insert_route(routes, used++, route);
    }
    for (int64_t i = used; i < num_topk; i++) routes[i] = (epcy_route){.rank = -1, .lane = -1, .row = -1};
  }
  for (int64_t e = 0; e < num_experts; e++) firsts[e + 1] += firsts[e];
  for (int64_t t = 0; t < call->num_tokens; t++) {
    const epcy_route *routes = call->routes + t * num_topk;
    for (int64_t i = 0; i < num_topk && routes[i].rank >= 0; i++)
      if (routes[i].row >= 0)
        tokens[firsts[routes[i].rank * num_local + routes[i].local_expert] + routes[i].row] = (int32_t)t;
  }
}

typedef struct send_context {
  const epcy_host *h;
  const epcy_low_latency_send *call;
  const epcy_simd *simd;
  char *rows, *scales;
  int64_t row_bytes;
} send_context;

/* Biased exponents, four to a word. */
static void pack_exponents(const float *scales, int64_t num_scales, uint8_t *out) {
  for (int64_t i = 0; i < num_scales; i++) {
    uint32_t u;
    memcpy(&u, &scales[i], 4);
    out[i] = (uint8_t)(u >> 23);
  }
}

static void send_rows(const void *context, int64_t begin, int64_t end) {
  const send_context *c = context;
  const epcy_low_latency_send *call = c->call;
  const int64_t hidden = c->h->shape.hidden, num_topk = c->h->shape.num_topk, num_scales = epcy_num_scales(hidden);
  float scales[call->use_ue8m0 ? num_scales : 1];
  const unsigned saved = epcy_float_begin();
  for (int64_t t = begin; t < end; t++) {
    const char *x = call->x + t * call->x_stride_bytes;
    char *row = c->rows + t * c->row_bytes;
    if (call->routes[t * num_topk].rank < 0) continue; /* to nobody */
    if (!call->use_fp8) {
      memcpy(row, x, (size_t)c->row_bytes);
    } else if (call->use_ue8m0) {
      c->simd->to_fp8(x, call->dtype, hidden, 1, (uint8_t *)row, scales);
      pack_exponents(scales, num_scales, (uint8_t *)c->scales + t * num_scales);
    } else {
      c->simd->to_fp8(x, call->dtype, hidden, call->round_scale, (uint8_t *)row,
                      (float *)(c->scales + t * num_scales * 4));
    }
  }
  epcy_float_end(saved);
}

void epcy_host_low_latency_send(epcy_host *h, epcy_low_latency_send *call) {
  const slot_layout l = epcy_slot_layout(&h->shape);
  char *slot = epcy_slot_at(h, h->rank, call->slot);
  count_tokens(h, call, (int32_t *)(slot + l.firsts), (int32_t *)(slot + l.tokens));
  const int64_t item = call->use_fp8 ? 1 : call->dtype == EPCY_FP32 ? 4 : 2;
  const send_context c = {h, call, epcy_simd_table(), slot + l.rows, slot + l.scales, h->shape.hidden * item};
  epcy_pool_run(h->pool, send_rows, &c, call->num_tokens, 16);
}

/* The last of num_groups groups that begins at row `row` or before. */
static int64_t group_of(const int64_t *starts, int64_t num_groups, int64_t row) {
  int64_t group = 0;
  for (int64_t high = num_groups; high - group > 1;) {
    const int64_t middle = (group + high) / 2;
    if (starts[middle] <= row) group = middle;
    else high = middle;
  }
  return group;
}

typedef struct receive_context {
  const epcy_host *h;
  const epcy_low_latency_receive *call;
  char *const *slots;    /* of each rank; NULL: nothing comes from it */
  const int64_t *starts; /* (L * R + 1): rows before those of (local expert, source) */
  slot_layout layout;
} receive_context;

static const int32_t *firsts_of(const receive_context *c, int64_t source) {
  return (const int32_t *)(c->slots[source] + c->layout.firsts);
}

/* Rows [begin, end) of this rank, counted through all experts and sources. */
static void receive_rows(const void *context, int64_t begin, int64_t end) {
  const receive_context *c = context;
  const epcy_low_latency_receive *call = c->call;
  const epcy_shape *s = &c->h->shape;
  const int64_t num_ranks = s->num_ranks, num_local = epcy_num_local_experts(s);
  const int64_t room = num_ranks * s->num_low_latency_tokens; /* rows of an expert */
  int64_t group = group_of(c->starts, num_local * num_ranks, begin);
  for (int64_t i = begin; i < end; group++) {
    const int64_t expert = group / num_ranks, source = group % num_ranks;
    const int64_t stop = c->starts[group + 1] < end ? c->starts[group + 1] : end;
    if (stop <= i) continue;
    const char *slot = c->slots[source];
    const int32_t *tokens =
        (const int32_t *)(slot + c->layout.tokens) + firsts_of(c, source)[c->h->rank * num_local + expert];
    for (; i < stop; i++) {
      const int64_t token = tokens[i - c->starts[group]], at = expert * room + i - c->starts[expert * num_ranks];
      if ((uint64_t)token >= (uint64_t)s->num_low_latency_tokens) continue; /* torn: the epoch will tell */
      memcpy(call->payload + at * call->row_bytes, slot + c->layout.rows + token * call->row_bytes,
             (size_t)call->row_bytes);
      if (call->scales)
        memcpy(call->scales + at * call->scale_bytes, slot + c->layout.scales + token * call->scale_bytes,
               (size_t)call->scale_bytes);
    }
  }
}

/* The rows of expert e that come from ranks before this one. */
static int64_t rows_before(const receive_context *c, int64_t e) {
  int64_t rows = 0;
  for (int64_t s = 0; s < c->h->rank; s++)
    if (c->slots[s]) rows += firsts_of(c, s)[e + 1] - firsts_of(c, s)[e];
  return rows;
}

/* Turn this rank's ordinals into rows. */
static void place_routes(const receive_context *c) {
  const epcy_shape *s = &c->h->shape;
  const int64_t num_routes = c->call->num_tokens * s->num_topk, num_local = epcy_num_local_experts(s);
  const int64_t room = s->num_ranks * s->num_low_latency_tokens;
  for (int64_t i = 0; i < num_routes; i++) {
    epcy_route *route = &c->call->routes[i];
    if (route->rank < 0 || route->row < 0) continue;
    const int64_t e = route->rank * num_local + route->local_expert;
    route->row += route->local_expert * room + c->call->before[e];
  }
}

/* Whether lists can be those of a call: ascending, and no longer than there is room. */
static int makes_sense(const epcy_shape *s, const int32_t *firsts) {
  int sound = firsts[0] == 0 && firsts[s->num_experts] <= s->num_low_latency_tokens * s->num_topk;
  for (int64_t e = 0; e < s->num_experts; e++) {
    const int64_t count = (int64_t)firsts[e + 1] - firsts[e];
    sound &= count >= 0 && count <= s->num_low_latency_tokens;
  }
  return sound;
}

/* Whether a source's slot still held this call after it was read. A rank that has masked this one does not wait for it:
 * it may have taken the slot for a later call. */
static int still_there(const epcy_host *h, int64_t source, int slot, uint64_t epoch) {
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return __atomic_load_n(&epcy_low_latency_header_at(h, source, EPCY_LOW_LATENCY_DISPATCH, slot)->epoch,
                         __ATOMIC_RELAXED) == epoch;
}

int64_t epcy_host_low_latency_receive(epcy_host *h, const epcy_low_latency_receive *call) {
  const int64_t num_ranks = h->shape.num_ranks, num_local = epcy_num_local_experts(&h->shape);
  char *slots[num_ranks];
  int which[num_ranks];
  int64_t *starts = h->scratch; /* R + E numbers: one more than L * R at least */
  const receive_context c = {h, call, slots, starts, epcy_slot_layout(&h->shape)};
  for (int64_t lost = 0; lost >= 0;) { /* once more without a rank that was lost; what is left is fewer each time */
    starts[0] = 0;
    for (int64_t s = 0; s < num_ranks; s++) {
      which[s] = call->sources[s] ? find_slot(h, s, EPCY_LOW_LATENCY_DISPATCH, call->epoch) : -1;
      slots[s] = which[s] < 0 ? NULL : epcy_slot_at(h, s, which[s]);
      if (slots[s] && !makes_sense(&h->shape, firsts_of(&c, s))) {
        if (still_there(h, s, which[s], call->epoch)) return s;
        slots[s] = NULL;
      }
      call->sources[s] = slots[s] != NULL;
    }
    for (int64_t l = 0; l < num_local; l++) {
      for (int64_t s = 0; s < num_ranks; s++) {
        const int32_t *first = slots[s] ? firsts_of(&c, s) + h->rank * num_local + l : NULL;
        int64_t count = first ? first[1] - first[0] : 0;
        if (count < 0 || count > h->shape.num_low_latency_tokens) count = 0; /* changed since: the epoch will tell */
        starts[l * num_ranks + s + 1] = starts[l * num_ranks + s] + count;
      }
      call->counts[l] = starts[(l + 1) * num_ranks] - starts[l * num_ranks];
    }
    epcy_pool_run(h->pool, receive_rows, &c, starts[num_local * num_ranks], 16);
    for (int64_t s = 0; s < num_ranks; s++)
      for (int64_t l = 0; l < num_local; l++)
        call->bases[s * num_local + l] = slots[s] ? (int32_t)(starts[l * num_ranks + s] - starts[l * num_ranks]) : -1;
    for (int64_t e = 0; e < h->shape.num_experts; e++) call->before[e] = (int32_t)rows_before(&c, e);
    lost = -1;
    for (int64_t s = 0; s < num_ranks; s++)
      if (slots[s] && !still_there(h, s, which[s], call->epoch)) call->sources[lost = s] = 0;
  }
  for (int64_t r = 0; r < num_ranks; r++) {
    const int32_t *to = slots[h->rank] ? firsts_of(&c, h->rank) + r * num_local : NULL,
                  *from = slots[r] ? firsts_of(&c, r) + h->rank * num_local : NULL;
    call->tokens[r] = to ? to[num_local] - to[0] : 0;
    call->tokens[num_ranks + r] = from ? from[num_local] - from[0] : 0;
  }
  place_routes(&c);
  return -1;
}

typedef struct stage_context {
  const int64_t *starts; /* (L + 1): rows before those of an expert */
  int64_t num_local, room, row_bytes;
  char *to;
  const char *from;
} stage_context;

static void stage_rows(const void *context, int64_t begin, int64_t end) {
  const stage_context *c = context;
  int64_t expert = group_of(c->starts, c->num_local, begin);
  for (int64_t i = begin; i < end; expert++) {
    const int64_t stop = c->starts[expert + 1] < end ? c->starts[expert + 1] : end;
    const int64_t at = (expert * c->room + i - c->starts[expert]) * c->row_bytes;
    if (stop > i) memcpy(c->to + at, c->from + at, (size_t)((stop - i) * c->row_bytes));
    i = stop;
  }
}

void epcy_host_low_latency_stage(epcy_host *h, char *to, const char *from, const int64_t *counts, int64_t row_bytes) {
  const int64_t num_local = epcy_num_local_experts(&h->shape);
  int64_t *starts = h->scratch;
  starts[0] = 0;
  for (int64_t l = 0; l < num_local; l++) starts[l + 1] = starts[l] + counts[l];
  const int64_t room = h->shape.num_ranks * h->shape.num_low_latency_tokens;
  const stage_context c = {starts, num_local, room, row_bytes, to, from};
  if (to != from) epcy_pool_run(h->pool, stage_rows, &c, starts[num_local], 16);
}
