"""A low-latency handle whose routing lies on the GPU."""

from libc.stdint cimport int64_t, uint32_t, uintptr_t

from epcy.backends.cuda_event cimport CudaEvent
from epcy.backends.cuda_low_latency cimport epcy_low_latency_found, epcy_low_latency_handle
from epcy.backends.nvshmem_waits cimport NvshmemWaits
from epcy.handle cimport LowLatencyHandle


cdef class Blocks:
    """Pieces of device memory of one size, that handles take and give back without asking CUDA."""

    cdef object pool
    cdef int64_t nbytes
    cdef list slabs                     # the memory itself
    cdef list free                      # addresses

    cdef int more(self) except -1
    cdef Block take(self)


cdef class Block:
    cdef Blocks home
    cdef uintptr_t at


cdef class CudaLowLatencyHandle(LowLatencyHandle):
    """A low-latency routing whose arrays lie on the GPU."""

    cdef epcy_low_latency_handle arrays
    cdef Block block
    cdef int64_t num_local
    cdef NvshmemWaits backend                           # None once the Buffer is freed
    cdef CudaEvent event                                # when it was received; not of graphs
    cdef CudaEvent sent, combined                       # likewise; when the last combine with it ended
    cdef epcy_low_latency_found found                   # as it was fetched last

    cdef int fetch(self, CudaEvent event) except -1
    cdef object num_dropped(self, int which, uint32_t ranks)
