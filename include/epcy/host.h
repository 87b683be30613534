/* The host backend: C kernels over shared memory. One rank enters each call with a record in its own control block and
 * an epoch; everybody reads everybody's record. No MPI here. */
#ifndef EPCY_HOST_H
#define EPCY_HOST_H

#include <stdint.h>

#include "epcy/layout.h"
#include "epcy/meter.h"
#include "epcy/status.h"

#define EPCY_TEXT_BYTES 512

enum epcy_dtype { EPCY_BF16, EPCY_FP16, EPCY_FP32, EPCY_FP8, EPCY_NUM_DTYPES };
enum epcy_layout { EPCY_LAYOUT_RANK, EPCY_LAYOUT_EXPERT };
enum epcy_word {
  EPCY_WORD_ARRIVED,
  EPCY_WORD_DONE,
  EPCY_WORD_BROKEN,
  EPCY_WORD_RESET,
  EPCY_WORD_EPOCH,
  EPCY_WORD_RECEIVED_DISPATCH, /* low latency: every dispatch up to this call is received here */
  EPCY_WORD_RECEIVED_COMBINE,  /* and every combine */
  EPCY_NUM_WORDS
};
enum epcy_wait { EPCY_WAIT_DONE, EPCY_WAIT_PENDING, EPCY_WAIT_BROKEN };

/* What a rank says when it enters a call. Fields up to `has_weights`, `alignment` and `routing` must be equal on all
 * ranks. */
typedef struct epcy_record {
  uint64_t epoch; /* of the call */
  int32_t op, dtype, layout, cached, has_weights;
  int32_t refused; /* this rank takes part without data; `text` says why */
  int32_t waits;   /* its host waits for the counts, so an overflow is refused and not clipped */
  int32_t thread;  /* whose call it is, with the option `check` */
  int64_t alignment;
  uint64_t routing;       /* epoch of the dispatch that made the handle */
  int64_t num_tokens;     /* T */
  int64_t limit;          /* rows it can take */
  int64_t area_offset;    /* dispatch: the receive area it gives; combine: where y lies */
  int64_t weights_offset; /* combine: where its (N, K) weights lie */
  char text[EPCY_TEXT_BYTES];
  /* followed by int64_t counts[R], expert_counts[E] */
} epcy_record;

/* Lane `lane` of a token goes to row `row` of rank `rank`; a token's K routes are ordered by (rank, lane), unused
 * lanes last with rank -1. Row -1: clipped by the receiver's limit. */
typedef struct epcy_route {
  int32_t rank, lane, local_expert, unused;
  int64_t row;
} epcy_route;

/* What a rank says of a low-latency call. Each kind of call has two, and keeps one until all ranks have received its
 * call. Fields up to `routing` must be equal on all ranks. */
typedef struct epcy_low_latency_header {
  uint64_t epoch; /* of the call; 0: none yet */
  int32_t op, dtype, use_fp8, round_scale, use_ue8m0, reduction, use_logfmt, has_weights;
  uint64_t routing;   /* combine: epoch of the dispatch that made the handle */
  int64_t num_tokens; /* dispatch: T */
  int64_t y_offset;   /* combine: where the experts' rows lie */
  int32_t refused, unused;
  char text[EPCY_TEXT_BYTES];
  /* followed by int32_t bases[R][L]: combine: where, at each expert, its dispatch placed the rows of each source; or -1 */
} epcy_low_latency_header;
enum epcy_low_latency_kind { EPCY_LOW_LATENCY_DISPATCH, EPCY_LOW_LATENCY_COMBINE, EPCY_NUM_LOW_LATENCY_KINDS };
#define EPCY_NUM_SLOTS 2

struct epcy_pool;

/* One Buffer of one process. */
typedef struct epcy_host {
  epcy_shape shape;
  epcy_area area;
  epcy_heap heap;
  int64_t rank;
  char **base; /* base[r]: rank r's allocation as mapped here; of a rank of another node a copy of its control block */
  const uint8_t *is_remote; /* [R]: ranks of other nodes; NULL: there are none */
  uint64_t epoch;           /* of the last call this rank entered */
  double spin_us;
  epcy_status *page; /* the status file, or NULL */
  int64_t *scratch;  /* R + E numbers for the call in progress */
  uint8_t *masked;   /* [R]: ranks that this one goes on without */
  int64_t num_masked;
  struct epcy_pool *pool; /* NULL: one thread */
  int num_threads;        /* of the pool, the caller among them */
  int64_t chunk_tokens;   /* that a thread takes at a time */
  int64_t stream_bytes;   /* a dispatch that sends so many, or more, passes the caches by */
  epcy_meter *meter;      /* NULL: nothing is counted */
} epcy_host;

