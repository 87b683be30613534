/* The low-latency mode of the CUDA backend: what Cython, gcc and nvcc share.
 *
 * Rows travel in fixed slots of 128-byte lines: seven units of 16 bytes of the row, then {epoch, scale, -, -}. Whoever
 * polls a line sees from its own epoch that it has come, so nothing is counted, fenced or cleared before or after.
 * Everything that travels lies in two sets by the parity of the epoch; a sender of call n knows from the
 * acknowledgement words that its peers have received call n - 2. Dispatch and combine have epochs and sets of their
 * own. */
#ifndef EPCY_LOW_LATENCY_H
#define EPCY_LOW_LATENCY_H

#include "epcy/cuda.h"

#define EPCY_LINE_DATA 112                /* bytes of a row in a line */
#define EPCY_PART_LINES 64                /* lines of a row that a block of 512 threads carries */
#define EPCY_PART_BYTES (64 * 112)        /* 56 groups of 128 FP8 elements: a group never lies in two parts */
#define EPCY_LOGFMT_PIECE 512             /* bytes of a row that a warp encodes at a time */
#define EPCY_LOGFMT_PIECE_LINES 5         /* room for them: in LogFMT 2 or 3 lines, more with groups that travel raw */
#define EPCY_LOW_LATENCY_MAX_LOCAL 32766  /* local experts, so that a lane's place fits into 32 bits */
#define EPCY_LOW_LATENCY_MAX_TOKENS 65535 /* M', likewise */
#define EPCY_LOW_LATENCY_MAX_BLOCKS 1024  /* of a grid: each has a copy of the epoch */
#define EPCY_LOW_LATENCY_MIN_BLOCKS 32    /* even for one token: peers may send more */
#define EPCY_LOW_LATENCY_MAX_EXPERTS (1 << 20) /* 32 ranks' local experts: an id leaves room for a lane beside it */

enum epcy_low_latency_kind { EPCY_LOW_LATENCY_DISPATCH, EPCY_LOW_LATENCY_COMBINE };
enum epcy_low_latency_phases { EPCY_LOW_LATENCY_SEND = 1, EPCY_LOW_LATENCY_RECEIVE = 2 };

/* The options in a header, beside EPCY_HEADER_OP, _DTYPE, _ROUTING and _REFUSED. */
#define EPCY_LOW_LATENCY_FP8 0x40u
#define EPCY_LOW_LATENCY_ROUND_SCALE 0x80u
#define EPCY_LOW_LATENCY_UE8M0 0x100u
#define EPCY_LOW_LATENCY_SOURCE 0x200u /* reduction="source" */
#define EPCY_LOW_LATENCY_LOGFMT 0x400u
#define EPCY_LOW_LATENCY_WEIGHTS 0x800u
#define EPCY_LOW_LATENCY_RENORMALIZE 0x80000000u /* not compared: weights make up for lanes that are missing */

/* Offsets inside a rank's allocation; S = 2 sets, R ranks, K lanes, M' tokens. */
typedef struct epcy_low_latency_wire {
  int64_t headers; /* u64 [2 kinds][S][R][2]: (epoch, T), (epoch, options) of each rank */
  int64_t acks;    /* u64 [2 kinds][R]: the last epoch up to which that rank has received everything */
  int64_t without; /* u64 [2 kinds][R]: (epoch, 1) of the last call that a rank went on in without this one; 0: none */
  int64_t text;    /* char [2 kinds][S][R][512] */
  int64_t counts;  /* u64 [S][R][L]: (epoch, tokens of that rank for my local expert) */
  int64_t lanes;   /* u64 [S][R][M'][K][2]: (epoch, place), (epoch, weight) of each token of that rank */
  int64_t weights; /* u64 [S][R][M'][K]: (epoch, weight) given to a combine */
  int64_t rows;    /* lines [S][R][M'][row_lines]: tokens of that rank */
  int64_t sums; /* lines [S][num_slots][sum_lines]: what comes back to this rank: slot (rank, token) or (token, lane) */
  int64_t local; /* epcy_low_latency_local: nobody else touches it */
  int64_t row_lines, sum_lines, num_slots, begin, bytes;
} epcy_low_latency_wire;

