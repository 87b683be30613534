/* The CUDA backend: what Cython, gcc and nvcc share. Plain C types only; streams and events are opaque pointers.
 *
 * Ranks reach each other's memory by plain pointers (nvshmem_ptr). A word that ranks exchange is 64 bits, the call's
 * epoch above and a value below, so it is its own flag and is never cleared. Words lie in two sets, by the epoch's
 * parity: a rank writes those of call n + 2 only after it has seen everybody in call n + 1, and whoever is there has
 * finished call n. */
#ifndef EPCY_CUDA_H
#define EPCY_CUDA_H

#include <stdint.h>

#include "epcy/layout.h"
#include "epcy/meter.h"

#define EPCY_MAX_RANKS 32  /* of one NVLink domain: a warp looks at all of them at once */
#define EPCY_MAX_CHUNKS 32 /* of a rank's tokens for one destination: a block each */
#define EPCY_MAX_BLOCKS 256
#define EPCY_MOVER_WARPS 4 /* of a block: they issue bulk copies */
#define EPCY_NUM_HEADERS 4
#define EPCY_NUM_MARKS 3
#define EPCY_MARK_ROWS 2 /* how many rows come to a rank in the expert layout; other marks: Step::together */
#define EPCY_CUDA_TEXT_BYTES 512
#define EPCY_UNIQUE_ID_BYTES 128

/* First header word of a call: what a rank does, to be compared. */
#define EPCY_HEADER_OP(h) ((h) & 7u)
#define EPCY_HEADER_DTYPE(h) (((h) >> 3) & 7u)
#define EPCY_HEADER_LAYOUT(h) (((h) >> 6) & 1u)
#define EPCY_HEADER_CACHED(h) (((h) >> 7) & 1u)
#define EPCY_HEADER_WEIGHTS(h) (((h) >> 8) & 1u)
#define EPCY_HEADER_ALIGNMENT(h) (((h) >> 9) & 1023u) /* low bits */
#define EPCY_HEADER_ROUTING(h) (((h) >> 19) & 511u)   /* low bits of the handle's epoch */
#define EPCY_HEADER_COMPARED 0x0FFFFFFFu
#define EPCY_HEADER_WAITS 0x10000000u   /* its host waits for the counts */
#define EPCY_HEADER_REFUSED 0x20000000u /* takes part without data; its text is in the slot */
#define EPCY_HEADER_AREA(h) (((h) >> 30) & 1u)

/* Fourth header word: blocks of the kernel, and of those for each other rank and for the rank itself. */
#define EPCY_GRID(blocks, peer, own) ((uint32_t)(blocks) | (uint32_t)(peer) << 16 | (uint32_t)(own) << 24)
#define EPCY_GRID_BLOCKS(g) ((g) & 0xFFFFu)
#define EPCY_GRID_PEER(g) (((g) >> 16) & 0xFFu)
#define EPCY_GRID_OWN(g) ((g) >> 24)

#define EPCY_STEP_DISPATCH 1u /* operations, as in epcy/status.py */
#define EPCY_STEP_COMBINE 2u

#define EPCY_COUNT_BAD 0x80000000u /* in a count word: the chunk holds a bad id, and the rank's host waits */

/* What a kernel of a call tells the host, in the low half of a verdict word. */
enum epcy_verdict { /* the largest that any thread finds counts */
                    EPCY_VERDICT_OK,
                    EPCY_VERDICT_OVERFLOW,
                    EPCY_VERDICT_BAD_ID,
                    EPCY_VERDICT_MISMATCH,
                    EPCY_VERDICT_REFUSED,
                    EPCY_VERDICT_BROKEN
};

