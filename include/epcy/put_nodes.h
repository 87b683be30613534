/* High-throughput calls between nodes: what Cython, gcc and nvcc share.
 *
 * A call begins with a record of each rank, which it puts into everybody's memory: what it does, and of a dispatch the ids
 * of all its tokens. So every rank knows all routes, places rows by the same arithmetic, and nothing but rows has to travel
 * after that. A rank sends to, and hears from, one rank of each of its groups: on the hierarchical path a group is another
 * node and that rank is the one of the same place in it, which passes rows on inside its node; on the direct path a group
 * is one rank of another node. A rank's tokens are cut into channels, and a channel's messages to a group go in chunks
 * through a ring of slots there; each chunk raises its slot's flag and is answered by a credit when it has been worked on.
 * Every flag and credit names epoch and chunk, and all credits have come when a call ends: rings are empty between calls. */
#ifndef EPCY_PUT_NODES_H
#define EPCY_PUT_NODES_H

#include "epcy/cuda.h"

#define EPCY_NODES_RECORD_BYTES 2048 /* before ids and weights */
#define EPCY_NODES_PARTS 64          /* blocks that write a record */
#define EPCY_NODES_USUAL_BLOCKS 128  /* of kernels whose blocks do not wait for each other */
/* Of those that move rows, two on each multiprocessor; with one group a third of them sends. A block puts 3 to 5 GB/s. */
#define EPCY_NODES_MOVING_BLOCKS 252
#define EPCY_NODES_MAX_CHANNELS 84
#define EPCY_NODES_IDS 1u /* what a record has behind it */
#define EPCY_NODES_WEIGHTS 2u

/* A step of a sum at the source: a group's number, or this. */
#define EPCY_NODES_OWN_NODE (-1)
#define EPCY_NODES_NEAR(rank) (-2 - (rank))

typedef struct epcy_nodes_record {
  uint32_t header, limit, num_tokens, parts;
  uint32_t num_blocks;       /* that store to ranks of the own node */
  uint32_t y_at, weights_at; /* of a combine: offsets / 128 */
  uint32_t unused;
  int64_t bad[EPCY_NODES_PARTS][2]; /* a part's first bad id: which lane of all, or -1, and its value */
  char text[EPCY_CUDA_TEXT_BYTES];  /* of a refusal */
} epcy_nodes_record;

/* What a rank's kernels of one call tell each other. */
typedef struct epcy_nodes_local {
  uint64_t start_ns, end_ns[EPCY_NUM_SPANS];
  int64_t bad[EPCY_MAX_RANKS][2]; /* of each rank's record */
  uint64_t node_bytes[2];         /* only ever added to: rows with scales sent to other nodes, and the rest */
} epcy_nodes_local;

/* Offsets inside a rank's allocation, behind the other words; G groups, C channels, B slots, N tokens of a chunk. */
typedef struct epcy_nodes_wire {
  int64_t records;   /* [2][R][record_bytes] */
  int64_t announced; /* u64 [2][R]: flags of records */
  int64_t credits;   /* u64 [G][C][B] */
  int64_t flags;     /* u64 [G][C][B] */
  int64_t row_flags; /* u64 [G][C][B][N]: of rows put to their final places */
  int64_t local;     /* epcy_nodes_local */
  int64_t rings;     /* [G][C][B][slot_bytes] */
  int64_t staging;   /* likewise: what is put from here */
  int64_t record_bytes, slot_bytes, begin, bytes;
  int32_t num_groups, num_channels, num_slots, chunk_tokens;
} epcy_nodes_wire;

EPCY_INLINE int64_t epcy_nodes_up16(int64_t bytes) { return epcy_round_up(bytes, 16); }

EPCY_INLINE int32_t epcy_nodes_num_channels(int32_t num_groups) {
  const int32_t most = EPCY_NODES_MOVING_BLOCKS / (1 + 2 * num_groups);
  return most > EPCY_NODES_MAX_CHANNELS ? EPCY_NODES_MAX_CHANNELS : most < 1 ? 1 : most;
}

/* Without groups it has no bytes. */
EPCY_INLINE epcy_nodes_wire epcy_nodes_layout(const epcy_shape *s, int64_t begin, int32_t num_groups, int32_t num_slots,
                                              int32_t chunk_tokens) {
  epcy_nodes_wire w;
  const int64_t R = s->num_ranks, K = s->num_topk, scales = epcy_num_scales(s->hidden);
  const int64_t extra = epcy_nodes_up16((scales > K ? scales : K) * 4);
  int64_t at = epcy_round_up(begin, EPCY_LINE_BYTES);
  w.num_groups = num_groups, w.num_channels = epcy_nodes_num_channels(num_groups);
  w.num_slots = num_slots, w.chunk_tokens = chunk_tokens;
  const int64_t slots = (int64_t)num_groups * w.num_channels * num_slots;
  w.record_bytes = EPCY_NODES_RECORD_BYTES + 2 * epcy_nodes_up16(s->num_max_tokens * K * 4);
  w.record_bytes = epcy_round_up(w.record_bytes, EPCY_LINE_BYTES);
  w.slot_bytes = epcy_round_up(chunk_tokens * (epcy_nodes_up16(s->row_bytes) + extra), EPCY_LINE_BYTES);
  w.begin = begin;
  w.announced = at, at = epcy_round_up(at + 2 * R * 8, EPCY_LINE_BYTES);
  w.credits = at, at = epcy_round_up(at + slots * 8, EPCY_LINE_BYTES);
  w.flags = at, at = epcy_round_up(at + slots * 8, EPCY_LINE_BYTES);
  w.row_flags = at, at = epcy_round_up(at + slots * chunk_tokens * 8, EPCY_LINE_BYTES);
  w.local = at, at = epcy_round_up(at + (int64_t)sizeof(epcy_nodes_local), EPCY_LINE_BYTES);
  w.records = at, at += 2 * R * w.record_bytes;
  w.rings = at, at += slots * w.slot_bytes;
  w.staging = at, at += slots * w.slot_bytes;
  w.bytes = num_groups ? at - begin : 0;
  return w;
}

