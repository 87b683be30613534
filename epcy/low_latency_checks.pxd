from epcy.arrays cimport Array
from epcy.backends.call cimport LowLatencyCombineCall, LowLatencyDispatchCall
from epcy.checks cimport Checker
from epcy.handle cimport LowLatencyHandle
from libc.stdint cimport int64_t


cdef class LowLatencyChecker(Checker):
    """Looks at the arguments of the low-latency calls too."""

    cdef int64_t num_local, num_slots, num_max_low_latency_tokens

    cdef LowLatencyDispatchCall low_latency_dispatch(
        self, x, topk_idx, topk_weights, bint use_fp8, bint round_scale, bint use_ue8m0, stats, bint return_recv_hook)
    cdef int ids(self, topk_idx) except -1
    cdef Array stats(self, stats)
    cdef LowLatencyHandle low_latency_handle(self, handle)
    cdef LowLatencyCombineCall low_latency_combine(
        self, x, topk_idx, topk_weights, handle, reduction, bint use_logfmt, out, bint return_recv_hook)
    cdef Array slots(self, x)
