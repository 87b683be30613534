from libc.stdint cimport int64_t

from epcy.backends.base cimport Backend
from epcy.checks cimport Checker


cdef class Buffer:
    """Moves tokens to their experts and back between the ranks of a communicator."""

    cdef readonly int rank, size
    cdef readonly int64_t num_local_experts
    cdef readonly str backend
    cdef readonly object comm, xp, topology, options
    cdef Backend _backend           # None before it is made and after free()
    cdef Checker _checker           # of the arguments
    cdef object _token              # marks this Buffer's handles
    cdef dict _shape
    cdef int _pid                   # of the process that made it
    cdef bint _busy                 # a call is in progress (in some thread)
    cdef bint _freed
    cdef int64_t _num_max_tokens, _hidden, _num_experts, _num_topk

    cdef int enter(self, str name) except -1
