/* Where things lie: the only place that computes offsets (inside the control region apart, which each backend lays out
 * for itself), compiled by gcc and by nvcc.
 *
 * A Buffer's symmetric allocation is the same on every rank:
 *
 *   control | receive area 0 | receive area 1 | combine area 0 | combine area 1
 *           | low-latency receive area 0, 1 | low-latency combine area 0, 1
 *
 * Receive and combine areas are  payload rows | scales | topk_idx | topk_weights.  The low-latency areas are there with
 * `low_latency_mode` alone; a receive area of theirs is  payload rows | scales | counts,  a combine area is rows.  All
 * offsets are in bytes from the start of the rank's allocation and 64-bit. */
#ifndef EPCY_LAYOUT_H
#define EPCY_LAYOUT_H

#include <stdint.h>

#ifdef __CUDACC__
#define EPCY_INLINE static inline __host__ __device__
#else
#define EPCY_INLINE static inline
#endif

#define EPCY_PAGE_BYTES 4096
#define EPCY_LINE_BYTES 128  /* two cache lines: what the adjacent-line prefetcher of x86 fetches together */
#define EPCY_SCALE_GROUP 128 /* elements that share one FP8 scale */
#define EPCY_NUM_AREAS 2     /* of each kind, in turn */
#define EPCY_GUARD_BYTES 128 /* the last of each region: nothing lies there */

/* What the ranks agree on when a Buffer is made. */
typedef struct epcy_shape {
  int64_t num_ranks;              /* R */
  int64_t num_experts;            /* E */
  int64_t num_topk;               /* K */
  int64_t num_max_tokens;         /* M: tokens a rank may send in one call */
  int64_t hidden;                 /* H: elements of a row */
  int64_t row_bytes;              /* of the widest payload */
  int64_t num_rows;               /* rows of one area */
  int64_t num_low_latency_tokens; /* M': tokens a rank may send in one low-latency call; 0: the mode is off */
} epcy_shape;

/* Offsets inside an area. */
typedef struct epcy_area {
  int64_t payload, scales, topk_idx, topk_weights, bytes;
} epcy_area;

/* Offsets inside a low-latency receive area. */
typedef struct epcy_low_latency_area {
  int64_t payload, scales, counts, bytes;
} epcy_low_latency_area;

/* Offsets of the regions inside a rank's allocation. */
typedef struct epcy_heap {
  int64_t control, receive[EPCY_NUM_AREAS], combine[EPCY_NUM_AREAS];
  int64_t low_latency_x[EPCY_NUM_AREAS], low_latency_y[EPCY_NUM_AREAS]; /* where rows are received, and given back */
  int64_t bytes;
} epcy_heap;

EPCY_INLINE int64_t epcy_round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

EPCY_INLINE int64_t epcy_num_local_experts(const epcy_shape *s) { return s->num_experts / s->num_ranks; }

EPCY_INLINE int64_t epcy_num_scales(int64_t hidden) { return (hidden + EPCY_SCALE_GROUP - 1) / EPCY_SCALE_GROUP; }

EPCY_INLINE epcy_area epcy_area_layout(const epcy_shape *s) {
  epcy_area a;
  a.payload = 0;
  a.scales = epcy_round_up(a.payload + s->num_rows * s->row_bytes, EPCY_LINE_BYTES);
  a.topk_idx = epcy_round_up(a.scales + s->num_rows * epcy_num_scales(s->hidden) * 4, EPCY_LINE_BYTES);
  a.topk_weights = epcy_round_up(a.topk_idx + s->num_rows * s->num_topk * 8, EPCY_LINE_BYTES);
  a.bytes = epcy_round_up(a.topk_weights + s->num_rows * s->num_topk * 4 + EPCY_GUARD_BYTES, EPCY_PAGE_BYTES);
  return a;
}

/* Rows of a low-latency area: L groups, each with room for every token of every rank. */
EPCY_INLINE int64_t epcy_num_low_latency_rows(const epcy_shape *s) {
  return epcy_num_local_experts(s) * s->num_ranks * s->num_low_latency_tokens;
}

/* The scales are float32 for each 128 elements, or int32 for each 512; the counts are int64 (L,). */
EPCY_INLINE epcy_low_latency_area epcy_low_latency_area_layout(const epcy_shape *s) {
  const int64_t rows = epcy_num_low_latency_rows(s);
  epcy_low_latency_area a;
  a.payload = 0;
  a.scales = epcy_round_up(a.payload + rows * s->row_bytes, EPCY_LINE_BYTES);
  a.counts = epcy_round_up(a.scales + rows * epcy_num_scales(s->hidden) * 4, EPCY_LINE_BYTES);
  const int64_t end = a.counts + epcy_num_local_experts(s) * 8 + EPCY_GUARD_BYTES;
  a.bytes = s->num_low_latency_tokens ? epcy_round_up(end, EPCY_PAGE_BYTES) : 0;
  return a;
}

EPCY_INLINE int64_t epcy_low_latency_area_bytes(const epcy_shape *s) { return epcy_low_latency_area_layout(s).bytes; }

EPCY_INLINE int64_t epcy_low_latency_input_bytes(const epcy_shape *s) {
  if (!s->num_low_latency_tokens) return 0;
  return epcy_round_up(epcy_num_low_latency_rows(s) * s->row_bytes + EPCY_GUARD_BYTES, EPCY_PAGE_BYTES);
}

EPCY_INLINE epcy_heap epcy_heap_layout(const epcy_shape *s, int64_t control_bytes) {
  epcy_heap h;
  const int64_t area = epcy_area_layout(s).bytes;
  int64_t at = epcy_round_up(control_bytes + EPCY_GUARD_BYTES, EPCY_PAGE_BYTES);
  h.control = 0;
  for (int i = 0; i < EPCY_NUM_AREAS; i++, at += area) h.receive[i] = at;
  for (int i = 0; i < EPCY_NUM_AREAS; i++, at += area) h.combine[i] = at;
  for (int i = 0; i < EPCY_NUM_AREAS; i++, at += epcy_low_latency_area_bytes(s)) h.low_latency_x[i] = at;
  for (int i = 0; i < EPCY_NUM_AREAS; i++, at += epcy_low_latency_input_bytes(s)) h.low_latency_y[i] = at;
  h.bytes = at;
  return h;
}

/* The rows of an area when the user names no number: all tokens of all ranks in the rank layout; in the expert layout
 * twice a balanced load, never more than can come, plus padding to 128 rows an expert. Rows of `num_max_recv_tokens`
 * in the options table. */
EPCY_INLINE int64_t epcy_default_num_rows(const epcy_shape *s) {
  const int64_t local = epcy_num_local_experts(s);
  const int64_t lanes = s->num_topk < local ? s->num_topk : local;
  const int64_t rank_rows = s->num_ranks * s->num_max_tokens, worst = rank_rows * lanes;
  int64_t expert_rows = 2 * s->num_max_tokens * s->num_topk;
  if (expert_rows > worst) expert_rows = worst;
  expert_rows += 128 * local;
  return rank_rows > expert_rows ? rank_rows : expert_rows;
}

/* The bits that all ranks see alike: which rank an expert lives on, and its number there. */
EPCY_INLINE int64_t epcy_rank_of_expert(int64_t expert, int64_t num_local) { return expert / num_local; }
EPCY_INLINE int64_t epcy_local_expert(int64_t expert, int64_t num_local) { return expert % num_local; }

/* Rows that a group of `count` takes in the expert layout. */
EPCY_INLINE int64_t epcy_padded(int64_t count, int64_t alignment) { return epcy_round_up(count, alignment); }

#endif