/* Offsets inside the control region of a rank (symmetric: the same on all ranks). */
typedef struct epcy_control {
  int64_t headers;  /* u64 [2][R][4]: from each rank */
  int64_t done;     /* u64 [2][R][256]: each block of a rank has done all it does to this one */
  int64_t counts;   /* u64 [2][R][C][R]: tokens that source s sends from chunk c to rank d */
  int64_t experts;  /* u64 [2][R][C][L]: lanes of chunk c of source s for my local expert */
  int64_t starts;   /* u64 [2][C][E]: first row of my chunk c at each expert (expert layout) */
  int64_t progress; /* u64 [2][R][C][4]: rows of chunk c of source s that have come, by mover warp (expert layout) */
  int64_t fans;     /* int32 [2][R M][K]: rows of the tokens that come, see fan.cuh (expert layout) */
  int64_t bad;      /* int64 [2][R][C][4]: token, lane, value of a chunk's first bad id */
  int64_t text;     /* char [2][R][512] */
  int64_t marks;    /* u64 [2][R][3]: how far a rank has come in a call; see EPCY_MARK_ROWS */
  int64_t left;     /* u32 [R]: whether a rank has left its calls: gave up, was interrupted, freed its Buffer alone */
  int64_t resets;   /* u64 [2][R]: (round, epoch) of the two rounds of reset */
  int64_t lost;     /* as large as `done`: where flags go that a fault loses, and nobody looks */
  int64_t local;    /* epcy_local: nobody else touches it */
  int64_t counters; /* epcy_counters: likewise */
  int64_t bytes;
} epcy_control;

/* A rank's own device state. Each block has an epoch of its own, so that none waits for the others to take a step. */
typedef struct epcy_local {
  uint32_t epoch[EPCY_MAX_BLOCKS];
  uint32_t broken, masked; /* masked: ranks that this one goes on without, as bits; read together */
  uint32_t blocks_met, unused;
} epcy_local;

/* When a kernel began and ended, and when its phases did, in ns of the GPU's global timer; one of each call, by epoch. */
enum epcy_stamp_kind { /* each kind of call has epochs of its own, each half of one a stamp of its own */
                       EPCY_STAMP_STEP, /* high throughput, barriers */
                       EPCY_STAMP_LOW_LATENCY_DISPATCH,
                       EPCY_STAMP_LOW_LATENCY_COMBINE,
                       EPCY_STAMP_LOW_LATENCY_DISPATCH_RECEIVE,
                       EPCY_STAMP_LOW_LATENCY_COMBINE_RECEIVE,
                       EPCY_NUM_STAMP_KINDS
};
#define EPCY_NUM_STAMPS 1024 /* that are kept of each kind: the host reads them now and then */
/* Its words are stored without an order: a copy made in the very moment may mix two calls, and counts once. */
typedef struct epcy_stamp {
  uint64_t epoch_op; /* epoch above, operation below; 0: never written */
  uint64_t start_ns;
  uint64_t end_ns[EPCY_NUM_SPANS]; /* by enum epcy_span; 0: no such phase; [EPCY_SPAN_CALL]: of the kernel */
  uint64_t again;                  /* epoch_op once more: another value says that it is being written */
} epcy_stamp;
#define EPCY_STAMP_WORDS (3 + EPCY_NUM_SPANS)

/* What kernels count; only ever added to. */
typedef struct epcy_counters {
  uint64_t wait_ns[EPCY_MAX_RANKS]; /* block 0's, for each rank */
  uint64_t tokens_to[EPCY_MAX_RANKS], tokens_from[EPCY_MAX_RANKS];
  uint64_t most_rows[2][EPCY_NUM_AREAS];  /* the largest so far, by receive area; of the low-latency mode */
  uint64_t bytes_moved;                   /* of payload, between ranks */
  uint64_t lanes_lost[2][EPCY_MAX_RANKS]; /* low latency, by rank: not sent, since it was masked; sent, not returned */
  epcy_stamp stamps[EPCY_NUM_STAMP_KINDS][EPCY_NUM_STAMPS];
  /* followed by u64 experts[L]: lanes that came for each local expert */
} epcy_counters;

