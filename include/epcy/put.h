/* Low-latency calls over NVSHMEM's own put: what Cython, gcc and nvcc share.
 *
 * The kernels that send write to a mirror of each far rank's control region and wire, in this rank's symmetric memory.
 * A second kernel then puts what there is in the mirrors to where it would have been stored, each piece with a flag of its
 * own that NVSHMEM raises after the piece: the epoch of the call. Whoever receives waits for flags first, and then finds
 * everything where a peer's stores would have left it. So rows, formats and sums are those of the other path, bit by bit.
 *
 * A mirror's piece is used again two calls later, when its rank has acknowledged that it has received it: no put is waited
 * for at home. Puts may come in any order; every call ends with a fence, so that those of different calls do not. */
#ifndef EPCY_PUT_H
#define EPCY_PUT_H

#include "epcy/low_latency.h"

/* The pieces of a call that are not rows. */
enum epcy_put_piece {
  EPCY_PUT_HEADER,
  EPCY_PUT_COUNTS,
  EPCY_PUT_LANES,
  EPCY_PUT_WEIGHTS, /* given to a combine */
  EPCY_PUT_TEXT,    /* of a refusal */
  EPCY_NUM_PUT_PIECES
};

/* Offsets inside a rank's allocation, behind the wire; S = 2 sets, R ranks, M' tokens. */
typedef struct epcy_put_wire {
  int64_t flags;   /* u64 [2 kinds][S][R][pieces]: epochs */
  int64_t rows;    /* u64 [S][R][M']: of a dispatch */
  int64_t sums;    /* u64 [S][num_slots]: of a combine */
  int64_t mirrors; /* [num_mirrors][mirror_bytes]: of the far ranks, ascending */
  int64_t mirror_bytes, begin, bytes;
} epcy_put_wire;

/* Without far ranks it has no bytes. */
EPCY_INLINE epcy_put_wire epcy_put_layout(const epcy_shape *s, const epcy_low_latency_wire *w, int64_t num_mirrors) {
  const int64_t R = s->num_ranks, end = w->begin + w->bytes;
  epcy_put_wire p;
  int64_t at = epcy_round_up(end, EPCY_LINE_BYTES);
  p.begin = end;
  p.flags = at, at = epcy_round_up(at + 2 * 2 * R * EPCY_NUM_PUT_PIECES * 8, EPCY_LINE_BYTES);
  p.rows = at, at = epcy_round_up(at + 2 * R * s->num_low_latency_tokens * 8, EPCY_LINE_BYTES);
  p.sums = at, at = epcy_round_up(at + 2 * w->num_slots * 8, EPCY_LINE_BYTES);
  p.mirror_bytes = epcy_round_up(end, EPCY_LINE_BYTES);
  p.mirrors = at, at += num_mirrors * p.mirror_bytes;
  p.bytes = w->bytes && num_mirrors ? at - end : 0;
  return p;
}

/* A call as the kernels that put and wait see it. */
typedef struct epcy_put {
  epcy_low_latency_call call; /* as it was sent: peers.base[far rank] is its mirror */
  epcy_put_wire wire;
  char *name[EPCY_MAX_RANKS]; /* the address here by which NVSHMEM knows a rank's allocation */
  int32_t pe[EPCY_MAX_RANKS]; /* and the rank itself */
  uint32_t far;               /* ranks that are reached by puts, as bits */
  int32_t kind;               /* enum epcy_low_latency_kind */
  const float *topk_weights;  /* (T, K): given to a combine; NULL: the handle's */
} epcy_put;

/* The far ranks' bases become their mirrors. */
EPCY_INLINE void epcy_put_mirrors(epcy_peers *peers, const epcy_put_wire *wire, uint32_t far) {
  char *mirror = peers->base[peers->rank] + wire->mirrors;
  for (int r = 0; r < (int)peers->shape.num_ranks; r++)
    if (far >> r & 1) peers->base[r] = mirror, mirror += wire->mirror_bytes;
}

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* Once NVSHMEM runs on this device: let the kernels of this library use it. 0, or a status of NVSHMEM or CUDA. */
int epcy_put_start(int device);
/* Wait until what was put has come, for good: after the kernels that did. */
int epcy_put_quiet(void *stream);

/* Weights given to a combine, and its header, before the call is sent; then wait for everybody's. */
int epcy_put_launch_weights(const epcy_put *put, void *stream);
/* What has been sent into the mirrors; of a refused call (by its header) the header, counts and text. */
int epcy_put_launch_send(const epcy_put *put, void *stream);
/* Wait for everything that comes to this rank. */
int epcy_put_launch_await(const epcy_put *put, void *stream);
/* Tell the far ranks up to where this one has received; and whether it has given up. */
int epcy_put_launch_acknowledge(const epcy_put *put, void *stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
