"""A handle whose routing lies on the GPU."""

from libc.stdint cimport int64_t

from epcy.backends.cuda cimport epcy_cuda_routing
from epcy.backends.cuda_event cimport CudaEvent
from epcy.backends.nvshmem_waits cimport NvshmemWaits
from epcy.handle cimport Handle


cdef class CudaHandle(Handle):
    """A routing whose arrays lie on the GPU."""

    cdef epcy_cuda_routing routing
    cdef object memory                  # one CuPy allocation for all of them
    cdef int64_t *lane_ids              # (T, K), bad ids as -1
    cdef object num_recv, experts       # CuPy views of it
    cdef object offsets                 # likewise; None in the rank layout
    cdef NvshmemWaits backend           # None once the Buffer is freed
    cdef int rank
    cdef int64_t own_base, own_count    # this rank's own rows among those that came; count -1: only the GPU knows
    cdef object counts                  # list of L, where the host knows them
    cdef CudaEvent event
    cdef object beside                  # what calls between nodes keep; or None
