/* Words, records and waits: how ranks tell each other where they are.
 *
 * Every call is one step of the Buffer's epoch on every rank. A rank fills its record, stores the epoch to its
 * `arrived` word (release) and waits for everybody's (acquire); after its last access to foreign memory it stores
 * `done` likewise. Records are kept for two epochs: a rank writes record n + 2 only after it has seen everybody arrive
 * at n + 1, and whoever is at n + 1 has finished reading the records of n. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "control.h"
#include "epcy/host.h"
#include "pool.h"
#include "sleep.h"

enum {
  STATUS_BYTES = EPCY_LINE_BYTES,
  BELL_AT = STATUS_BYTES,
  WORDS_AT = BELL_AT + EPCY_LINE_BYTES,
  RECORDS_AT = WORDS_AT + EPCY_NUM_WORDS * EPCY_LINE_BYTES
};
_Static_assert(sizeof(epcy_status) <= STATUS_BYTES && STATUS_BYTES == EPCY_GAUGES_AT, "the status fits in its line");
_Static_assert(EPCY_NUM_OPS <= EPCY_METER_OPS, "a meter has room for every operation");

int64_t epcy_record_bytes(const epcy_shape *s) {
  return epcy_round_up((int64_t)sizeof(epcy_record) + (s->num_ranks + s->num_experts) * 8, EPCY_LINE_BYTES);
}

static int64_t masks_at(const epcy_shape *s) { return RECORDS_AT + 2 * epcy_record_bytes(s); }

static int64_t wire_at(const epcy_shape *s) {
  return epcy_round_up(masks_at(s) + s->num_ranks * (int64_t)sizeof(uint64_t), EPCY_PAGE_BYTES);
}

int64_t epcy_host_control_bytes(const epcy_shape *s) { return wire_at(s) + epcy_low_latency_wire_bytes(s); }

char *epcy_host_wire(const epcy_host *h, int64_t rank) { return h->base[rank] + wire_at(&h->shape); }

uint64_t *epcy_host_without(const epcy_host *h, int64_t rank) {
  return (uint64_t *)(h->base[rank] + masks_at(&h->shape));
}

void epcy_host_mask(epcy_host *h, int64_t rank, int masked) {
  if (h->masked[rank] == masked) return;
  h->num_masked += masked ? 1 : -1;
  h->masked[rank] = (uint8_t)masked;
  /* That rank shall not take this one's later calls for a mistake, however far behind it is. */
  __atomic_store_n(epcy_host_without(h, h->rank) + rank, masked ? UINT64_MAX : h->epoch, __ATOMIC_RELEASE);
}

static _Atomic uint64_t *word_at(const epcy_host *h, int64_t rank, int word) {
  return (_Atomic uint64_t *)(h->base[rank] + WORDS_AT + word * EPCY_LINE_BYTES);
}

epcy_status *epcy_host_status(const epcy_host *h, int64_t rank) { return (epcy_status *)h->base[rank]; }

epcy_record *epcy_host_record(const epcy_host *h, int64_t rank, uint64_t epoch) {
  return (epcy_record *)(h->base[rank] + RECORDS_AT + (int64_t)(epoch & 1) * epcy_record_bytes(&h->shape));
}

int64_t *epcy_host_counts(const epcy_host *h, int64_t rank, uint64_t epoch) {
  return (int64_t *)(epcy_host_record(h, rank, epoch) + 1);
}

int64_t *epcy_host_expert_counts(const epcy_host *h, int64_t rank, uint64_t epoch) {
  return epcy_host_counts(h, rank, epoch) + h->shape.num_ranks;
}

uint64_t epcy_host_word(const epcy_host *h, int64_t rank, int word) {
  return atomic_load_explicit(word_at(h, rank, word), memory_order_acquire);
}

static epcy_bell *bell_of(const epcy_host *h, int64_t rank) { return (epcy_bell *)(h->base[rank] + BELL_AT); }