EPCY_INLINE epcy_control epcy_control_layout(const epcy_shape *s) {
  const int64_t R = s->num_ranks, C = EPCY_MAX_CHUNKS, L = epcy_num_local_experts(s);
  epcy_control c;
  int64_t at = 0;
  c.headers = at, at = epcy_round_up(at + 2 * R * EPCY_NUM_HEADERS * 8, EPCY_LINE_BYTES);
  c.done = at, at = epcy_round_up(at + 2 * R * EPCY_MAX_BLOCKS * 8, EPCY_LINE_BYTES);
  c.counts = at, at = epcy_round_up(at + 2 * R * C * R * 8, EPCY_LINE_BYTES);
  c.experts = at, at = epcy_round_up(at + 2 * R * C * L * 8, EPCY_LINE_BYTES);
  c.starts = at, at = epcy_round_up(at + 2 * C * s->num_experts * 8, EPCY_LINE_BYTES);
  c.progress = at, at = epcy_round_up(at + 2 * R * C * EPCY_MOVER_WARPS * 8, EPCY_LINE_BYTES);
  c.fans = at, at = epcy_round_up(at + 2 * R * s->num_max_tokens * s->num_topk * 4, EPCY_LINE_BYTES);
  c.bad = at, at = epcy_round_up(at + 2 * R * C * 4 * 8, EPCY_LINE_BYTES);
  c.text = at, at = epcy_round_up(at + 2 * R * EPCY_CUDA_TEXT_BYTES, EPCY_LINE_BYTES);
  c.marks = at, at = epcy_round_up(at + 2 * R * EPCY_NUM_MARKS * 8, EPCY_LINE_BYTES);
  c.left = at, at = epcy_round_up(at + R * 4, EPCY_LINE_BYTES);
  c.resets = at, at = epcy_round_up(at + 2 * R * 8, EPCY_LINE_BYTES);
  c.lost = at, at = epcy_round_up(at + 2 * R * EPCY_MAX_BLOCKS * 8, EPCY_LINE_BYTES);
  c.local = at, at = epcy_round_up(at + (int64_t)sizeof(epcy_local), EPCY_LINE_BYTES);
  c.counters = at, at = epcy_round_up(at + (int64_t)sizeof(epcy_counters) + L * 8, EPCY_LINE_BYTES);
  c.bytes = at;
  return c;
}

/* A bad id, of a call whose host did not wait. */
typedef struct epcy_cuda_bad {
  uint32_t epoch, unused; /* 0: none */
  int64_t token, lane, value;
} epcy_cuda_bad;

/* What kernels tell the host of their rank: mapped host memory. Words that the host waits for carry the ticket of its
 * call above and a value below; epochs it cannot know, since graphs take steps of their own. */
typedef struct epcy_report {        /* its definition must not depend on the Buffer */
  uint64_t num_rows;                /* rows that come to this rank */
  uint32_t own_base, own_count;     /* rank layout: this rank's own among them; known when a verdict is */
  uint64_t verdict[EPCY_MAX_RANKS]; /* by destination */
  /* The first wait that expired: written once, read when a call fails. */
  uint32_t expired, phase, peer, epoch;
  uint64_t expected, seen;
  uint32_t operation, gone;           /* gone: the peer had left */
  int64_t timeout_ns;                 /* of that call */
  epcy_cuda_bad bad[EPCY_MAX_CHUNKS]; /* the first of each chunk of this rank */
  uint32_t late_verdict, late_rank;   /* of a call whose host did not wait and which failed; who refused */
  uint64_t late_rows, late_limit;     /* rows that came where there was room for fewer */
  uint32_t masked;                    /* as epcy_local's, once a kernel has masked a rank */
  uint32_t without;                   /* ranks that went on without this one, as bits; in which call: */
  uint32_t without_epoch, without_operation;
  uint32_t stop; /* the host's: kernels that wait give up. A copy to their memory might queue up behind them */
  char late_text[EPCY_CUDA_TEXT_BYTES]; /* of the refusal; or u32 headers[R], epoch of a mismatch */
  /* followed by u64 experts[L]: lanes for each local expert */
} epcy_report;

