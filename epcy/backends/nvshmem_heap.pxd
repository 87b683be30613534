"""Where an nvshmem Buffer's bytes lie."""

from libc.stdint cimport int64_t, uint32_t, uintptr_t

from epcy.backends.base cimport Backend
from epcy.backends.counters cimport Counters
from epcy.backends.cuda cimport epcy_peers, epcy_report
from epcy.backends.cuda_low_latency cimport epcy_low_latency_wire
from epcy.backends.cuda_put cimport epcy_put_wire


cdef class Mapped:
    """Host memory that kernels write to: their report."""

    cdef epcy_report *report            # followed by a word for each local expert
    cdef epcy_report *device_report


cdef class NvshmemHeap(Backend):
    cdef epcy_peers peers
    cdef epcy_low_latency_wire wire     # bytes 0: no low-latency mode
    cdef epcy_put_wire put_wire         # bytes 0: no rank is far
    cdef Mapped mapped
    cdef Counters counters              # None: nothing is counted
    cdef object memory                  # symmetric.Allocation
    cdef uintptr_t own_stream
    cdef int dispatch_peer_blocks, dispatch_own_blocks, expert_own_blocks, expert_copy_blocks
    cdef int combine_blocks, combine_expert_blocks, num_multiprocessors
    cdef list alive                     # events whose work may still need its arrays, oldest first
    cdef list captured                  # arrays that graphs may use
    cdef object pool                    # CuPy memory of handles alone: reused only after all work on it has passed

    cdef int lose_flags(self, epcy_peers *peers, str op) except -1
    cdef int poison(self, int64_t offset, int64_t num_rows, uintptr_t stream) except -1
    cdef uint32_t mask_bits(self) noexcept
