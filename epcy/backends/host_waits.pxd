"""The waits of the host backend."""

from libc.stdint cimport int64_t, uint64_t

from epcy.backends.host_heap cimport HostHeap
from epcy.backends.host_kernels cimport *


cdef class HostWaits(HostHeap):
    """Waits for a word of every rank, bounded; errors that name who did not come."""

    cdef uint64_t num_resets
    cdef int reset_round                # 0: no reset() is half done; else the round to go on with

    cdef int tell(self, int op, str phase, int word, uint64_t value) except -1
    cdef int wait_slice(self, int word, uint64_t value, int64_t slice_ns) except -1
    cdef int wait(self, int op, int word, uint64_t value, uint64_t first) except -1
    cdef int wait_longer(self, int op, int word, uint64_t value, uint64_t first, int state, double start) except -1
