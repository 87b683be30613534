"""C declarations of epcy/nodes.h: what the host backend does around messages between nodes."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from epcy.backends.host_kernels cimport epcy_host, epcy_host_combine, epcy_host_dispatch, epcy_route
from epcy.layout cimport epcy_shape


cdef extern from "epcy/nodes.h" nogil:
    enum:
        EPCY_MESSAGE_ROWS
        EPCY_MESSAGE_WEIGHTS
        EPCY_MESSAGE_SUMS

    ctypedef struct epcy_nodes:
        int64_t num_links, chunk_tokens
        const int32_t *link_of
        const int32_t *group_of

    ctypedef struct epcy_message:
        uint64_t epoch
        int64_t num_in_all, first
        int32_t num_tokens, kind
        int64_t bytes

    ctypedef struct epcy_stream:
        int64_t num_in_all, next, token

    ctypedef struct epcy_nodes_sum:
        const epcy_host_combine *call
        const char **messages
        int64_t *next
        int64_t token, wanted
        char *scratch

    ctypedef struct epcy_told:
        uint64_t without, record

    ctypedef struct epcy_heard:
        uint32_t leaving, asked, answered

    int64_t epcy_nodes_message_bytes(const epcy_host *h, const epcy_nodes *n)
    void epcy_nodes_count(const epcy_host *h, const epcy_nodes *n, const epcy_route *routes, int64_t num_tokens,
                          int64_t *counts)
    int64_t epcy_nodes_pack(const epcy_host *h, const epcy_nodes *n, const epcy_host_dispatch *call, int32_t link,
                            int with_routes, epcy_stream *stream, char *to)
    int64_t epcy_nodes_payload_bytes(const epcy_host_dispatch *call, const char *message)
    void epcy_nodes_forward(epcy_host *h, const epcy_host_dispatch *like, int with_routes, epcy_route *routes,
                            const char *message)
    int64_t epcy_nodes_pack_weights(const epcy_host *h, const epcy_nodes *n, const epcy_route *routes,
                                    const float *weights, int32_t link, epcy_stream *stream, int64_t most_bytes,
                                    char *to)
    int64_t epcy_nodes_reduce(epcy_host *h, const epcy_nodes *n, const epcy_host_combine *like,
                              const epcy_route *routes, const float *weights, int with_weights, epcy_stream *stream,
                              char *to)
    void epcy_nodes_sum_tokens(epcy_host *h, const epcy_nodes *n, epcy_nodes_sum *s, int with_weights)
    int64_t epcy_nodes_low_latency_bytes(const epcy_shape *shape, int kind)
    int64_t epcy_nodes_low_latency_pack(const epcy_host *h, int kind, int slot, uint64_t epoch, int64_t rank,
                                        const int64_t *counts, char *to, int64_t *payload_bytes)
    uint64_t epcy_nodes_low_latency_epoch(const char *message)
    void epcy_nodes_low_latency_apply(epcy_host *h, int64_t rank, const char *message)
    void epcy_nodes_low_latency_routes(const epcy_host *h, uint64_t epoch, const epcy_route *routes,
                                       int64_t num_tokens, epcy_route *out)
    int64_t epcy_snapshot_bytes(const epcy_shape *shape)
    int64_t epcy_snapshot_take(const epcy_host *h, int64_t rank, uint32_t leaving, uint32_t asked,
                               const epcy_heard *heard, epcy_told *told, char *to)
    int64_t epcy_snapshot_num_bytes(const char *snapshot)
    void epcy_snapshot_apply(epcy_host *h, int64_t rank, const char *snapshot, epcy_heard *heard)
