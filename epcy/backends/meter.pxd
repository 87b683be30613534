"""C declarations of epcy/meter.h, and its owner."""

from libc.stdint cimport int32_t, int64_t, uint64_t


cdef extern from "epcy/meter.h" nogil:
    enum:
        EPCY_METER_OPS
        EPCY_NUM_SPANS
        EPCY_SPAN_CALL
        EPCY_SPAN_COUNT
        EPCY_SPAN_EXCHANGE
        EPCY_SPAN_SEND
        EPCY_SPAN_WAIT
        EPCY_SPAN_FAN_OUT
        EPCY_SPAN_REDUCE
        EPCY_NUM_BUCKETS
        EPCY_GAUGES_AT

    ctypedef struct epcy_histogram:
        int64_t count, sum_ns, min_ns, max_ns

    ctypedef struct epcy_event:
        int64_t start_ns, end_ns
        uint64_t epoch
        int32_t op, span

    ctypedef struct epcy_gauges:
        int64_t first_expert, num_experts, num_calls, busy_ns, wait_ns, tokens_sent, tokens_received, bytes_moved

    ctypedef struct epcy_meter:
        epcy_histogram times[1][7]          # [EPCY_METER_OPS][EPCY_NUM_SPANS]
        epcy_event *ring
        uint64_t num_events, capacity
        int64_t *wait_ns
        int64_t *tokens_to
        int64_t *tokens_from
        int64_t most_rows[3][2]
        int64_t node_bytes[2]
        epcy_gauges *gauges
        uint64_t epoch

    int epcy_bucket_of(int64_t ns)
    int64_t epcy_bucket_start(int bucket)
    int64_t *epcy_gauge_experts(epcy_gauges *gauges)
    int64_t epcy_gauges_bytes(int64_t num_experts)
    void epcy_meter_record(epcy_meter *m, int op, int span, int64_t start_ns, int64_t end_ns, uint64_t epoch)
    void epcy_meter_tokens(epcy_meter *m, const int64_t *to, const int64_t *src, const int64_t *experts)
    void epcy_meter_rows(epcy_meter *m, int region, int area, int64_t rows)
    epcy_meter *epcy_meter_open(int64_t num_ranks, int64_t first_expert, int64_t num_experts, int64_t num_events)
    void epcy_meter_close(epcy_meter *m)
    int epcy_meter_resize(epcy_meter *m, int64_t num_events)
    void epcy_meter_attach(epcy_meter *m, char *page)
    void epcy_meter_reset(epcy_meter *m)
    int64_t epcy_histogram_quantile(const epcy_histogram *h, double share)


cdef enum:                                  # regions of most_rows
    RECEIVE_ROWS = 0
    COMBINE_ROWS = 1
    LOW_LATENCY_ROWS = 2


cdef class Meter:
    """What one Buffer counts of itself."""

    cdef epcy_meter *m
    cdef readonly int rank, num_ranks
    cdef readonly str backend
    cdef readonly tuple group               # the ranks of COMM_WORLD that the Buffer's ranks are
    cdef readonly int number                # of this Buffer among those of this process over the same group
    cdef dict sizes                         # bytes of the heap's regions
    cdef int64_t row_bytes, low_latency_row_bytes
    cdef public int64_t clock_error_ns      # how far off its times may be: 0 on the host
    cdef public object refresh              # called before reading, where counts lie on a GPU; or None
    cdef public object forget               # called by set_back(), there: let how full areas were begin anew; or None
    cdef object page                        # keeps the running sums' memory
    cdef tuple zero                         # running sums at the last reset
    cdef double since                       # time.monotonic() of it
    cdef public list flows                  # while a trace is taken: (epoch, op, tokens to each rank); else None
    cdef object __weakref__

    cdef int attach(self, page) except -1
    cdef int know_heap(self, int64_t control, int64_t receive, int64_t combine, int64_t low_latency, int64_t row_bytes,
                       int64_t low_latency_row_bytes) except -1
    cdef int note(self, uint64_t epoch, int op, const int64_t *to) except -1
