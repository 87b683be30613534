from libc.stdint cimport int64_t

from epcy.arrays cimport Array
from epcy.backends.call cimport CombineCall, DispatchCall
from epcy.handle cimport Handle


cdef class Buffer:
    """Moves tokens to their experts and back between the ranks of a communicator."""

    cdef readonly int rank, size
    cdef readonly int64_t num_local_experts
    cdef readonly str backend
    cdef readonly object comm, xp, topology, options
    cdef object _backend            # HostBackend; None before it is made and after free()
    cdef object _token              # marks this Buffer's handles
    cdef dict _shape
    cdef int _pid                   # of the process that made it
    cdef bint _busy                 # a call is in progress (in some thread)
    cdef bint _freed
    cdef int64_t _num_max_tokens, _hidden, _num_experts, _num_topk

    cdef int enter(self, str name) except -1
    cdef object wrong(self, str name, str expected, seen, str remedy=*)
    cdef DispatchCall check_dispatch(self, x, topk_idx, topk_weights, handle, layout, expert_alignment,
                                     num_worst_tokens, out)
    cdef int check_dispatch_out(self, out, DispatchCall call) except -1
    cdef CombineCall check_combine(self, x, handle, topk_weights, bias, out)
    cdef Handle check_handle(self, handle)
    cdef Array look(self, obj, str name)
    cdef Array check_rows(self, obj, str name, int64_t num_rows, int kind)
    cdef Array check_lanes(self, obj, str name, int64_t num_rows, bint is_idx)
    cdef int check_order(self, previous_event, stream) except -1
    cdef int64_t check_number(self, value, str name, int64_t least) except -1