/* A rank's own state on the device, by kind. */
typedef struct epcy_low_latency_local {
  uint32_t epoch[2][EPCY_LOW_LATENCY_MAX_BLOCKS]; /* of the last call sent; block b reads copy b and no other */
  uint32_t held[2][2];                            /* by set: the epoch of a call that is sent and not received, or 0 */
  uint32_t blocks_done[2];
  uint64_t go[2][3]; /* (epoch, missing ranks as bits), with goes_on: to be sent to, asked for weights, received from */
} epcy_low_latency_local;

/* The region begins at `begin`, a multiple of a line. */
EPCY_INLINE epcy_low_latency_wire epcy_low_latency_wire_layout(const epcy_shape *s, int64_t begin) {
  const int64_t R = s->num_ranks, K = s->num_topk, M = s->num_low_latency_tokens;
  epcy_low_latency_wire w;
  int64_t at = begin;
  w.begin = begin;
  w.row_lines = (s->row_bytes + EPCY_LINE_DATA - 1) / EPCY_LINE_DATA;
  w.sum_lines = (s->row_bytes + EPCY_LOGFMT_PIECE - 1) / EPCY_LOGFMT_PIECE * EPCY_LOGFMT_PIECE_LINES;
  w.num_slots = M * (R > K ? R : K);
  w.headers = at, at = epcy_round_up(at + 2 * 2 * R * 2 * 8, EPCY_LINE_BYTES);
  w.acks = at, at = epcy_round_up(at + 2 * R * 8, EPCY_LINE_BYTES);
  w.without = at, at = epcy_round_up(at + 2 * R * 8, EPCY_LINE_BYTES);
  w.text = at, at = epcy_round_up(at + 2 * 2 * R * EPCY_CUDA_TEXT_BYTES, EPCY_LINE_BYTES);
  w.counts = at, at = epcy_round_up(at + 2 * s->num_experts * 8, EPCY_LINE_BYTES);
  w.lanes = at, at = epcy_round_up(at + 2 * R * M * K * 16, EPCY_LINE_BYTES);
  w.weights = at, at = epcy_round_up(at + 2 * R * M * K * 8, EPCY_LINE_BYTES);
  w.local = at, at = epcy_round_up(at + (int64_t)sizeof(epcy_low_latency_local), EPCY_LINE_BYTES);
  w.rows = at, at += 2 * R * M * w.row_lines * EPCY_LINE_BYTES;
  w.sums = at, at += 2 * w.num_slots * w.sum_lines * EPCY_LINE_BYTES;
  w.bytes = M ? at - begin : 0;
  return w;
}

/* What went wrong in a dispatch, for handle.check(), and which ranks were not there, as bits. */
typedef struct epcy_low_latency_found {
  uint32_t verdict; /* enum epcy_verdict */
  uint32_t has_bad; /* this rank gave a bad id; the first: */
  int64_t bad_token, bad_lane, bad_value;
  uint32_t not_sent_to;   /* masked when this rank sent */
  uint32_t missing;       /* from whom nothing was received: masked, or */
  uint32_t left_by;       /* they went on without this one */
  uint32_t not_returning; /* from whom the last combine got nothing */
} epcy_low_latency_found;