/* What a Buffer's kernels need of it. */
typedef struct epcy_peers {
  char *base[EPCY_MAX_RANKS]; /* each rank's allocation as this GPU reaches it */
  epcy_shape shape;
  epcy_control control;
  epcy_area area;
  epcy_heap heap;
  int32_t rank;
  epcy_report *report; /* mapped host memory, device address */
  int64_t timeout_ns;
  uint32_t ticket;    /* of this call; 0: its host does not wait */
  uint32_t operation; /* likewise, as in its header */
  int32_t num_local;  /* L: a division of 64 bits is long on a GPU */
  int32_t goes_on;    /* low latency: mask a rank that is late */
  uint32_t far;       /* high throughput: ranks that no kernel may reach by stores, as bits */
} epcy_peers;

enum epcy_cuda_phase {
  EPCY_CUDA_HEADERS = 1,
  EPCY_CUDA_COUNTS,
  EPCY_CUDA_STARTS,
  EPCY_CUDA_DATA,
  EPCY_CUDA_COMPLETION,
  EPCY_CUDA_RESET,
  EPCY_CUDA_ACKS,      /* low latency: that a peer has received the call before the last */
  EPCY_CUDA_LINES,     /* low latency: rows */
  EPCY_CUDA_ELSEWHERE, /* not late: a rank has come to another call; late_text has headers and epoch, as of a mismatch */
  EPCY_CUDA_FORWARD,   /* between nodes: messages with rows */
  EPCY_CUDA_CREDITS    /* between nodes: that messages have been worked on */
};

/* A handle's arrays on the device. Chunk c of C is the tokens from T c / C on; a call on the handle may have another
 * number of blocks. */
typedef struct epcy_cuda_routing {
  int32_t *list;        /* [R][T]: tokens that go to a rank, compact inside each chunk */
  int32_t *chunk_count; /* [R][32]: how many those are */
  int32_t *chunk_base;  /* [R][32]: first row of the chunk at that rank (expert layout: number of its first token) */
  int32_t *recv_count;  /* [R][32]: tokens that come to this rank from each chunk of each rank */
  int32_t *pos;         /* [T][R]: the token's (first) row at that rank, or -1 */
  int64_t *num_recv;    /* [2]: rows that come to this rank, unclipped; tokens that come (expert layout) */
  int64_t *experts;     /* [L]: lanes for each local expert */
  /* Expert layout. */
  int32_t *lane_row;                       /* [T][K]: the lane's row at its expert's rank, or -1 */
  int32_t *fans;                           /* [R M][K]: rows of each token that comes here, see fan.cuh */
  int64_t *offsets;                        /* [L + 1]: where the local experts' groups start */
  int32_t num_peer_chunks, num_own_chunks; /* C for each other rank, and for the rank itself */
} epcy_cuda_routing;

/* A dispatch. */
typedef struct epcy_cuda_dispatch {
  epcy_peers peers;
  epcy_cuda_routing routing;
  const char *x;
  const char *scales;        /* NULL, or (T, num_scales) float32, contiguous */
  const void *topk_idx;      /* uncached: (T, K) */
  const float *topk_weights; /* NULL, or (T, K) */
  const int64_t *lane_ids;   /* cached: (T, K) int64 as given to the first dispatch, bad ids as -1 */
  int64_t *lane_ids_out;     /* uncached: where to keep them */
  int64_t x_stride_bytes, row_bytes;
  int32_t num_scales, num_tokens, is_int64, header, limit, fill_to, cached;
  int32_t num_peer_blocks, num_own_blocks; /* blocks for each other rank, and for this one */
  int32_t num_copy_blocks;                 /* expert layout: blocks that copy what came to its other rows */
  int32_t alignment;                       /* likewise: rows that groups are padded to */
} epcy_cuda_dispatch;

/* A combine by pulling rows: in the expert layout, sums of a token's rows that its experts' rank makes first. */
typedef struct epcy_cuda_combine {
  epcy_peers peers;
  const int32_t *pos; /* [T][R] */
  const char *bias[2];
  char *out;
  const int64_t *lane_ids; /* (T, K): whose weights come back; NULL without weights */
  float *out_weights;
  int64_t y_offset, weights_offset; /* in this rank's allocation, multiples of 128 */
  int64_t row_bytes;
  int32_t dtype, num_tokens, header;
  /* Expert layout: y_offset and weights_offset say where the sums and the rows' weights go, the rows are at x. */
  epcy_cuda_routing routing;
  const char *x;
  const float *topk_weights; /* NULL, or (T, K) */
  int64_t x_stride_bytes;
  /* Rank layout: this rank's own rows where they are not at y_offset, or NULL. */
  const char *own_rows;
  int64_t own_stride_bytes;
} epcy_cuda_combine;

