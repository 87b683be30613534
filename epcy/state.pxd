from libc.stdint cimport int64_t

from epcy.backends.base cimport Backend
from epcy.low_latency_checks cimport LowLatencyChecker


cdef class BufferState:
    """What a Buffer is, and what every call looks at first: whether it may be made now, and how long it may wait."""

    cdef readonly int rank, size
    cdef readonly int64_t num_local_experts
    cdef readonly str backend
    cdef readonly object comm, topology, options, xp
    cdef Backend _backend                   # None before it is made and after free()
    cdef LowLatencyChecker _checker         # of the arguments
    cdef object _token                      # marks this Buffer's handles
    cdef dict _shape
    cdef int64_t _num_max_tokens, _hidden, _num_experts, _num_topk
    cdef int _pid                           # of the process that made it
    cdef bint _busy                         # a call is in progress (in some thread)
    cdef bint _freed
    cdef bint _unrecorded                   # epcy.record leaves out what is called now

    cdef int enter(self, str name) except -1
    cdef int leave(self) except -1
    cdef int limit(self, timeout) except -1
    cdef int other_rank(self, rank) except -1