/* A handle's arrays on the device. */
typedef struct epcy_low_latency_handle {
  epcy_low_latency_found *found;
  uint32_t *sent;      /* [3]: the epoch of the dispatch; of combines whose hooks are still to run, by turns */
  int32_t *tokens;     /* [R]: T of each rank */
  uint32_t *ranks;     /* [M']: ranks that hold a lane of my token, as bits */
  uint32_t *lanes;     /* [M'][K]: whose my lane is, and in which lane its row travels; see low_latency.cuh */
  float *lane_weights; /* [M'][K]: my lanes' weights */
  int32_t *rows;       /* [R][M'][K]: the row here of a lane of that rank, or -1 */
  float *weights;      /* [R][M'][K]: its weight */
  int64_t *counts;     /* [L]: as recv_count */
  int32_t *flows;      /* [2][R]: lanes of my tokens that went to each rank, and of each rank's that came, for traces */
  int32_t
      *dropped; /* [2][R]: lanes of my tokens by rank that were not sent to not_sent_to; that were, and are missing */
} epcy_low_latency_handle;

/* Bytes of a handle at `base`, and where its arrays lie. */
EPCY_INLINE int64_t epcy_low_latency_handle_layout(const epcy_shape *s, char *base, epcy_low_latency_handle *h) {
  const int64_t R = s->num_ranks, lanes = s->num_low_latency_tokens * s->num_topk;
  int64_t at = 0;
  h->found = (epcy_low_latency_found *)(base + at), at += EPCY_LINE_BYTES;
  h->sent = (uint32_t *)(base + at), at += EPCY_LINE_BYTES;
  h->tokens = (int32_t *)(base + at), at += EPCY_LINE_BYTES;
  h->ranks = (uint32_t *)(base + at), at = epcy_round_up(at + s->num_low_latency_tokens * 4, EPCY_LINE_BYTES);
  h->lanes = (uint32_t *)(base + at), at = epcy_round_up(at + lanes * 4, EPCY_LINE_BYTES);
  h->lane_weights = (float *)(base + at), at = epcy_round_up(at + lanes * 4, EPCY_LINE_BYTES);
  h->rows = (int32_t *)(base + at), at = epcy_round_up(at + R * lanes * 4, EPCY_LINE_BYTES);
  h->weights = (float *)(base + at), at = epcy_round_up(at + R * lanes * 4, EPCY_LINE_BYTES);
  h->counts = (int64_t *)(base + at), at = epcy_round_up(at + epcy_num_local_experts(s) * 8, EPCY_LINE_BYTES);
  h->flows = (int32_t *)(base + at), at = epcy_round_up(at + 2 * R * 4, EPCY_LINE_BYTES);
  h->dropped = (int32_t *)(base + at), at = epcy_round_up(at + 2 * R * 4, EPCY_LINE_BYTES);
  return at;
}

/* Division by a number that the host knows: `inverse` is (2^32 - 1) / by. */
typedef struct epcy_divisor {
  uint32_t by, inverse;
} epcy_divisor;

/* What every call of the mode has. A kernel meets its parameters in a cold cache, line by line, so what it reads on its
 * way lies together and first; sizes have 32 bits, since a division of 64 is a subroutine. */
typedef struct epcy_low_latency_call {
  int32_t rank, num_ranks, num_topk, num_experts, max_tokens; /* me, R, K, E, M' */
  int32_t num_tokens;                                         /* T of this rank */
  epcy_divisor num_local, num_parts;                          /* by L, and by the parts of a row, P */
  epcy_divisor topk;                                          /* by K */
  int32_t row_bytes, num_lines;                               /* of a row that travels; a multiple of 16 */
  uint32_t header;                                            /* operation, options and routing */
  int32_t phases;                                             /* enum epcy_low_latency_phases */
  uint32_t row_slot, sum_slot, num_slots;                     /* bytes of slots on the wire; how many for sums */
  int32_t num_rows;                                           /* of an area */
  uint32_t *sent;                                             /* where its epoch is kept between two kernels */
  char *own;                                                  /* peers.base[rank] */
  uint32_t *broken;                                           /* epcy_local's, and behind it what is masked */
  epcy_counters *counters;
  epcy_low_latency_wire wire;
  epcy_low_latency_handle handle;
  epcy_peers peers; /* its first ranks' bases, and what only waits that take long read */
  int32_t dtype, max_blocks;
} epcy_low_latency_call;