/* A handle's arrays on the device beside epcy_cuda_routing; M tokens a rank, P ranks of a node that a group's rows go to
 * from here: all of the own node (hierarchical), or this one (direct). */
typedef struct epcy_nodes_routing {
  int32_t *ids;       /* [R][M][K]: every rank's, bad ones as -1 */
  int32_t *lane_rows; /* [R][M][K]: expert layout: the lane's row at its expert's rank, or -1 */
  int32_t *first;     /* [R][M]: the token's (first) row at this rank, or -1 */
  int32_t *
      feed_rows; /* [G][M][P]: of the tokens of each group's rank: (first) rows at the ranks that this one passes them to */
  int32_t *own_list;   /* [G][M]: tokens that go to a group, compact inside each channel */
  int32_t *own_order;  /* [G][M]: a token's place there, or -1 */
  int32_t *own_count;  /* [G][C] */
  int32_t *feed_list;  /* [G][M]: those that come from each group's rank */
  int32_t *feed_count; /* [G][C] */
  int32_t *tokens;     /* [R] */
  int32_t *counts;     /* [R][R]: tokens from a rank to another */
  int32_t *lanes;      /* [R][E]: lanes from a rank to an expert */
} epcy_nodes_routing;

/* Who is where; the same in all calls of a Buffer. */
typedef struct epcy_nodes_map {
  char *name[EPCY_MAX_RANKS];       /* the address here by which NVSHMEM knows a rank's allocation */
  int32_t pe[EPCY_MAX_RANKS];       /* and the rank itself */
  int32_t peer[EPCY_MAX_RANKS];     /* of each group: the rank that this one sends to and hears from */
  int32_t back[EPCY_MAX_RANKS];     /* which of that rank's groups this one belongs to */
  uint32_t members[EPCY_MAX_RANKS]; /* the group's ranks, as bits */
  int32_t group_of[EPCY_MAX_RANKS]; /* of each rank; -1: of the own node */
  int32_t order[EPCY_MAX_RANKS];    /* steps of a sum */
  int32_t num_steps;
  uint32_t near_ranks; /* of the own node, as bits */
  int32_t num_near, hierarchical;
} epcy_nodes_map;

/* A call. */
typedef struct epcy_nodes_call {
  epcy_peers peers; /* base of a rank of another node: not to be used */
  epcy_nodes_wire wire;
  epcy_nodes_map map;
  epcy_cuda_routing routing;
  epcy_nodes_routing nodes;
  uint32_t header, limit;
  int32_t num_tokens, parts, num_blocks; /* num_blocks: for each thing that a kernel does */
  int64_t row_bytes;
  /* dispatch */
  const char *x;       /* combine, expert layout: the experts' rows */
  const float *scales; /* NULL, or (T, num_scales), contiguous */
  const void *topk_idx;
  const float *topk_weights; /* NULL, or (T, K): goes with the record */
  int64_t *lane_ids_out;
  int64_t x_stride_bytes;
  int32_t num_scales, is_int64, fill_to, alignment;
  /* combine */
  int64_t y_offset, weights_offset; /* multiples of 128 */
  const char *own_rows;             /* rank layout: this rank's own rows where they are not at y_offset, or NULL */
  int64_t own_stride_bytes;
  const char *bias[2];
  char *out;
  const int64_t *lane_ids;
  float *out_weights; /* rank layout: NULL, or (T, K) */
  int32_t dtype;
} epcy_nodes_call;

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* The record of a call, with a refusal's text or NULL, to everybody. */
int epcy_nodes_launch_record(const epcy_nodes_call *call, const char *text, void *stream);
/* Wait for everybody's; of a dispatch that is not cached, find all places too, and tell the host what comes. */
int epcy_nodes_launch_await(const epcy_nodes_call *call, void *stream);
int epcy_nodes_launch_plan(const epcy_nodes_call *call, void *stream);
int epcy_nodes_launch_dispatch(const epcy_nodes_call *call, void *stream);
/* Expert layout: each token's sum of the rows here, and the node's ranks together. */
int epcy_nodes_launch_sums(const epcy_nodes_call *call, void *stream);
int epcy_nodes_launch_combine(const epcy_nodes_call *call, void *stream);
/* Take the epoch's step, or tell everybody that this rank has given up. */
int epcy_nodes_launch_end(const epcy_nodes_call *call, void *stream);
/* Tell everybody so in any case. */
int epcy_nodes_launch_leave(const epcy_nodes_call *call, void *stream);
int epcy_nodes_launch_reset(const epcy_nodes_call *call, const void *low_latency_wire, uint32_t round, void *stream);
/* Load the kernels. */
int epcy_nodes_load(void);
/* Blocks of the kernels that move rows that one multiprocessor can hold. */
int epcy_nodes_resident(int *each);
/* NVSHMEM's own put of rows to a rank by so many blocks, and that they have come: a yardstick. */
int epcy_put_launch_rows(char *to, const char *from, int num_rows, int64_t row_bytes, int pe, int num_blocks,
                         void *stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
