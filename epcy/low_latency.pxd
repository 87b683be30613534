from libc.stdint cimport uint64_t

from epcy.backends.base cimport Backend
from epcy.backends.call cimport Call
from epcy.backends.low_latency cimport LowLatency
from epcy.low_latency_checks cimport LowLatencyChecker


cdef int open_range(str name) except -1
cdef int close_range() except -1


cdef class LowLatencyCalls:
    """The low-latency calls of a Buffer, and the state that all of its calls look at."""

    cdef readonly int rank
    cdef readonly object xp
    cdef Backend _backend                   # None before it is made and after free()
    cdef LowLatencyChecker _checker         # of the arguments
    cdef int _pid                           # of the process that made it
    cdef bint _busy                         # a call is in progress (in some thread)
    cdef bint _freed

    cdef int enter(self, str name) except -1
    cdef LowLatency enter_low_latency(self, str name, int kind, bint return_recv_hook)
    cdef Hook hook(self, int kind, Call call)
    cdef int warm_low_latency(self, x, idx, weights) except -1


cdef class Hook:
    """Receives what a call with return_recv_hook=True only sent."""

    cdef LowLatencyCalls buffer
    cdef Call call                          # its `handle`: the dispatch's own, or the combine's
    cdef int kind
    cdef uint64_t number
