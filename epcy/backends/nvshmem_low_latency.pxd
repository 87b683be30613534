"""The NVSHMEM backend's low-latency part."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t

from epcy.backends.call cimport Call, LowLatencyCombineCall, LowLatencyDispatchCall
from epcy.backends.cuda_low_latency cimport (
    epcy_low_latency_call, epcy_low_latency_combine, epcy_low_latency_dispatch)
from epcy.backends.cuda_event cimport CudaEvent
from epcy.backends.cuda_low_latency_handle cimport Block, Blocks, CudaLowLatencyHandle
from epcy.backends.nvshmem cimport NvshmemBackend
from epcy.backends.stores cimport Stores
from epcy.layout cimport epcy_low_latency_area


cdef class LowLatencyNvshmemBackend(NvshmemBackend):
    cdef epcy_low_latency_dispatch dispatch_params      # what does not change from call to call is written once
    cdef epcy_low_latency_combine combine_params
    cdef epcy_low_latency_area low_latency_area
    cdef Blocks blocks
    cdef Stores carrier                 # how calls reach other ranks
    cdef uint64_t steps[2]              # calls of a kind, refused ones too: its epoch's steps, but for graphs'
    cdef uint64_t pending[2][2]         # the steps of calls that are sent and not received, the older first; or 0

    cdef uint32_t asked                 # ranks that mask_rank has masked, as bits; kernels mask others: the report's
    cdef int64_t headers_at             # wire.headers

    cdef int64_t header_words(self, str op, int phases) except -1
    cdef Block take_block(self, LowLatencyDispatchCall call)
    cdef int may_step(self, int kind) except -1
    cdef uint64_t step_of(self, int kind, bint return_recv_hook) noexcept
    cdef int drain(self) except -1
    cdef int received_oldest(self, int kind) except -1
    cdef CudaLowLatencyHandle make_low_latency_handle(self, LowLatencyDispatchCall call, Block block)
    cdef int launch_dispatch(self, LowLatencyDispatchCall call, CudaLowLatencyHandle handle, int phases,
                             uintptr_t stream) except -1
    cdef int launch_combine(self, LowLatencyCombineCall call, uint64_t step, int phases, uintptr_t stream) except -1
    cdef Call on_current_stream(self)
    cdef int follow(self, int op, const int32_t *flows, object handle, object event) except -1
