"""The low-latency mode's part of a backend."""

from libc.stdint cimport int64_t, uint64_t

from epcy.backends.call cimport LowLatencyCombineCall, LowLatencyDispatchCall
from epcy.handle cimport LowLatencyHandle
from epcy.layout cimport epcy_heap, epcy_low_latency_area, epcy_shape


cdef enum:                              # kinds of calls: each has areas, numbers and hooks of its own
    LOW_LATENCY_DISPATCH = 0
    LOW_LATENCY_COMBINE = 1


cdef class LowLatency:
    """Whose the areas are, how many calls are unreceived, and whose turn it is: the same on both backends."""

    cdef int rank
    cdef object xp
    cdef char *inputs_at[2]             # where the combine areas begin
    cdef int64_t num_rows               # of an area: L * R * M'
    cdef object dtypes                  # kinds of payload that fit
    cdef list received                  # a dict of arrays by receive area: payload kinds, "scales", "ue8m0", "counts"
    cdef list inputs                    # a dict of arrays by combine area, by payload kind
    cdef bint taken[2]                  # combine areas given out, or of a combine that is not received
    cdef bint unreceived[2]             # the latter
    cdef int next_area, next_input
    cdef readonly uint64_t num_sent[2]
    cdef readonly uint64_t num_received[2]

    cdef int may_send(self, int kind, bint return_recv_hook) except -1
    cdef uint64_t sent(self, int kind) noexcept
    cdef int may_receive(self, int kind, uint64_t number) except -1
    cdef int has_received(self, int kind) except -1
    cdef int take_area(self) noexcept
    cdef int free_input(self) noexcept
    cdef int give_input(self) except -1
    cdef int take_input(self, LowLatencyCombineCall call, bint zero_copy) except -1
    cdef int leave_input(self, LowLatencyCombineCall call) except -1
    cdef tuple result(self, LowLatencyDispatchCall call, LowLatencyHandle handle, event)
    cdef int forget(self) except -1
