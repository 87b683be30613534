from libc.stdint cimport int64_t

from epcy.arrays cimport Array
from epcy.handle cimport Handle


cdef class DispatchCall:
    """A checked dispatch: what a Buffer asks of its backend."""

    cdef Array x                    # (T, H)
    cdef Array scales               # (T, ceil(H/128)) of an fp8 pair, or None
    cdef Array topk_idx             # (T, K), or None with a handle
    cdef Array topk_weights         # (T, K), or None
    cdef Handle handle              # an earlier routing, or None
    cdef str layout
    cdef int64_t expert_alignment
    cdef int64_t num_worst_tokens   # 0: wait for the count
    cdef object out                 # None, True, an array, or a pair of arrays


cdef class CombineCall:
    """A checked combine."""

    cdef Array x                    # (N, H)
    cdef Handle handle
    cdef Array topk_weights         # rank layout: (N, K); expert layout: (T, K); or None
    cdef Array bias0, bias1         # (T, H), or None
    cdef Array out                  # (T, H)
    cdef Array out_weights          # rank layout with topk_weights: (T, K), else None
    # filled by the backend's prepare_combine:
    cdef int64_t x_offset           # where x lies, or -1: it must be staged
    cdef int64_t weights_offset     # likewise; -1 also for none
    cdef int area                   # the combine area to stage in, or -1
    cdef int consumed               # the combine area given out by combine_input that x lies in, or -1
