"""The steps of the nvshmem backend's calls."""

from libc.stdint cimport uint32_t, uintptr_t

from epcy.backends.call cimport Call
from epcy.backends.cuda cimport epcy_peers
from epcy.backends.cuda_event cimport CudaEvent
from epcy.backends.nvshmem_waits cimport NvshmemWaits

cdef enum:
    OP_DISPATCH = 1
    OP_COMBINE = 2
    OP_BARRIER = 3
    OP_FREE = 4


cdef class NvshmemEpoch(NvshmemWaits):
    cdef uint32_t num_tickets, num_resets

    cdef uintptr_t begin(self, Call call, bint *capturing) except? 0
    cdef CudaEvent end(self, Call call, uintptr_t stream, bint capturing, list keeps)
    cdef int come_behind(self, uintptr_t stream) except -1
    cdef int be_last(self, CudaEvent event, uintptr_t stream) except -1
    cdef int launch_step(self, uint32_t header, bytes text, uint32_t ticket, uintptr_t stream) except -1
    cdef int launch_reset(self, epcy_peers *peers) except -1
    cdef int run_step(self, epcy_peers *peers, uint32_t header, const char *text, uintptr_t stream) except -1