/* Rows of the rank layout to be copied for other ranks to pull. */
typedef struct epcy_cuda_staging {
  const char *from;
  char *to;
  const int64_t *num_recv;             /* rows that came */
  const int32_t *own_base, *own_count; /* [32]: this rank's own among them, by chunk */
  int64_t num_rows, row_bytes, stride_bytes;
} epcy_cuda_staging;

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* Every function returns 0 or a CUDA error code (runtime.cu's NVSHMEM calls: a status of NVSHMEM). */
const char *epcy_cuda_error_name(int code);
int epcy_cuda_num_devices(int *count);
int epcy_cuda_set_device(int device, int *previous);
int epcy_cuda_mapped(int64_t bytes, void **host, void **device);
void epcy_cuda_unmap(void *host);
int epcy_cuda_zero(void *device, int64_t bytes);                    /* and wait */
int epcy_cuda_fetch(void *host, const void *device, int64_t bytes); /* on a stream of its own; waits for nothing else */
int epcy_cuda_put(void *device, const void *host, int64_t bytes);   /* likewise */
int epcy_cuda_stage(void *to, const void *from, int64_t rows, int64_t row_bytes, int64_t stride_bytes, void *stream);
/* How far the GPU's global timer is ahead of CLOCK_MONOTONIC, and by how much that may be wrong. */
int epcy_cuda_compare_clocks(int num_rounds, int64_t *ahead_ns, int64_t *error_ns);
int epcy_cuda_stream(void **stream);
void epcy_cuda_stream_free(void *stream);
int epcy_cuda_is_capturing(void *stream, int *yes);
int epcy_cuda_event(void **event);
void epcy_cuda_event_free(void *event);
int epcy_cuda_event_record(void *event, void *stream);
int epcy_cuda_event_wait(void *event, void *stream);
int epcy_cuda_event_query(void *event, int *done);

int epcy_nvshmem_unique_id(void *id);
int epcy_nvshmem_init(int rank, int num_ranks, const void *id);
int epcy_nvshmem_init_status(void);
void epcy_nvshmem_version(int *major, int *minor, int *patch);
void *epcy_nvshmem_align(int64_t bytes);
void epcy_nvshmem_free(void *p);
void *epcy_nvshmem_ptr(const void *p, int pe);
void epcy_nvshmem_finalize(void);

/* Look until every word of a dispatch (or with num_experts 0 of another call: verdict[rank] alone) has come, at most slice_ns. */
int epcy_cuda_poll(const epcy_report *report, uint32_t ticket, int first_rank, int num_ranks, int64_t num_experts,
                   int64_t slice_ns, int *done);

/* Prepare kernels on the current device: raise their shared-memory limit, load their code. */
int epcy_cuda_load(void);
int epcy_cuda_launch_dispatch(const epcy_cuda_dispatch *call, void *stream);
int epcy_cuda_launch_dispatch_expert(const epcy_cuda_dispatch *call, void *stream);
int epcy_cuda_launch_staging(const epcy_cuda_staging *call, int num_sms, void *stream);
int epcy_cuda_launch_combine(const epcy_cuda_combine *call, int num_sms, void *stream);
int epcy_cuda_launch_combine_expert(const epcy_cuda_combine *call, int num_sms, void *stream);
/* A call that moves nothing: header (refused, barrier or free), text or NULL. */
int epcy_cuda_launch_step(const epcy_peers *peers, uint32_t header, const char *text, void *stream);
/* From here on in the stream this rank goes on without the ranks of `more`, and no more without those of `fewer`: bits. */
int epcy_cuda_launch_mask(const epcy_peers *peers, uint32_t more, uint32_t fewer, void *stream);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
