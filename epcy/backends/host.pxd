"""C declarations of epcy/host.h, and the host backend."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from epcy.arrays cimport Array
from epcy.backends.base cimport Backend
from epcy.backends.call cimport CombineCall, DispatchCall
from epcy.backends.meter cimport Meter, epcy_meter
from epcy.backends.window cimport Heap
from epcy.handle cimport Dispatch, Handle
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
    int epcy_host_wait(const epcy_host *h, int word, uint64_t value, int64_t slice_ns)
    void epcy_host_count(const epcy_host *h, const void *topk_idx, int is_int64, int64_t num_tokens, int layout,
                         epcy_route *routes, int64_t *counts, int64_t *expert_counts, epcy_bad_id *bad)
    int64_t epcy_host_rows(const epcy_host *h, int64_t rank, int64_t *limit)
    void epcy_host_place(const epcy_host *h, epcy_host_dispatch *call)
    void epcy_host_send(epcy_host *h, const epcy_host_dispatch *call)
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


cdef class HostHandle(Handle):
    cdef epcy_route *routes             # (T, K)
    cdef int64_t *expert_numbers        # counts (L,), then offsets (L + 1,)
    cdef int64_t num_local
    cdef int64_t *tokens                # to each rank (R,), then from each (R,)
    cdef int64_t num_true_rows          # of this rank, unclipped


cdef class HostBackend(Backend):
    cdef epcy_host h
    cdef Heap heap
    cdef object page, page_path, __weakref__
    cdef uint64_t num_resets
    cdef int num_threads                # of a call, now
    cdef int reset_round                # 0: no reset() is half done; else the round to go on with

    cdef object open_status(self, directory)
    cdef int touch_rank(self, int64_t rank) except -1
    cdef epcy_record *begin(self, int op) except NULL
    cdef int finish(self, int op) except -1
    cdef int wait(self, int op, int word, uint64_t value, uint64_t first) except -1
    cdef int tell(self, int op, str phase, int word, uint64_t value) except -1
    cdef uint64_t furthest_reset(self)
    cdef int arrive(self, int op) except -1
    cdef int wait_longer(self, int op, int word, uint64_t value, uint64_t first, int state) except -1
    cdef object disagreement(self)
    cdef object implausible(self)
    cdef object overflow_error(self)
    cdef HostHandle new_handle(self, str layout, int64_t num_tokens, int64_t alignment, int64_t num_worst_tokens)
    cdef HostHandle nothing_came(self, HostHandle of, error)
    cdef HostHandle count(self, DispatchCall call, epcy_record *record)
    cdef int stage(self, CombineCall call) except -1
    cdef int count_tokens(self, HostHandle handle, DispatchCall call, int area, bint uncached) except -1
    cdef int count_sums(self, HostHandle handle, int64_t row_bytes) except -1
    cdef int poison(self, int64_t at) except -1

    # what host_low_latency.pyx needs of C: the kernels are linked with this module alone
    cdef void store(self, int word, uint64_t value) noexcept
    cdef void phase(self, int op, int phase) noexcept
    cdef void open_call(self, int op) noexcept
    cdef void receiving(self, int op, uint64_t epoch) noexcept
    cdef void span(self, int span) noexcept
    cdef epcy_low_latency_header *header(self, int64_t rank, int kind, int slot) noexcept
    cdef const epcy_low_latency_header *find(self, int64_t rank, int kind, uint64_t epoch) noexcept
    cdef void send_rows(self, epcy_low_latency_send *call) noexcept nogil
    cdef int64_t receive_rows(self, const epcy_low_latency_receive *call) noexcept nogil
    cdef void stage_rows(self, char *to, const char *data, const int64_t *counts, int64_t row_bytes) noexcept nogil
    cdef int64_t sum_rows(self, const epcy_low_latency_combine *call) noexcept nogil
    cdef int32_t *bases_of(self, int64_t rank, int kind, int slot) noexcept
    cdef void publish(self, epcy_low_latency_header *header, uint64_t epoch) noexcept
    cdef void invalidate(self, int kind, uint64_t epoch) noexcept
    cdef bint is_masked_by(self, int64_t rank, uint64_t epoch) noexcept
    cdef void mask(self, int64_t rank, bint masked) noexcept
    cdef int mask_routes(self, const epcy_masked_routes *call) noexcept
    cdef void renormalize(self, const epcy_route *routes, int64_t num_tokens, const float *weights,
                          float *out) noexcept
    cdef int op_of(self, int64_t rank, uint64_t epoch) noexcept
