"""The NVSHMEM backend's classes."""

from libc.stdint cimport int64_t, uint32_t, uintptr_t

from epcy.arrays cimport Array
from epcy.backends.base cimport Backend
from epcy.backends.call cimport Call, CombineCall, DispatchCall
from epcy.backends.cuda cimport epcy_cuda_combine, epcy_cuda_dispatch, epcy_cuda_routing, epcy_peers, epcy_report
from epcy.backends.counters cimport Counters
from epcy.backends.cuda_low_latency cimport epcy_low_latency_wire
from epcy.event cimport Event
from epcy.handle cimport Handle


cdef class CudaEvent(Event):
    """A point of a CUDA stream."""

    cdef void *event
    cdef int device
    cdef object keeps                   # arrays that the work before this point reads or writes

    cdef int record(self, uintptr_t stream) except -1


cdef class Mapped:
    """Host memory that kernels write to: their report."""

    cdef epcy_report *report            # followed by a word for each local expert
    cdef epcy_report *device_report


cdef class CudaHandle(Handle):
    """A routing whose arrays lie on the GPU."""

    cdef epcy_cuda_routing routing
    cdef object memory                  # one CuPy allocation for all of them
    cdef int64_t *lane_ids              # (T, K), bad ids as -1
    cdef object num_recv, experts       # CuPy views of it
    cdef object offsets                 # likewise; None in the rank layout
    cdef NvshmemBackend backend         # None once the Buffer is freed
    cdef int rank
    cdef int64_t own_base, own_count    # this rank's own rows among those that came; count -1: only the GPU knows
    cdef object counts                  # list of L, where the host knows them
    cdef CudaEvent event


cdef class NvshmemBackend(Backend):
    cdef epcy_peers peers
    cdef epcy_low_latency_wire wire     # bytes 0: no low-latency mode
    cdef Mapped mapped
    cdef Counters counters              # None: nothing is counted
    cdef object memory                  # symmetric.Allocation
    cdef uintptr_t own_stream
    cdef CudaEvent last                 # the end of the last eager call
    cdef uintptr_t last_stream
    cdef uint32_t num_tickets, num_resets, num_calls
    cdef bint reset_is_open             # one has begun and did not end
    cdef int dispatch_peer_blocks, dispatch_own_blocks, expert_own_blocks, expert_copy_blocks
    cdef int combine_blocks, combine_expert_blocks, num_multiprocessors
    cdef object last_error              # what was told last of calls that nobody waited for
    cdef list alive                     # events whose work may still need its arrays, oldest first
    cdef list captured                  # arrays that graphs may use
    cdef object pool                    # CuPy memory of handles alone: reused only after all work on it has passed

    cdef uint32_t header(self, int op, Array x, Handle handle, bint weights, bint routed) except? 0
    cdef int fill(self, epcy_cuda_dispatch *d, DispatchCall call, CudaHandle handle, int area, bint waits) except -1
    cdef CudaHandle make_handle(self, DispatchCall call, uintptr_t stream)
    cdef int place_sums(self, epcy_cuda_combine *c, CombineCall call, uintptr_t stream) except -1
    cdef uintptr_t begin(self, Call call, bint *capturing) except? 0
    cdef CudaEvent end(self, Call call, uintptr_t stream, bint capturing, list keeps)
    cdef int wait_report(self, uint32_t ticket, int first_rank, int num_ranks, int64_t num_experts, str op) except -1
    cdef int launch_step(self, uint32_t header, bytes text, uint32_t ticket, uintptr_t stream) except -1
    cdef int settle(self, str op) except -1
    cdef int tell_gone(self) noexcept
    cdef object reported(self)
    cdef object late_error(self)
    cdef object late_ranks(self)
