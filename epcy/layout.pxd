"""C declarations of epcy/layout.h, for cimport: where things lie in a Buffer's memory."""

from libc.stdint cimport int64_t


cdef extern from "epcy/layout.h" nogil:
    enum:
        EPCY_PAGE_BYTES
        EPCY_LINE_BYTES
        EPCY_SCALE_GROUP
        EPCY_NUM_AREAS
        EPCY_GUARD_BYTES

    ctypedef struct epcy_shape:
        int64_t num_ranks, num_experts, num_topk, num_max_tokens, hidden, row_bytes, num_rows
        int64_t num_low_latency_tokens

    ctypedef struct epcy_area:
        int64_t payload, scales, topk_idx, topk_weights, bytes

    ctypedef struct epcy_low_latency_area:
        int64_t payload, scales, counts, bytes

    ctypedef struct epcy_heap:
        int64_t control
        int64_t receive[2]
        int64_t combine[2]
        int64_t low_latency_x[2]
        int64_t low_latency_y[2]
        int64_t bytes

    int64_t epcy_round_up(int64_t value, int64_t multiple)
    int64_t epcy_num_local_experts(const epcy_shape *shape)
    int64_t epcy_num_scales(int64_t hidden)
    epcy_area epcy_area_layout(const epcy_shape *shape)
    epcy_heap epcy_heap_layout(const epcy_shape *shape, int64_t control_bytes)
    int64_t epcy_num_low_latency_rows(const epcy_shape *shape)
    epcy_low_latency_area epcy_low_latency_area_layout(const epcy_shape *shape)
    int64_t epcy_low_latency_area_bytes(const epcy_shape *shape)
    int64_t epcy_low_latency_input_bytes(const epcy_shape *shape)
    int64_t epcy_default_num_rows(const epcy_shape *shape)
    int64_t epcy_rank_of_expert(int64_t expert, int64_t num_local)
    int64_t epcy_local_expert(int64_t expert, int64_t num_local)
    int64_t epcy_padded(int64_t count, int64_t alignment)


cdef inline epcy_shape shape_of(dict sizes):
    """A Buffer's shape out of its sizes by name."""
    cdef epcy_shape s
    s.num_ranks, s.num_experts, s.num_topk = sizes["num_ranks"], sizes["num_experts"], sizes["num_topk"]
    s.num_max_tokens, s.hidden = sizes["num_max_tokens"], sizes["hidden"]
    s.row_bytes, s.num_rows = sizes["row_bytes"], sizes["num_rows"]
    s.num_low_latency_tokens = sizes["num_low_latency_tokens"]
    return s


cdef inline dict region_bytes(epcy_heap heap, int64_t control_bytes):
    """Bytes of each region by name; behind the control region proper lies what low-latency rows travel through."""
    cdef int64_t control = epcy_round_up(control_bytes + EPCY_GUARD_BYTES, EPCY_PAGE_BYTES)
    return {"control": control, "receive": heap.combine[0] - heap.receive[0],
            "combine": heap.low_latency_x[0] - heap.combine[0],
            "low_latency": heap.bytes - heap.low_latency_x[0] + heap.receive[0] - control, "total": heap.bytes}