void epcy_host_touch(const epcy_host *h, int64_t rank, int64_t offset, int64_t num_bytes) {
  const volatile char *at = h->base[rank] + offset;
  for (int64_t i = 0; i < num_bytes; i += EPCY_PAGE_BYTES) (void)at[i];
  if (num_bytes > 0) (void)at[num_bytes - 1];
}

void epcy_host_store(epcy_host *h, int word, uint64_t value) {
  atomic_store_explicit(word_at(h, h->rank, word), value, memory_order_release);
  epcy_bell_fence();
  for (int64_t r = 0; r < h->shape.num_ranks; r++) epcy_bell_ring(bell_of(h, r));
}

void epcy_host_copy_word(epcy_host *h, int64_t rank, int word, uint64_t value) {
  atomic_store_explicit(word_at(h, rank, word), value, memory_order_release);
}

int64_t epcy_now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Other processes read a status at any moment: each field is stored whole, their combination may be a moment old. */
static void write_status(epcy_status *s, int op, int phase, uint64_t epoch, int64_t since_ns) {
  __atomic_store_n(&s->op, op, __ATOMIC_RELAXED);
  __atomic_store_n(&s->phase, phase, __ATOMIC_RELAXED);
  __atomic_store_n(&s->epoch, epoch, __ATOMIC_RELAXED);
  __atomic_store_n(&s->since_ns, since_ns, __ATOMIC_RELAXED);
  if (phase == EPCY_PHASE_ARRIVAL) __atomic_store_n(&s->num_calls[op], s->num_calls[op] + 1, __ATOMIC_RELAXED);
}

/* What a call did in the phase that ends; -1: between calls. */
static int span_of(int op, int phase) {
  const int low_latency = op == EPCY_OP_LOW_LATENCY_DISPATCH || op == EPCY_OP_LOW_LATENCY_COMBINE;
  switch (phase) {
    case EPCY_PHASE_ARRIVAL: return low_latency ? EPCY_SPAN_SEND : EPCY_SPAN_EXCHANGE;
    case EPCY_PHASE_DATA: return op == EPCY_OP_DISPATCH ? EPCY_SPAN_SEND : EPCY_SPAN_REDUCE;
    case EPCY_PHASE_COMPLETION:
      return !low_latency ? EPCY_SPAN_WAIT : op == EPCY_OP_LOW_LATENCY_DISPATCH ? EPCY_SPAN_FAN_OUT : EPCY_SPAN_REDUCE;
    default: return EPCY_SPAN_SEND; /* opened before its first phase: rows were put where others find them */
  }
}

static void measure_phase(epcy_host *h, int op, int left, int entered, int64_t now) {
  epcy_meter *m = h->meter;
  if (m->is_open) epcy_meter_span(m, span_of(m->op, left), now);
  if (entered == EPCY_PHASE_IDLE) epcy_meter_end(m, now);
  else if (!m->is_open) epcy_meter_begin(m, op, h->epoch, now);
  else if (entered == EPCY_PHASE_ARRIVAL) m->epoch = h->epoch;
}

void epcy_host_phase(epcy_host *h, int op, int phase) {
  const int64_t now = epcy_now_ns();
  epcy_status *status = epcy_host_status(h, h->rank);
  if (h->meter) measure_phase(h, op, status->phase, phase, now);
  write_status(status, op, phase, h->epoch, now);
  if (h->page) write_status(h->page, op, phase, h->epoch, now);
}

void epcy_host_open_call(epcy_host *h, int op) {
  if (h->meter) epcy_meter_begin(h->meter, op, h->epoch + 1, epcy_now_ns());
}

void epcy_host_span(epcy_host *h, int span) {
  if (h->meter) epcy_meter_span(h->meter, span, epcy_now_ns());
}

