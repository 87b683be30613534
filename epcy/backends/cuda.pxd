"""C declarations of epcy/cuda.h."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from epcy.layout cimport epcy_area, epcy_heap, epcy_shape


cdef extern from "epcy/cuda.h" nogil:
    enum:
        EPCY_MAX_RANKS
        EPCY_MAX_CHUNKS
        EPCY_NUM_HEADERS
        EPCY_NUM_MARKS
        EPCY_MARK_ROWS
        EPCY_CUDA_TEXT_BYTES
        EPCY_UNIQUE_ID_BYTES
        EPCY_VERDICT_OK
        EPCY_VERDICT_OVERFLOW
        EPCY_VERDICT_BAD_ID
        EPCY_VERDICT_MISMATCH
        EPCY_VERDICT_REFUSED
        EPCY_VERDICT_BROKEN
        EPCY_CUDA_ELSEWHERE

    const uint32_t EPCY_HEADER_WAITS
    const uint32_t EPCY_HEADER_REFUSED
    const uint32_t EPCY_HEADER_COMPARED
    const uint32_t EPCY_COUNT_BAD

    ctypedef struct epcy_control:
        int64_t headers, done, counts, experts, starts, progress, fans, bad, text, marks, left, resets, lost, local
        int64_t counters, bytes

    ctypedef struct epcy_local:
        uint32_t epoch[256]
        uint32_t broken, masked, blocks_met

    enum:
        EPCY_STAMP_LOW_LATENCY_DISPATCH_RECEIVE
        EPCY_NUM_STAMP_KINDS
        EPCY_NUM_STAMPS

    ctypedef struct epcy_stamp:
        uint64_t epoch_op, start_ns, again
        uint64_t end_ns[7]

    ctypedef struct epcy_counters:
        uint64_t wait_ns[32]
        uint64_t tokens_to[32]
        uint64_t tokens_from[32]
        uint64_t most_rows[2][2]
        uint64_t bytes_moved
        uint64_t lanes_lost[2][32]
        epcy_stamp stamps[5][1024]

    ctypedef struct epcy_cuda_bad:
        uint32_t epoch
        int64_t token, lane, value

    ctypedef struct epcy_report:
        uint64_t num_rows
        uint32_t own_base, own_count
        uint64_t verdict[32]
        uint32_t expired, phase, peer, epoch
        uint64_t expected, seen
        uint32_t operation, gone
        int64_t timeout_ns
        epcy_cuda_bad bad[32]
        uint32_t late_verdict, late_rank
        uint64_t late_rows, late_limit
        uint32_t masked, without, without_epoch, without_operation, stop
        char *late_text

    ctypedef struct epcy_peers:
        char *base[32]
        epcy_shape shape
        epcy_control control
        epcy_area area
        epcy_heap heap
        int32_t rank
        epcy_report *report
        int64_t timeout_ns
        uint32_t ticket, operation
        int32_t num_local, goes_on
        uint32_t far

    ctypedef struct epcy_cuda_routing:
        int32_t *list
        int32_t *chunk_count
        int32_t *chunk_base
        int32_t *recv_count
        int32_t *pos
        int64_t *num_recv
        int64_t *experts
        int32_t *lane_row
        int32_t *fans
        int64_t *offsets
        int32_t num_peer_chunks, num_own_chunks

    ctypedef struct epcy_cuda_dispatch:
        epcy_peers peers
        epcy_cuda_routing routing
        const char *x
        const char *scales
        const void *topk_idx
        const float *topk_weights
        const int64_t *lane_ids
        int64_t *lane_ids_out
        int64_t x_stride_bytes, row_bytes
        int32_t num_scales, num_tokens, is_int64, header, limit, fill_to, cached
        int32_t num_peer_blocks, num_own_blocks, num_copy_blocks, alignment

    ctypedef struct epcy_cuda_combine:
        epcy_peers peers
        const int32_t *pos
        const char *bias[2]
        char *out
        const int64_t *lane_ids
        float *out_weights
        int64_t y_offset, weights_offset, row_bytes
        int32_t dtype, num_tokens, header
        epcy_cuda_routing routing
        const char *x
        const float *topk_weights
        int64_t x_stride_bytes
        const char *own_rows
        int64_t own_stride_bytes

    ctypedef struct epcy_cuda_staging:
        const char *src "from"
        char *to
        const int64_t *num_recv
        const int32_t *own_base
        const int32_t *own_count
        int64_t num_rows, row_bytes, stride_bytes

    epcy_control epcy_control_layout(const epcy_shape *shape)
    const char *epcy_cuda_error_name(int code)
    int epcy_cuda_num_devices(int *count)
    int epcy_cuda_set_device(int device, int *previous)
    int epcy_cuda_mapped(int64_t nbytes, void **host, void **device)
    void epcy_cuda_unmap(void *host)
    int epcy_cuda_zero(void *device, int64_t nbytes)
    int epcy_cuda_fetch(void *host, const void *device, int64_t nbytes)
    int epcy_cuda_put(void *device, const void *host, int64_t nbytes)
    int epcy_cuda_stage(void *to, const void *src, int64_t rows, int64_t row_bytes, int64_t stride_bytes, void *stream)
    int epcy_cuda_compare_clocks(int num_rounds, int64_t *ahead_ns, int64_t *error_ns)
    int epcy_cuda_stream(void **stream)
    void epcy_cuda_stream_free(void *stream)
    int epcy_cuda_is_capturing(void *stream, int *yes)
    int epcy_cuda_event(void **event)
    void epcy_cuda_event_free(void *event)
    int epcy_cuda_event_record(void *event, void *stream)
    int epcy_cuda_event_wait(void *event, void *stream)
    int epcy_cuda_event_query(void *event, int *done)
    int epcy_nvshmem_unique_id(void *out)
    int epcy_nvshmem_init(int rank, int num_ranks, const void *given)
    int epcy_nvshmem_init_status()
    void epcy_nvshmem_version(int *major, int *minor, int *patch)
    void *epcy_nvshmem_align(int64_t nbytes)
    void epcy_nvshmem_free(void *p)
    void *epcy_nvshmem_ptr(const void *p, int pe)
    int epcy_cuda_poll(const epcy_report *report, uint32_t ticket, int first_rank, int num_ranks, int64_t num_experts,
                       int64_t slice_ns, int *done)
    int epcy_cuda_load()
    int epcy_cuda_launch_dispatch(const epcy_cuda_dispatch *call, void *stream)
    int epcy_cuda_launch_dispatch_expert(const epcy_cuda_dispatch *call, void *stream)
    int epcy_cuda_launch_staging(const epcy_cuda_staging *call, int num_sms, void *stream)
    int epcy_cuda_launch_combine(const epcy_cuda_combine *call, int num_sms, void *stream)
    int epcy_cuda_launch_combine_expert(const epcy_cuda_combine *call, int num_sms, void *stream)
    int epcy_cuda_launch_mask(const epcy_peers *peers, uint32_t more, uint32_t fewer, void *stream)
    int epcy_cuda_launch_step(const epcy_peers *peers, uint32_t header, const char *text, void *stream)
