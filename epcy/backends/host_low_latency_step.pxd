"""The steps of the host backend's low-latency calls."""

from libc.stdint cimport int64_t, uint8_t, uint64_t

from epcy.backends.host cimport HostBackend
from epcy.backends.host_kernels cimport *


cdef class HostLowLatencyStep(HostBackend):
    """What every low-latency call begins and ends with, and the ranks that it goes on without."""

    cdef int next_slot[2]               # by kind
    cdef uint64_t epochs[2][2]          # of the last two sent calls of a kind, by number
    cdef object left_out                # the error of ranks that go on without this one, of the last receive
    cdef list num_lanes                 # by rank: dropped at dispatches; missing in combines

    cdef epcy_low_latency_header *take_slot(self, int kind) except NULL
    cdef uint64_t step(self, int kind) noexcept
    cdef int send(self, int kind, epcy_low_latency_header *header, uint64_t epoch, const int64_t *counts) except -1
    cdef int post(self, int kind, int slot, uint64_t epoch, const int64_t *counts) except -1
    cdef int await_slots(self, int kind, uint64_t epoch) except -1
    cdef const epcy_route *reachable(self, const epcy_route *routes, int64_t num_tokens, uint64_t epoch) except NULL
    cdef void has_sent(self, int kind) noexcept
    cdef void receiving(self, int op, uint64_t epoch) noexcept
    cdef int finish_receiving(self, int kind) except -1
    cdef uint64_t received_up_to(self, int kind) noexcept
    cdef void acknowledge(self, int kind) noexcept
    cdef object disagreement_of(self, int kind, uint64_t epoch, uint8_t *takes_part)
    cdef bint is_masked_by(self, int64_t rank, uint64_t epoch) noexcept
