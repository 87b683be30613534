"""C declarations of epcy/low_latency.h."""

from libc.stdint cimport int32_t, int64_t, uint32_t

from epcy.backends.cuda cimport epcy_peers
from epcy.layout cimport epcy_shape


cdef extern from "epcy/low_latency.h" nogil:
    enum:
        EPCY_LINE_DATA
        EPCY_PART_LINES
        EPCY_LOW_LATENCY_MAX_LOCAL
        EPCY_LOW_LATENCY_MAX_TOKENS
        EPCY_LOW_LATENCY_DISPATCH
        EPCY_LOW_LATENCY_COMBINE
        EPCY_LOW_LATENCY_SEND
        EPCY_LOW_LATENCY_RECEIVE

    const uint32_t EPCY_LOW_LATENCY_FP8
    const uint32_t EPCY_LOW_LATENCY_ROUND_SCALE
    const uint32_t EPCY_LOW_LATENCY_UE8M0
    const uint32_t EPCY_LOW_LATENCY_SOURCE
    const uint32_t EPCY_LOW_LATENCY_LOGFMT
    const uint32_t EPCY_LOW_LATENCY_WEIGHTS
    const uint32_t EPCY_LOW_LATENCY_RENORMALIZE

    ctypedef struct epcy_low_latency_wire:
        int64_t headers, begin, bytes

    ctypedef struct epcy_low_latency_found:
        uint32_t verdict, has_bad
        int64_t bad_token, bad_lane, bad_value
        uint32_t not_sent_to, missing, left_by, not_returning

    ctypedef struct epcy_low_latency_handle:
        epcy_low_latency_found *found
        uint32_t *sent
        int64_t *counts
        int32_t *flows
        int32_t *dropped

    ctypedef struct epcy_low_latency_call:
        int32_t num_tokens, phases, dtype, max_blocks
        uint32_t header
        uint32_t *sent
        epcy_low_latency_wire wire
        epcy_low_latency_handle handle
        epcy_peers peers

    ctypedef struct epcy_low_latency_dispatch:
        const char *x
        int64_t x_stride_bytes
        const void *topk_idx
        const float *topk_weights
        char *recv_x
        uint32_t *recv_scales
        int64_t *recv_count
        void *stats
        int32_t is_int64, stats_is_int64, num_scales, part_scales, area
        epcy_low_latency_call call

    ctypedef struct epcy_low_latency_combine:
        const char *x
        const float *topk_weights
        char *out
        epcy_low_latency_call call

    epcy_low_latency_wire epcy_low_latency_wire_layout(const epcy_shape *shape, int64_t begin)
    int64_t epcy_low_latency_handle_layout(const epcy_shape *shape, char *base, epcy_low_latency_handle *handle)
    void epcy_low_latency_constants(epcy_low_latency_call *call)
    void epcy_low_latency_rows(epcy_low_latency_call *call, int64_t row_bytes)
    int epcy_cuda_low_latency_dispatch_blocks(const epcy_shape *shape, int *blocks)
    int epcy_cuda_low_latency_combine_blocks(const epcy_shape *shape, int *blocks)
    int epcy_cuda_launch_low_latency_dispatch(const epcy_low_latency_dispatch *call, void *stream)
    int epcy_cuda_launch_low_latency_combine(const epcy_low_latency_combine *call, void *stream)
    int epcy_cuda_launch_low_latency_refusal(const epcy_peers *peers, const epcy_low_latency_wire *wire, int kind,
                                             uint32_t header, const char *text, void *stream)
    int epcy_cuda_launch_reset(const epcy_peers *peers, const epcy_low_latency_wire *wire, uint32_t round, void *stream)
