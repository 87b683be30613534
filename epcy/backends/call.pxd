from libc.stdint cimport int64_t, uint64_t, uintptr_t

from epcy.arrays cimport Array
from epcy.event cimport Event
from epcy.handle cimport Handle


cdef class Call:
    """A checked call: what a Buffer asks of its backend."""

    cdef Array x                    # dispatch: (T, H); combine: (N, H)
    cdef Handle handle              # dispatch: an earlier routing, or None
    cdef Array topk_weights         # or None
    cdef uintptr_t stream           # the user's stream; on a GPU backend alone
    cdef Event previous_event       # or None
    cdef double timeout             # s; of low-latency calls alone, for their hooks
    cdef bint async_finish


cdef class DispatchCall(Call):
    """A dispatch. topk_weights: (T, K)."""

    cdef Array scales               # (T, ceil(H/128)) of an fp8 pair, or None
    cdef Array topk_idx             # (T, K), or None with a handle
    cdef str layout
    cdef int64_t expert_alignment
    cdef int64_t num_worst_tokens   # 0: wait for the count
    cdef object out                 # None, True, an array, or a pair of arrays


cdef class CombineCall(Call):
    """A combine. topk_weights: (N, K) in the rank layout, (T, K) in the expert layout."""

    cdef Array bias0, bias1         # (T, H), or None
    cdef Array out                  # (T, H)
    cdef Array out_weights          # rank layout with topk_weights: (T, K), else None
    # filled by the backend's prepare_combine:
    cdef int64_t x_offset           # where x lies, or -1: it must be staged
    cdef int64_t weights_offset     # likewise; -1 also for none
    cdef int area                   # the combine area to stage in, or -1
    cdef int consumed               # the combine area given out by combine_input that x lies in, or -1


cdef class LowLatencyDispatchCall(Call):
    """A low-latency dispatch. topk_weights: (T, K), kept by the handle, or None."""

    cdef Array topk_idx             # (T, K)
    cdef Array stats                # (L,) of int32 or int64, or None: the receive adds the counts to it
    cdef bint use_fp8, round_scale, use_ue8m0
    cdef bint return_recv_hook      # only send


cdef class LowLatencyCombineCall(Call):
    """A low-latency combine. x: (L, R * M', H), contiguous; topk_weights: (T, K), or None: the dispatch's."""

    cdef Array out                  # (T, H)
    cdef int reduction              # a number of REDUCTIONS
    cdef bint use_logfmt
    cdef bint renormalize           # scale the weights of tokens that lost lanes
    cdef bint return_recv_hook      # only send
    cdef int area                   # the combine area that is this call's until it is received
    cdef bint in_area               # x is that area: nothing to stage
    cdef uint64_t epoch             # of the call; the backend's