typedef struct epcy_low_latency_dispatch {
  const char *x; /* (T, H), 16-byte aligned */
  int64_t x_stride_bytes;
  const void *topk_idx;
  const float *topk_weights; /* NULL, or (T, K) */
  char *recv_x;
  uint32_t *recv_scales;                                     /* NULL, or float32 or ue8m0 */
  int64_t *recv_count;                                       /* (L,) */
  void *stats;                                               /* NULL, or (L,) */
  int32_t is_int64, stats_is_int64, num_scales, part_scales; /* scales of a row, of a part */
  int32_t area;                                              /* which one recv_x is */
  epcy_low_latency_call call;
} epcy_low_latency_dispatch;

typedef struct epcy_low_latency_combine {
  const char *x;             /* (L, R * M', H), contiguous, 16-byte aligned */
  const float *topk_weights; /* NULL: those of the handle; or (T, K) */
  char *out;                 /* (T, H) */
  epcy_low_latency_call call;
} epcy_low_latency_combine;

EPCY_INLINE epcy_divisor epcy_divide_by(int64_t by) {
  epcy_divisor d;
  d.by = (uint32_t)by, d.inverse = 0xFFFFFFFFu / (uint32_t)by;
  return d;
}

/* What follows from call->peers and call->wire, which do not change. */
EPCY_INLINE void epcy_low_latency_constants(epcy_low_latency_call *call) {
  const epcy_shape *s = &call->peers.shape;
  call->rank = call->peers.rank;
  call->num_ranks = (int32_t)s->num_ranks, call->num_topk = (int32_t)s->num_topk;
  call->num_experts = (int32_t)s->num_experts, call->max_tokens = (int32_t)s->num_low_latency_tokens;
  call->num_local = epcy_divide_by(epcy_num_local_experts(s)), call->topk = epcy_divide_by(s->num_topk);
  call->row_slot = (uint32_t)(call->wire.row_lines * EPCY_LINE_BYTES);
  call->sum_slot = (uint32_t)(call->wire.sum_lines * EPCY_LINE_BYTES);
  call->num_slots = (uint32_t)call->wire.num_slots, call->num_rows = (int32_t)epcy_num_low_latency_rows(s);
  call->own = call->peers.base[call->rank];
  call->counters = (epcy_counters *)(call->own + call->peers.control.counters);
  call->broken = &((epcy_local *)(call->own + call->peers.control.local))->broken;
}

/* And what follows from the bytes of the rows that travel. */
EPCY_INLINE void epcy_low_latency_rows(epcy_low_latency_call *call, int64_t row_bytes) {
  call->row_bytes = (int32_t)row_bytes;
  call->num_lines = (int32_t)((row_bytes + EPCY_LINE_DATA - 1) / EPCY_LINE_DATA);
  call->num_parts = epcy_divide_by((call->num_lines + EPCY_PART_LINES - 1) / EPCY_PART_LINES);
}

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* The most blocks that are resident at once. */
int epcy_cuda_low_latency_dispatch_blocks(const epcy_shape *shape, int *blocks);
int epcy_cuda_low_latency_combine_blocks(const epcy_shape *shape, int *blocks);
int epcy_cuda_launch_low_latency_dispatch(const epcy_low_latency_dispatch *call, void *stream);
int epcy_cuda_launch_low_latency_combine(const epcy_low_latency_combine *call, void *stream);
/* Take part in a call of a kind without data. */
int epcy_cuda_launch_low_latency_refusal(const epcy_peers *peers, const epcy_low_latency_wire *wire, int kind,
                                         uint32_t header, const char *text, void *stream);

/* Bring both modes of a Buffer to one epoch on all ranks; wire.bytes 0: it has no low-latency mode. */
int epcy_cuda_launch_reset(const epcy_peers *peers, const epcy_low_latency_wire *wire, uint32_t round, void *stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
