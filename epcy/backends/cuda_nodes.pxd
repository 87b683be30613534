"""include/epcy/put_nodes.h, as Cython sees it."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from epcy.backends.cuda cimport epcy_cuda_routing, epcy_peers
from epcy.layout cimport epcy_shape


cdef extern from "epcy/put_nodes.h" nogil:
    enum:
        EPCY_NODES_RECORD_BYTES
        EPCY_NODES_PARTS
        EPCY_NODES_IDS
        EPCY_NODES_WEIGHTS
        EPCY_NODES_OWN_NODE

    ctypedef struct epcy_nodes_record:
        uint32_t header, limit, num_tokens, parts
        int64_t bad[64][2]
        char text[512]

    ctypedef struct epcy_nodes_local:
        uint64_t node_bytes[2]

    ctypedef struct epcy_nodes_wire:
        int64_t records, announced, local, record_bytes, bytes
        int32_t num_groups, num_channels, num_slots, chunk_tokens

    ctypedef struct epcy_nodes_routing:
        int32_t *ids
        int32_t *lane_rows
        int32_t *first
        int32_t *feed_rows
        int32_t *own_list
        int32_t *own_order
        int32_t *own_count
        int32_t *feed_list
        int32_t *feed_count
        int32_t *tokens
        int32_t *counts
        int32_t *lanes

    ctypedef struct epcy_nodes_map:
        char *name[32]
        int32_t pe[32]
        int32_t peer[32]
        int32_t back[32]
        uint32_t members[32]
        int32_t group_of[32]
        int32_t order[32]
        int32_t num_steps
        uint32_t near_ranks
        int32_t num_near, hierarchical

    ctypedef struct epcy_nodes_call:
        epcy_peers peers
        epcy_nodes_wire wire
        epcy_nodes_map map
        epcy_cuda_routing routing
        epcy_nodes_routing nodes
        uint32_t header, limit
        int32_t num_tokens, parts, num_blocks
        int64_t row_bytes
        const char *x
        const float *scales
        const void *topk_idx
        const float *topk_weights
        int64_t *lane_ids_out
        int64_t x_stride_bytes
        int32_t num_scales, is_int64, fill_to, alignment
        int64_t y_offset, weights_offset
        const char *own_rows
        int64_t own_stride_bytes
        const char *bias[2]
        char *out
        const int64_t *lane_ids
        float *out_weights
        int32_t dtype

    epcy_nodes_wire epcy_nodes_layout(const epcy_shape *shape, int64_t begin, int32_t num_groups, int32_t num_slots,
                                      int32_t chunk_tokens)
    int epcy_nodes_load()
    int epcy_nodes_resident(int *each)
    int epcy_nodes_launch_record(const epcy_nodes_call *call, const char *text, void *stream)
    int epcy_nodes_launch_await(const epcy_nodes_call *call, void *stream)
    int epcy_nodes_launch_plan(const epcy_nodes_call *call, void *stream)
    int epcy_nodes_launch_dispatch(const epcy_nodes_call *call, void *stream)
    int epcy_nodes_launch_sums(const epcy_nodes_call *call, void *stream)
    int epcy_nodes_launch_combine(const epcy_nodes_call *call, void *stream)
    int epcy_nodes_launch_end(const epcy_nodes_call *call, void *stream)
    int epcy_nodes_launch_leave(const epcy_nodes_call *call, void *stream)
    int epcy_nodes_launch_reset(const epcy_nodes_call *call, const void *wire, uint32_t round, void *stream)
    int epcy_put_launch_rows(char *to, const char *src, int num_rows, int64_t row_bytes, int pe, int num_blocks,
                             void *stream)
