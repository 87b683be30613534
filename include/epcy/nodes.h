/* The host backend between nodes: what the C kernels do around messages. No MPI here either: who carries a message is
 * epcy/backends/network.pyx's affair.
 *
 * A *link* is a rank of another node that this rank exchanges rows with, and the ranks there that it stands for. On the
 * hierarchical path there is one a node: the rank of the same place in it, for all ranks of that node. On the direct
 * path each rank of another node is a link of its own. What a rank sends over a link, dispatched rows and sums of them,
 * is a *stream*: tokens in ascending order, in messages of at most `chunk_tokens`. */
#ifndef EPCY_NODES_H
#define EPCY_NODES_H

#include <stdint.h>

#include "epcy/host.h"

typedef struct epcy_nodes {
  int64_t num_links;
  int64_t chunk_tokens;
  const int32_t *link_of;  /* [R]: the link that stands for a rank; -1: the rank is in this node */
  const int32_t *group_of; /* [R]: a token's rows are summed by group, ranks ascending, then over groups ascending */
} epcy_nodes;

enum epcy_message_kind { EPCY_MESSAGE_ROWS = 1, EPCY_MESSAGE_WEIGHTS, EPCY_MESSAGE_SUMS };

/* What each message of a stream begins with. Sections follow, each from a multiple of 16 bytes on:
 * routes (ROWS of a dispatch without a handle) | topk_weights | scales | rows. */
typedef struct epcy_message {
  uint64_t epoch;
  int64_t num_in_all; /* tokens of the stream */
  int64_t first;      /* the place of this message's first token in it */
  int32_t num_tokens, kind;
  int64_t bytes; /* of all of it */
  int64_t unused[3];
} epcy_message;

/* How far a stream is. */
typedef struct epcy_stream {
  int64_t num_in_all;
  int64_t next;  /* the place of the next token */
  int64_t token; /* and from which of this rank's tokens on it is found */
} epcy_stream;

/* A combine at the source. The messages that lie here are summed as far as they go. */
typedef struct epcy_nodes_sum {
  const epcy_host_combine *call;
  const char **messages; /* [num_links]: the oldest of each link that is not used up; NULL: not here yet */
  int64_t *next;         /* [num_links]: the place, in each link's stream, of the next token */
  int64_t token;         /* the next of this rank's tokens */
  int64_t wanted;        /* out: the link whose message is missing or used up; -1: all tokens are summed */
  char *scratch;         /* a row for each rank of this node */
} epcy_nodes_sum;

/* The state of a rank as the ranks of other nodes see it: its words, its status, and its newest records. */
typedef struct epcy_told {
  uint64_t words[EPCY_NUM_WORDS], without;
  uint64_t record; /* the newest one that was told */
  uint32_t leaving, asked, answered, started;
} epcy_told;

/* What a rank of another node said last, beside its words. */
typedef struct epcy_heard {
  uint32_t leaving;  /* it frees its Buffer, and needs nothing any more */
  uint32_t asked;    /* how often it asked for an answer, so that it knows that it is up to date */
  uint32_t answered; /* the last question of this rank that it had heard */
} epcy_heard;

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* nodes.c */
/* Bytes that the largest message may have. */
int64_t epcy_nodes_message_bytes(const epcy_host *h, const epcy_nodes *n);
/* Tokens of this rank with a row beyond each link. */
void epcy_nodes_count(const epcy_host *h, const epcy_nodes *n, const epcy_route *routes, int64_t num_tokens,
                      int64_t *counts);
/* Make the next message of a dispatch's stream over `link`; its bytes. */
int64_t epcy_nodes_pack(const epcy_host *h, const epcy_nodes *n, const epcy_host_dispatch *call, int32_t link,
                        int with_routes, epcy_stream *stream, char *to);
/* Bytes of its rows and scales. */
int64_t epcy_nodes_payload_bytes(const epcy_host_dispatch *call, const char *message);
/* Put a message's rows where they belong in this node; `routes` (num_in_all, K) are the stream's, of which it may bring
 * its own; of `like` only the format of a row counts. */
void epcy_nodes_forward(epcy_host *h, const epcy_host_dispatch *like, int with_routes, epcy_route *routes,
                        const char *message);
/* Make the next message of weights (T, K) for `link`, which the sums of its node take. */
int64_t epcy_nodes_pack_weights(const epcy_host *h, const epcy_nodes *n, const epcy_route *routes, const float *weights,
                                int32_t link, epcy_stream *stream, int64_t most_bytes, char *to);
/* Make the next message of sums; routes (num_in_all, K) and weights (num_in_all, K) or NULL are the stream's. */
int64_t epcy_nodes_reduce(epcy_host *h, const epcy_nodes *n, const epcy_host_combine *like, const epcy_route *routes,
                          const float *weights, int with_weights, epcy_stream *stream, char *to);
/* Sum tokens until a message is missing. */
void epcy_nodes_sum_tokens(epcy_host *h, const epcy_nodes *n, epcy_nodes_sum *s, int with_weights);

/* nodes_low_latency.c */
/* Bytes that the largest message of a kind may have. */
int64_t epcy_nodes_low_latency_bytes(const epcy_shape *shape, int kind);
/* Make the message of a call for a rank of another node; combine: `counts` (L) are the rows of each local expert. Its
 * bytes; -1: no memory. */
int64_t epcy_nodes_low_latency_pack(const epcy_host *h, int kind, int slot, uint64_t epoch, int64_t rank,
                                    const int64_t *counts, char *to, int64_t *payload_bytes);
uint64_t epcy_nodes_low_latency_epoch(const char *message);
/* Put a message into the copy of its sender's slot. A combine's rows stay where they are. */
void epcy_nodes_low_latency_apply(epcy_host *h, int64_t rank, const char *message);
/* Routes (num_tokens, K) whose rows are those of the messages that came. */
void epcy_nodes_low_latency_routes(const epcy_host *h, uint64_t epoch, const epcy_route *routes, int64_t num_tokens,
                                   epcy_route *out);

/* snapshot.c */
int64_t epcy_snapshot_bytes(const epcy_shape *shape);
/* Write what changed since `told` was told to `rank`; its bytes, 0: nothing. `leaving` and `asked` are this rank's. */
int64_t epcy_snapshot_take(const epcy_host *h, int64_t rank, uint32_t leaving, uint32_t asked, const epcy_heard *heard,
                           epcy_told *told, char *to);
/* Bytes of a snapshot of which the first piece is here. */
int64_t epcy_snapshot_num_bytes(const char *snapshot);
/* Make a snapshot the state of `rank` here. */
void epcy_snapshot_apply(epcy_host *h, int64_t rank, const char *snapshot, epcy_heard *heard);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
