"""The host backend's low-latency dispatch and combine."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from epcy.backends.call cimport LowLatencyCombineCall, LowLatencyDispatchCall
from epcy.backends.host_kernels cimport *
from epcy.backends.host_low_latency_step cimport HostLowLatencyStep
from epcy.handle cimport LowLatencyHandle


cdef class HostLowLatencyHandle(LowLatencyHandle):
    cdef epcy_route *routes             # (T, K)
    cdef int64_t *counts                # (L,) rows received
    cdef int64_t *tokens                # to each rank (R,), then from each (R,)
    cdef float *weights                 # (T, K) of the dispatch, or NULL
    cdef int64_t num_local
    cdef int num_ranks
    cdef uint8_t *sources               # (R,) whose rows were placed here
    cdef int32_t *bases                 # (R, L) where each source's rows lie at each local expert, or -1
    cdef int32_t *before                # (E,) rows that this rank takes to lie before its own
    cdef int64_t *not_sent              # (R,) lanes dropped at the dispatch, then (R,) missing in the last combine


cdef class HostLowLatencyBackend(HostLowLatencyStep):
    cdef uint64_t input_epochs[2]       # of the last combine that used a combine area

    cdef HostLowLatencyHandle make_handle(self, LowLatencyDispatchCall call)
    cdef int count_tokens_of(self, HostLowLatencyHandle handle, epcy_low_latency_receive *r) except -1
    cdef int count_sums_of(self, HostLowLatencyHandle handle, uint64_t epoch, int64_t row_bytes) except -1
    cdef int count_stats(self, LowLatencyDispatchCall call, HostLowLatencyHandle handle) except -1
    cdef int await_input(self, int area) except -1
    cdef int sum_all(self, LowLatencyCombineCall call, HostLowLatencyHandle handle, uint8_t *from_) except -1
    cdef bint all_placed(self, HostLowLatencyHandle handle, const uint8_t *from_, uint64_t epoch) noexcept
    cdef int count_not_sent(self, HostLowLatencyHandle handle) except -1
    cdef int put_in_area(self, LowLatencyCombineCall call, HostLowLatencyHandle handle) except -1
