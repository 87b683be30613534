"""The nvshmem backend's dispatch and combine."""

from libc.stdint cimport uint32_t, uintptr_t

from epcy.arrays cimport Array
from epcy.backends.call cimport CombineCall, DispatchCall
from epcy.backends.cuda cimport epcy_cuda_combine, epcy_cuda_dispatch
from epcy.backends.cuda_handle cimport CudaHandle
from epcy.backends.nvshmem_epoch cimport NvshmemEpoch
from epcy.handle cimport Handle


cdef class NvshmemBackend(NvshmemEpoch):
    cdef uint32_t header(self, int op, Array x, Handle handle, bint weights, bint routed) except? 0
    cdef int fill(self, epcy_cuda_dispatch *d, DispatchCall call, CudaHandle handle, int area, bint waits) except -1
    cdef CudaHandle make_handle(self, DispatchCall call, uintptr_t stream)
    cdef int stage(self, epcy_cuda_combine *c, CombineCall call, uintptr_t stream) except -1
    cdef int place_sums(self, epcy_cuda_combine *c, CombineCall call, uintptr_t stream) except -1
    cdef int run_dispatch(self, epcy_cuda_dispatch *d, CudaHandle handle, uintptr_t stream) except -1
    cdef int run_combine(self, epcy_cuda_combine *c, CudaHandle handle, uintptr_t stream) except -1
