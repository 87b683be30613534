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

#include "epcy/host.h"
#include "pool.h"
#include "sleep.h"

enum {
  STATUS_BYTES = EPCY_LINE_BYTES,
  BELL_AT = STATUS_BYTES,
  WORDS_AT = BELL_AT + EPCY_LINE_BYTES,
  RECORDS_AT = WORDS_AT + EPCY_NUM_WORDS * EPCY_LINE_BYTES
};
_Static_assert(sizeof(epcy_status) <= STATUS_BYTES, "the status fits in its line");

static int64_t record_bytes(const epcy_shape *s) {
  return epcy_round_up((int64_t)sizeof(epcy_record) + (s->num_ranks + s->num_experts) * 8, EPCY_LINE_BYTES);
}

static int64_t masks_at(const epcy_shape *s) { return RECORDS_AT + 2 * record_bytes(s); }

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
  return (epcy_record *)(h->base[rank] + RECORDS_AT + (int64_t)(epoch & 1) * record_bytes(&h->shape));
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

void epcy_host_store(epcy_host *h, int word, uint64_t value) {
  atomic_store_explicit(word_at(h, h->rank, word), value, memory_order_release);
  epcy_bell_fence();
  for (int64_t r = 0; r < h->shape.num_ranks; r++) epcy_bell_ring(bell_of(h, r));
}

static int64_t now_ns(void) {
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

void epcy_host_phase(epcy_host *h, int op, int phase) {
  const int64_t now = now_ns();
  write_status(epcy_host_status(h, h->rank), op, phase, h->epoch, now);
  if (h->page) write_status(h->page, op, phase, h->epoch, now);
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
  const int64_t start = now_ns(), spin_ns = (int64_t)(h->spin_us * 1000.0);
  int64_t next = 0, elapsed = 0; /* ranks before `next` are known to have come */
  for (int64_t turn = 1;; turn++) {
    while (next < num_ranks && (epcy_host_word(h, next, word) >= value || h->masked[next])) next++;
    if (next == num_ranks) break;
    if (elapsed < spin_ns) { /* it will come at once: keep the core */
      pause_core();
      if (turn % 32) continue;
    } else if (elapsed < spin_ns + YIELD_NS) { /* somebody may need this core to get here */
      sched_yield();
    } else { /* it takes longer: leave the cores to those who work */
      epcy_bell *bell = bell_of(h, h->rank);
      const uint32_t rung = epcy_bell_begin(bell);
      if (epcy_host_word(h, next, word) < value) epcy_bell_sleep(bell, rung, SLEEP_NS);
      epcy_bell_end(bell);
    }
    if (word != EPCY_WORD_RESET && any_broken(h, value)) return EPCY_WAIT_BROKEN;
    elapsed = now_ns() - start;
    if (elapsed > slice_ns) return EPCY_WAIT_PENDING;
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
  h->scratch = malloc(sizeof(int64_t) * (size_t)(h->shape.num_ranks + h->shape.num_experts));
  h->masked = calloc((size_t)h->shape.num_ranks, 1);
  h->num_masked = 0;
  if (!h->scratch || !h->masked) return ENOMEM;
  memset(h->base[h->rank], 0, (size_t)wire_at(&h->shape));
  for (int i = 0; h->shape.num_low_latency_tokens && i < EPCY_NUM_LOW_LATENCY_KINDS * EPCY_NUM_SLOTS; i++)
    memset(epcy_low_latency_header_at(h, h->rank, i / EPCY_NUM_SLOTS, i % EPCY_NUM_SLOTS), 0,
           sizeof(epcy_low_latency_header));
  return num_threads > 1 ? epcy_pool_open(&h->pool, num_threads) : 0;
}

void epcy_host_close(epcy_host *h) {
  epcy_pool_close(h->pool);
  free(h->scratch);
  free(h->masked);
  h->masked = NULL;
  h->pool = NULL;
  h->scratch = NULL;
}