/* A dispatch as the kernels need it. */
typedef struct epcy_host_dispatch {
  const char *x;
  int64_t x_stride_bytes, row_bytes; /* row_bytes: of this payload */
  const char *scales;                /* NULL, or (T, num_scales) float32 */
  int64_t num_scales;
  const float *topk_weights; /* NULL, or (T, K) */
  int64_t num_tokens;
  epcy_route *routes;      /* (T, K), owned by the handle */
  int64_t num_rows;        /* out: rows of this rank, unclipped */
  int64_t *expert_counts;  /* out: (L,) of this rank, unpadded */
  int64_t *expert_offsets; /* out: (L + 1,) starts of the padded groups */
  int64_t fill_to;         /* rows up to here that get topk_idx -1 (worst case) */
} epcy_host_dispatch;

/* A combine. */
typedef struct epcy_host_combine {
  const epcy_route *routes;
  int64_t num_tokens;
  int32_t dtype;
  const float *topk_weights; /* expert layout: NULL or the source's (T, K) */
  const char *bias[2];       /* NULL or (T, H) of the payload type */
  char *out;                 /* (T, H) */
  float *out_weights;        /* rank layout: NULL or (T, K) */
} epcy_host_combine;

/* A first wrong id of topk_idx. */
typedef struct epcy_bad_id {
  int64_t num_bad, token, lane, value;
} epcy_bad_id;

/* The sending half of a low-latency dispatch: rows into this rank's own slot. */
typedef struct epcy_low_latency_send {
  const char *x;
  int64_t x_stride_bytes, num_tokens;
  const void *topk_idx;
  int32_t is_int64, dtype, use_fp8, round_scale, use_ue8m0, slot;
  epcy_route *routes; /* (T, K), owned by the handle; rows are ordinals until the call is received */
  epcy_bad_id bad;    /* out */
} epcy_low_latency_send;

/* The receiving half: rows out of everybody's slots. */
typedef struct epcy_low_latency_receive {
  uint64_t epoch;
  char *payload, *scales; /* of the receive area; scales NULL without use_fp8 */
  int64_t *counts;        /* out: (L,) */
  int64_t row_bytes, scale_bytes;
  epcy_route *routes; /* the source's own, which get their rows */
  int64_t num_tokens;
  int64_t *tokens;  /* out: (R,) rows to each rank, then (R,) from each; one for each expert */
  uint8_t *sources; /* [R] in: whose rows are wanted; out: whose came, the others' slots were given away meanwhile */
  int32_t *bases;   /* out: (R, L) rows at each local expert before those of each source; -1: nothing came from it */
  int32_t
      *before; /* out: (E,) rows that this rank takes to lie before its own at each expert, if all ranks see alike */
} epcy_low_latency_receive;

/* A low-latency combine: `sum` with expert weights, rows from where the headers say. */
typedef struct epcy_low_latency_combine {
  uint64_t epoch;
  epcy_host_combine sum;
  int32_t at_source, use_logfmt;
  const uint8_t *from; /* [R] the ranks that rows come from */
} epcy_low_latency_combine;

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* control.c: words, records, waits, status. */
int64_t epcy_host_control_bytes(const epcy_shape *shape);
#define EPCY_CHUNK_TOKENS 16
#define EPCY_STREAM_BYTES (2 << 20)
int epcy_host_open(epcy_host *h, double spin_us, int num_threads); /* 0, or an errno */
void epcy_host_close(epcy_host *h);
/* Look at every page of a range of a rank's memory, so that this process has them: nothing is changed. */
void epcy_host_touch(const epcy_host *h, int64_t rank, int64_t offset, int64_t num_bytes);
int epcy_host_use_threads(epcy_host *h, int num_threads); /* from now on; 0, or an errno */
char *epcy_host_wire(const epcy_host *h, int64_t rank);   /* what low_latency.c lays out */
epcy_status *epcy_host_status(const epcy_host *h, int64_t rank);
epcy_record *epcy_host_record(const epcy_host *h, int64_t rank, uint64_t epoch);
int64_t *epcy_host_counts(const epcy_host *h, int64_t rank, uint64_t epoch);
int64_t *epcy_host_expert_counts(const epcy_host *h, int64_t rank, uint64_t epoch);
uint64_t epcy_host_word(const epcy_host *h, int64_t rank, int word);
void epcy_host_store(epcy_host *h, int word, uint64_t value);
void epcy_host_phase(epcy_host *h, int op, int phase);
void epcy_host_open_call(epcy_host *h, int op); /* a call's time begins here, before its first phase */
void epcy_host_span(epcy_host *h, int span);    /* what was done since the last span, or phase, of this call */
/* The last low-latency call that `rank` goes on in without another one; ~0: it does so still; 0: never. [R] */
uint64_t *epcy_host_without(const epcy_host *h, int64_t rank);
void epcy_host_mask(epcy_host *h, int64_t rank, int masked);
int64_t epcy_now_ns(void); /* by this machine's clock, which no other one's agrees with */
/* Wait until `word` of every rank that is not masked is at least `value`; at most slice_ns. */
int epcy_host_wait(const epcy_host *h, int word, uint64_t value, int64_t slice_ns);

