/* What a Buffer counts of itself, cheap enough to be always on: times of calls and of their phases in log-scale
 * histograms, the last spans in a ring, tokens and waits. One writer, the thread in a call; who reads meanwhile may see
 * numbers of two moments. Compiled by gcc and by nvcc: kernels put their times into the same buckets. */
#ifndef EPCY_METER_H
#define EPCY_METER_H

#include <stdint.h>

#include "epcy/layout.h"

#define EPCY_METER_OPS 8 /* at least EPCY_NUM_OPS */

enum epcy_span { /* SPANS in epcy/stats.py */
                 EPCY_SPAN_CALL,
                 EPCY_SPAN_COUNT,
                 EPCY_SPAN_EXCHANGE,
                 EPCY_SPAN_SEND,
                 EPCY_SPAN_WAIT,
                 EPCY_SPAN_FAN_OUT,
                 EPCY_SPAN_REDUCE,
                 EPCY_NUM_SPANS
};

#define EPCY_SUB_BUCKETS 16  /* of an octave: the middle of a bucket is within 3.2 % of all that falls in */
#define EPCY_NUM_BUCKETS 592 /* up to 2^40 ns, 18 minutes */

/* Below 16 ns a bucket each; then 16 buckets for each power of two. */
EPCY_INLINE int epcy_bucket_of(int64_t ns) {
  if (ns < EPCY_SUB_BUCKETS) return ns < 0 ? 0 : (int)ns;
#ifdef __CUDA_ARCH__
  const int octave = 63 - __clzll(ns);
#else
  const int octave = 63 - __builtin_clzll((unsigned long long)ns);
#endif
  const int bucket = (octave - 3) * EPCY_SUB_BUCKETS + (int)(ns >> (octave - 4) & (EPCY_SUB_BUCKETS - 1));
  return bucket < EPCY_NUM_BUCKETS ? bucket : EPCY_NUM_BUCKETS - 1;
}

/* The least ns that falls into a bucket. */
EPCY_INLINE int64_t epcy_bucket_start(int bucket) {
  if (bucket < EPCY_SUB_BUCKETS) return bucket;
  const int octave = bucket / EPCY_SUB_BUCKETS + 3;
  return (int64_t)(EPCY_SUB_BUCKETS + bucket % EPCY_SUB_BUCKETS) << (octave - 4);
}

typedef struct epcy_histogram {
  int64_t count, sum_ns, min_ns, max_ns;
  uint32_t bucket[EPCY_NUM_BUCKETS];
} epcy_histogram;

/* A call, or a phase of one. Of a call with a hook there are two of kind CALL. */
typedef struct epcy_event {
  int64_t start_ns, end_ns; /* CLOCK_MONOTONIC */
  uint64_t epoch;           /* of the call; equal on all ranks */
  int32_t op, span;
} epcy_event;

/* Running sums that other processes read: they lie in the status page, behind its first EPCY_GAUGES_AT bytes. */
typedef struct epcy_gauges {
  int64_t first_expert, num_experts; /* whose counts follow */
  int64_t num_calls, busy_ns, wait_ns;
  int64_t tokens_sent, tokens_received, bytes_moved; /* between ranks */
  /* followed by int64_t experts[num_experts]: tokens that came for each */
} epcy_gauges;
#define EPCY_GAUGES_AT 128

typedef struct epcy_meter {
  epcy_histogram (*times)[EPCY_NUM_SPANS]; /* [EPCY_METER_OPS] */
  epcy_event *ring;                        /* the last `capacity` spans, a power of two */
  uint64_t num_events, capacity;
  int64_t *wait_ns;                     /* [R] that this rank waited for each other */
  int64_t *tokens_to, *tokens_from;     /* [R] */
  int64_t most_rows[3][EPCY_NUM_AREAS]; /* that an area ever held: receive, combine, low-latency receive */
  epcy_gauges *gauges, *own_gauges;     /* the latter: where there is no page */
  int64_t num_ranks;
  int64_t node_bytes[2]; /* sent to ranks of other nodes: rows with their scales, and what goes with them */
  /* The call in progress. */
  int64_t start_ns, last_ns;
  uint64_t epoch;
  int32_t op, is_open;
} epcy_meter;

