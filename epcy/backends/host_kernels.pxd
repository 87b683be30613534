"""C declarations of epcy/host.h: src/host, linked by `# distutils: libraries = epcy_host`."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from epcy.backends.meter cimport epcy_meter
from epcy.layout cimport epcy_area, epcy_heap, epcy_shape


cdef extern from "epcy/host.h" nogil:
    enum:
        EPCY_TEXT_BYTES
        EPCY_OP_DISPATCH
        EPCY_OP_COMBINE
        EPCY_OP_BARRIER
        EPCY_OP_FREE
        EPCY_OP_LOW_LATENCY_DISPATCH
        EPCY_OP_LOW_LATENCY_COMBINE
        EPCY_LOW_LATENCY_DISPATCH
        EPCY_LOW_LATENCY_COMBINE
        EPCY_NUM_SLOTS
        EPCY_PHASE_IDLE
        EPCY_PHASE_ARRIVAL
        EPCY_PHASE_DATA
        EPCY_PHASE_COMPLETION
        EPCY_LAYOUT_RANK
        EPCY_LAYOUT_EXPERT
        EPCY_WORD_ARRIVED
        EPCY_WORD_DONE
        EPCY_WORD_BROKEN
        EPCY_WORD_RESET
        EPCY_WORD_EPOCH
        EPCY_WORD_RECEIVED_DISPATCH
        EPCY_WORD_RECEIVED_COMBINE
        EPCY_WAIT_DONE
        EPCY_WAIT_PENDING
        EPCY_WAIT_BROKEN
        EPCY_STATUS_VERSION

    const uint64_t EPCY_STATUS_MAGIC

    ctypedef struct epcy_status:
        uint64_t magic
        int32_t version, pid, rank, size

    ctypedef struct epcy_record:
        uint64_t epoch
        int32_t op, dtype, layout, cached, has_weights, refused, waits, thread
        int64_t alignment
        uint64_t routing
        int64_t num_tokens, limit, area_offset, weights_offset
        char *text

    ctypedef struct epcy_route:
        int32_t rank, lane, local_expert
        int64_t row

    ctypedef struct epcy_host:
        epcy_shape shape
        epcy_area area
        epcy_heap heap
        int64_t rank
        char **base
        const uint8_t *is_remote
        uint64_t epoch
        int64_t chunk_tokens, stream_bytes
        epcy_status *page
        epcy_meter *meter
        uint8_t *masked
        int64_t num_masked

    ctypedef struct epcy_host_dispatch:
        const char *x
        int64_t x_stride_bytes, row_bytes
        const char *scales
        int64_t num_scales
        const float *topk_weights
        int64_t num_tokens
        epcy_route *routes
        int64_t num_rows
        int64_t *expert_counts
        int64_t *expert_offsets
        int64_t fill_to

    ctypedef struct epcy_host_combine:
        const epcy_route *routes
        int64_t num_tokens
        int32_t dtype
        const float *topk_weights
        const char *bias[2]
        char *out
        float *out_weights

    ctypedef struct epcy_bad_id:
        int64_t num_bad, token, lane, value

    ctypedef struct epcy_low_latency_header:
        uint64_t epoch
        int32_t op, dtype, use_fp8, round_scale, use_ue8m0, reduction, use_logfmt, has_weights
        uint64_t routing
        int64_t num_tokens, y_offset
        int32_t refused
        char *text

    ctypedef struct epcy_low_latency_send:
        const char *x
        int64_t x_stride_bytes, num_tokens
        const void *topk_idx
        int32_t is_int64, dtype, use_fp8, round_scale, use_ue8m0, slot
        epcy_route *routes
        epcy_bad_id bad

    ctypedef struct epcy_low_latency_receive:
        uint64_t epoch
        char *payload
        char *scales
        int64_t *counts
        int64_t row_bytes, scale_bytes
        epcy_route *routes
        int64_t num_tokens
        int64_t *tokens
        uint8_t *sources
        int32_t *bases
        int32_t *before

    ctypedef struct epcy_low_latency_combine:
        uint64_t epoch
        epcy_host_combine sum
        int32_t at_source, use_logfmt
        const uint8_t *from_ "from"

    ctypedef struct epcy_masked_routes:
        const epcy_route *given
        epcy_route *routes
        int64_t num_tokens
        const uint8_t *from_ "from"
        const int32_t *before
        uint64_t epoch
        int64_t *num_dropped

    int64_t epcy_host_control_bytes(const epcy_shape *shape)
    const int64_t EPCY_CHUNK_TOKENS, EPCY_STREAM_BYTES
    int epcy_host_open(epcy_host *h, double spin_us, int num_threads)
    void epcy_host_close(epcy_host *h)
    void epcy_host_touch(const epcy_host *h, int64_t rank, int64_t offset, int64_t num_bytes)
    int64_t epcy_low_latency_wire_bytes(const epcy_shape *shape)
    int epcy_host_use_threads(epcy_host *h, int num_threads)
    epcy_status *epcy_host_status(const epcy_host *h, int64_t rank)
    epcy_record *epcy_host_record(const epcy_host *h, int64_t rank, uint64_t epoch)
    int64_t *epcy_host_counts(const epcy_host *h, int64_t rank, uint64_t epoch)
    int64_t *epcy_host_expert_counts(const epcy_host *h, int64_t rank, uint64_t epoch)
    uint64_t epcy_host_word(const epcy_host *h, int64_t rank, int word)
    void epcy_host_store(epcy_host *h, int word, uint64_t value)
    void epcy_host_phase(epcy_host *h, int op, int phase)
    void epcy_host_open_call(epcy_host *h, int op)
    void epcy_host_span(epcy_host *h, int span)
    int64_t epcy_now_ns()
    int epcy_host_wait(const epcy_host *h, int word, uint64_t value, int64_t slice_ns)
    void epcy_host_count(const epcy_host *h, const void *topk_idx, int is_int64, int64_t num_tokens, int layout,
                         epcy_route *routes, int64_t *counts, int64_t *expert_counts, epcy_bad_id *bad)
    int64_t epcy_host_rows(const epcy_host *h, int64_t rank, int64_t *limit)
    void epcy_host_place(const epcy_host *h, epcy_host_dispatch *call)
    void epcy_host_send(epcy_host *h, const epcy_host_dispatch *call)
    void epcy_host_fill(const epcy_host *h, const epcy_host_dispatch *call)
    void epcy_host_combine_rows(epcy_host *h, const epcy_host_combine *call)
    epcy_low_latency_header *epcy_low_latency_header_at(const epcy_host *h, int64_t rank, int kind, int slot)
    const epcy_low_latency_header *epcy_low_latency_find(const epcy_host *h, int64_t rank, int kind, uint64_t epoch)
    void epcy_host_low_latency_send(epcy_host *h, epcy_low_latency_send *call)
    uint64_t *epcy_host_without(const epcy_host *h, int64_t rank)
    void epcy_host_mask(epcy_host *h, int64_t rank, int masked)
    int32_t *epcy_low_latency_bases(const epcy_host *h, int64_t rank, int kind, int slot)
    void epcy_low_latency_publish(epcy_low_latency_header *header, uint64_t epoch)
    void epcy_low_latency_invalidate(epcy_host *h, int kind, uint64_t epoch)
    int epcy_host_mask_routes(const epcy_host *h, const epcy_masked_routes *call)
    void epcy_host_renormalize(const epcy_host *h, const epcy_route *routes, int64_t num_tokens, const float *weights,
                               float *out)
    int64_t epcy_host_low_latency_receive(epcy_host *h, const epcy_low_latency_receive *call)
    void epcy_host_low_latency_stage(epcy_host *h, char *to, const char *data, const int64_t *counts,
                                     int64_t row_bytes)
    int64_t epcy_host_low_latency_combine(epcy_host *h, const epcy_low_latency_combine *call)
    int epcy_simd_level()
    int epcy_simd_limit(int level)
    void epcy_cast_to_fp8(const void *x, int dtype, int64_t num_rows, int64_t hidden, int power_of_two,
                          uint8_t *payload, float *scales)
    void epcy_cast_from_fp8(const uint8_t *payload, const float *scales, int64_t num_rows, int64_t hidden, int dtype,
                            void *out)
    void epcy_host_bound_exit()