/* dispatch.c */
void epcy_host_count(const epcy_host *h, const void *topk_idx, int is_int64, int64_t num_tokens, int layout,
                     epcy_route *routes, int64_t *counts, int64_t *expert_counts, epcy_bad_id *bad);
int64_t epcy_host_rows(const epcy_host *h, int64_t rank, int64_t *limit); /* rows that come to `rank` in this call */
void epcy_host_place(const epcy_host *h, epcy_host_dispatch *call);
/* Write rows to their places in this node. */
void epcy_host_send(epcy_host *h, const epcy_host_dispatch *call);
/* Fill this rank's rows that nobody sends: padding, and what lies past the count in worst case. */
void epcy_host_fill(const epcy_host *h, const epcy_host_dispatch *call);

/* combine.c */
void epcy_host_combine_rows(epcy_host *h, const epcy_host_combine *call);

/* low_latency.c */
int64_t epcy_low_latency_wire_bytes(const epcy_shape *shape); /* headers and slots; 0 where the mode is off */
epcy_low_latency_header *epcy_low_latency_header_at(const epcy_host *h, int64_t rank, int kind, int slot);
/* That rank's header of this call, or NULL: it is in another call. Its `arrived` word has been seen. */
const epcy_low_latency_header *epcy_low_latency_find(const epcy_host *h, int64_t rank, int kind, uint64_t epoch);
void epcy_host_low_latency_send(epcy_host *h, epcy_low_latency_send *call);
int32_t *epcy_low_latency_bases(const epcy_host *h, int64_t rank, int kind, int slot);
/* Give a header its call: whoever sees `arrived` finds it. */
void epcy_low_latency_publish(epcy_low_latency_header *header, uint64_t epoch);
/* Let nobody take a header, or what it speaks of, for that of its call any more. */
void epcy_low_latency_invalidate(epcy_host *h, int kind, uint64_t epoch);
/* -1, or the rank whose lists make no sense. */
int64_t epcy_host_low_latency_receive(epcy_host *h, const epcy_low_latency_receive *call);
/* Copy the experts' rows (L, R * M'), of each expert the first counts[l]. */
void epcy_host_low_latency_stage(epcy_host *h, char *to, const char *from, const int64_t *counts, int64_t row_bytes);

/* combine.c */
/* -1, or a rank that gave its rows' memory away meanwhile: the sums are worth nothing. */
int64_t epcy_host_low_latency_combine(epcy_host *h, const epcy_low_latency_combine *call);

/* masks.c: low-latency combines without some ranks. */
typedef struct epcy_masked_routes {
  const epcy_route *given; /* (T, K) */
  epcy_route *routes;      /* out: rows as their owners placed them, -1: dropped */
  int64_t num_tokens;
  const uint8_t *from;   /* [R] the ranks that rows come from */
  const int32_t *before; /* (E,) of the dispatch */
  uint64_t epoch;        /* of the combine */
  int64_t *num_dropped;  /* out: [R] lanes that were sent and do not come back */
} epcy_masked_routes;
/* Whether any lane is dropped or moved. */
int epcy_host_mask_routes(const epcy_host *h, const epcy_masked_routes *call);
/* Scale the weights of tokens that lost lanes by (sum of all) / (sum of those that are left). */
void epcy_host_renormalize(const epcy_host *h, const epcy_route *routes, int64_t num_tokens, const float *weights,
                           float *out);

/* simd.c: casts between float32 and what travels; `level` 0 is the portable path. */
int epcy_simd_level(void);
int epcy_simd_limit(int level); /* use no more than `level`; returns what is used */
void epcy_cast_to_fp8(const void *x, int dtype, int64_t num_rows, int64_t hidden, int power_of_two, uint8_t *payload,
                      float *scales);
void epcy_cast_from_fp8(const uint8_t *payload, const float *scales, int64_t num_rows, int64_t hidden, int dtype,
                        void *out);

/* process.c */
void epcy_host_bound_exit(void);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
