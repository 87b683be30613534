"""The steps of the host backend's calls."""

from libc.stdint cimport int64_t, uint64_t

from epcy.backends.host_kernels cimport *
from epcy.backends.host_waits cimport HostWaits


cdef class HostEpoch(HostWaits):
    """What every call begins and ends with, and the calls that move no data."""

    cdef uint64_t entered               # the call that this rank is in, or was in last

    cdef epcy_record *begin(self, int op) except NULL
    cdef int arrive(self, int op) except -1
    cdef int finish(self, int op) except -1
    cdef object disagreement(self)
    cdef int op_of(self, int64_t rank, uint64_t epoch) noexcept
    cdef uint64_t furthest_reset(self)
    cdef int listen(self) except -1
