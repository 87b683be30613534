from libc.stdint cimport int64_t

from epcy.arrays cimport Array
from epcy.backends.base cimport Backend
from epcy.backends.call cimport Call, CombineCall, DispatchCall
from epcy.handle cimport Handle


cdef class Checker:
    """Knows a Buffer's sizes, and turns arguments into calls or into errors that say what was expected."""

    cdef Backend backend
    cdef object xp
    cdef int rank, device           # device -1: arrays lie in host memory
    cdef int64_t num_topk, hidden, num_experts, num_max_tokens, row_bytes, num_rows
    cdef str dtype                  # the Buffer's own, the widest

    cdef object wrong(self, str name, str expected, seen, str remedy=*)
    cdef int64_t number(self, value, str name, int64_t least) except -1
    cdef int order(self, Call call, previous_event, bint async_finish, stream) except -1
    cdef Handle handle(self, handle)
    cdef int payload_kind(self, dtype) except -2
    cdef Array look(self, obj, str name)
    cdef Array rows(self, obj, str name, int64_t num_rows, int kind)
    cdef int row(self, Array a, str name) except -1
    cdef Array sums(self, out, int64_t num_rows, int kind)
    cdef Array lanes(self, obj, str name, int64_t num_rows, bint is_idx)
    cdef DispatchCall dispatch(self, x, topk_idx, topk_weights, handle, layout, expert_alignment, num_worst_tokens, out)
    cdef int dispatch_out(self, out, DispatchCall call) except -1
    cdef object empty(self, int64_t num_rows, int64_t width, dtype)
    cdef Array apart(self, Array array, Array out)
    cdef CombineCall combine(self, x, handle, topk_weights, bias, out)