EPCY_INLINE int64_t *epcy_gauge_experts(epcy_gauges *g) { return (int64_t *)(g + 1); }

EPCY_INLINE int64_t epcy_gauges_bytes(int64_t num_experts) { return (int64_t)sizeof(epcy_gauges) + num_experts * 8; }

EPCY_INLINE void epcy_meter_record(epcy_meter *m, int op, int span, int64_t start_ns, int64_t end_ns, uint64_t epoch) {
  epcy_histogram *h = &m->times[op][span];
  const int64_t ns = end_ns - start_ns;
  if (h->count == 0 || ns < h->min_ns) h->min_ns = ns;
  if (ns > h->max_ns) h->max_ns = ns;
  h->count++;
  h->sum_ns += ns;
  h->bucket[epcy_bucket_of(ns)]++;
  epcy_event *e = &m->ring[m->num_events & (m->capacity - 1)];
  e->start_ns = start_ns, e->end_ns = end_ns, e->epoch = epoch, e->op = op, e->span = span;
  m->num_events++;
}

EPCY_INLINE void epcy_meter_begin(epcy_meter *m, int op, uint64_t epoch, int64_t now_ns) {
  m->op = op, m->epoch = epoch, m->start_ns = m->last_ns = now_ns, m->is_open = 1;
}

/* What was done since the last span of this call. */
EPCY_INLINE void epcy_meter_span(epcy_meter *m, int span, int64_t now_ns) {
  if (!m->is_open) return;
  epcy_meter_record(m, m->op, span, m->last_ns, now_ns, m->epoch);
  m->last_ns = now_ns;
}

EPCY_INLINE void epcy_meter_end(epcy_meter *m, int64_t now_ns) {
  if (!m->is_open) return;
  epcy_meter_record(m, m->op, EPCY_SPAN_CALL, m->start_ns, now_ns, m->epoch);
  m->gauges->num_calls++;
  m->gauges->busy_ns += now_ns - m->start_ns;
  m->is_open = 0;
}

EPCY_INLINE void epcy_meter_waited(epcy_meter *m, int64_t rank, int64_t ns) {
  m->wait_ns[rank] += ns;
  m->gauges->wait_ns += ns;
}

/* Tokens of a dispatch, to and from each rank, and for each local expert. */
EPCY_INLINE void epcy_meter_tokens(epcy_meter *m, const int64_t *to, const int64_t *from, const int64_t *experts) {
  epcy_gauges *g = m->gauges;
  int64_t *all = epcy_gauge_experts(g);
  for (int64_t r = 0; r < m->num_ranks; r++) {
    m->tokens_to[r] += to[r], g->tokens_sent += to[r];
    m->tokens_from[r] += from[r], g->tokens_received += from[r];
  }
  for (int64_t e = 0; e < g->num_experts; e++) all[e] += experts[e];
}

EPCY_INLINE void epcy_meter_rows(epcy_meter *m, int region, int area, int64_t rows) {
  if (rows > m->most_rows[region][area]) m->most_rows[region][area] = rows;
}

#ifdef __cplusplus
extern "C" {
#endif

/* src/meter/meter.c */
epcy_meter *epcy_meter_open(int64_t num_ranks, int64_t first_expert, int64_t num_experts, int64_t num_events);
void epcy_meter_close(epcy_meter *m);
/* Another ring, of at least num_events; spans kept so far are lost. 0, or an errno. */
int epcy_meter_resize(epcy_meter *m, int64_t num_events);
/* Let the running sums lie in `page` (or again in memory of its own: NULL); they go on. */
void epcy_meter_attach(epcy_meter *m, char *page);
/* Forget everything but the running sums, the ring and the call in progress. */
void epcy_meter_reset(epcy_meter *m);
/* The ns below which a share of the spans lie: the middle of its bucket. */
int64_t epcy_histogram_quantile(const epcy_histogram *h, double share);

#ifdef __cplusplus
}
#endif
#endif
