"""Waits of the host for kernels."""

from libc.stdint cimport int64_t, uint32_t, uintptr_t

from epcy.backends.cuda_event cimport CudaEvent
from epcy.backends.nvshmem_heap cimport NvshmemHeap

cdef enum:                              # what a rank tells the others' kernels when it leaves
    LEFT = 1
    LEFT_ALONE = 2                      # by free(), after it went on without some rank


cdef class NvshmemWaits(NvshmemHeap):
    cdef CudaEvent last                 # the end of the last eager call
    cdef uintptr_t last_stream
    cdef uint32_t num_calls
    cdef bint reset_is_open             # one has begun and did not end
    cdef object last_error              # what was told last of calls that nobody waited for

    cdef int wait_report(self, uint32_t ticket, int first_rank, int num_ranks, int64_t num_experts, str op) except -1
    cdef int settle(self, str op) except -1
    cdef int tell_gone(self, uint32_t spared=*, uint32_t how=*) noexcept
    cdef object reported(self)
    cdef object late_error(self)
    cdef object late_ranks(self)
