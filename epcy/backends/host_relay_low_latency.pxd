"""Low-latency calls of the host backend between nodes."""

from libc.stdint cimport uint64_t

from epcy.backends.host_kernels cimport *
from epcy.backends.host_relay cimport HostRelay
from epcy.backends.nodes_kernels cimport *


cdef class HostRelayLowLatency(HostRelay):
    """A call is one message to each rank of another node, which has a copy of this rank's slots."""

    cdef int first_channel              # a dispatch's and a combine's for each rank of another node
    cdef epcy_route *reached            # (M', K)

    cdef int take_slots(self) except -1
