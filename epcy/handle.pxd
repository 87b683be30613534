from libc.stdint cimport int64_t, uint64_t


cdef class Handle:
    """The routing of one dispatch."""

    cdef readonly object buffer_token       # equal to the Buffer's own: whose handle this is
    cdef readonly str layout
    cdef readonly int64_t num_tokens        # T of this rank
    cdef readonly int64_t num_rows          # rows of recv_x
    cdef readonly int64_t expert_alignment
    cdef readonly int64_t num_worst_tokens
    cdef readonly uint64_t epoch            # of its dispatch; equal on all ranks
    cdef public object error                # what check() raises, or None
    cdef public object recorded             # by epcy.record: the recorder, and which of its calls this is of; or None

    cdef int64_t _num_recv_tokens(self) noexcept
    cpdef object expert_counts(self)


cdef class LowLatencyHandle(Handle):
    """The routing of one low-latency dispatch."""

    cdef readonly bint received             # its rows have come
    cdef readonly int area                  # the receive area that they lie in
    cdef uint64_t number                    # of the dispatch among the Buffer's low-latency dispatches, from 1


cdef class Area:
    """One of the receive areas: which result lies in it."""

    cdef uint64_t generation


cdef class Dispatch:
    cdef object _recv_x, _recv_topk_idx, _recv_topk_weights     # the user's own; or views, made when they are asked for
    cdef dict _views                        # of the whole area
    cdef str _layout
    cdef int _kind
    cdef int64_t _num_rows
    cdef bint _has_scales, _has_weights
    cdef readonly object num_recv_tokens_per_expert, handle, event
    cdef Area _area                         # None: the user's own arrays
    cdef uint64_t _generation

    cdef int _live(self) except -1


cdef class Combine:
    cdef readonly object combined_x, combined_topk_weights, event
