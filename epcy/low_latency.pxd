from libc.stdint cimport uint64_t

from epcy.backends.call cimport Call
from epcy.backends.low_latency cimport LowLatency
from epcy.state cimport BufferState


cdef class LowLatencyCalls(BufferState):
    """The low-latency calls of a Buffer."""

    cdef LowLatency enter_low_latency(self, str name, int kind, bint return_recv_hook)
    cdef Hook hook(self, int kind, Call call)
    cdef int warm_low_latency(self, x, idx, weights) except -1


cdef class Hook:
    """Receives what a call with return_recv_hook=True only sent."""

    cdef LowLatencyCalls buffer
    cdef Call call                          # its `handle`: the dispatch's own, or the combine's
    cdef int kind
    cdef uint64_t number