static inline void pause_core(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* Whether a rank has left this call or one before it: its word is the first call that it is not, or not wholly, in. */
static int any_broken(const epcy_host *h, uint64_t epoch) {
  for (int64_t r = 0; r < h->shape.num_ranks; r++) {
    const uint64_t first = epcy_host_word(h, r, EPCY_WORD_BROKEN);
    if (first && first <= epoch && !h->masked[r]) return 1;
  }
  return 0;
}

enum { YIELD_NS = 30000, SLEEP_NS = 20000000 };

int epcy_host_wait(const epcy_host *h, int word, uint64_t value, int64_t slice_ns) {
  const int64_t num_ranks = h->shape.num_ranks;
  const int64_t start = epcy_now_ns(), spin_ns = (int64_t)(h->spin_us * 1000.0);
  int64_t next = 0, elapsed = 0; /* ranks before `next` are known to have come */
  int64_t since = start;         /* when this rank began to wait for `next` */
  for (int64_t turn = 1;; turn++) {
    const int64_t late = next;
    while (next < num_ranks && (epcy_host_word(h, next, word) >= value || h->masked[next])) next++;
    if (h->meter && turn > 1 && next > late) {
      const int64_t now = epcy_now_ns();
      epcy_meter_waited(h->meter, late, now - since);
      since = now;
    }
    if (next == num_ranks) break;
    if (elapsed < spin_ns) { /* it will come at once: keep the core */
      pause_core();
      if (turn % 32) continue;
    } else if (elapsed < spin_ns + YIELD_NS) { /* somebody may need this core to get here */
      sched_yield();
    } else { /* it takes longer: leave the cores to those who work */
      epcy_bell *bell = bell_of(h, h->rank);
      const uint32_t rung = epcy_bell_begin(bell);
      const int64_t left = slice_ns - elapsed + 1;
      if (epcy_host_word(h, next, word) < value) epcy_bell_sleep(bell, rung, left < SLEEP_NS ? left : SLEEP_NS);
      epcy_bell_end(bell);
    }
    if (word != EPCY_WORD_RESET && any_broken(h, value)) return EPCY_WAIT_BROKEN;
    elapsed = epcy_now_ns() - start;
    if (elapsed > slice_ns) {
      if (h->meter) epcy_meter_waited(h->meter, next, start + elapsed - since);
      return EPCY_WAIT_PENDING;
    }
  }
  /* Whoever gave up on this call has left it: its memory must not be touched any more. */
  if (word == EPCY_WORD_ARRIVED && any_broken(h, value)) return EPCY_WAIT_BROKEN;
  return EPCY_WAIT_DONE;
}

int epcy_host_open(epcy_host *h, double spin_us, int num_threads) {
  h->area = epcy_area_layout(&h->shape);
  h->heap = epcy_heap_layout(&h->shape, epcy_host_control_bytes(&h->shape));
  h->epoch = 0;
  h->spin_us = spin_us;
  h->pool = NULL;
  h->num_threads = 1;
  h->chunk_tokens = EPCY_CHUNK_TOKENS;
  h->stream_bytes = EPCY_STREAM_BYTES;
  h->scratch = malloc(sizeof(int64_t) * (size_t)(h->shape.num_ranks + h->shape.num_experts));
  h->masked = calloc((size_t)h->shape.num_ranks, 1);
  h->num_masked = 0;
  if (!h->scratch || !h->masked) return ENOMEM;
  memset(h->base[h->rank], 0, (size_t)wire_at(&h->shape));
  for (int i = 0; h->shape.num_low_latency_tokens && i < EPCY_NUM_LOW_LATENCY_KINDS * EPCY_NUM_SLOTS; i++)
    memset(epcy_low_latency_header_at(h, h->rank, i / EPCY_NUM_SLOTS, i % EPCY_NUM_SLOTS), 0,
           sizeof(epcy_low_latency_header));
  return epcy_host_use_threads(h, num_threads);
}

int epcy_host_use_threads(epcy_host *h, int num_threads) {
  if (num_threads > h->num_threads) {
    struct epcy_pool *larger;
    const int error = epcy_pool_open(&larger, num_threads);
    if (error) return error;
    epcy_pool_close(h->pool);
    h->pool = larger;
    h->num_threads = num_threads;
  }
  if (h->pool) epcy_pool_limit(h->pool, num_threads);
  return 0;
}

void epcy_host_close(epcy_host *h) {
  epcy_pool_close(h->pool);
  free(h->scratch);
  free(h->masked);
  h->masked = NULL;
  h->pool = NULL;
  h->scratch = NULL;
}
