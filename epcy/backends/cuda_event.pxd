"""Points of CUDA streams."""

from libc.stdint cimport uintptr_t

from epcy.event cimport Event


cdef class CudaEvent(Event):
    """A point of a CUDA stream."""

    cdef void *event
    cdef int device
    cdef object keeps                   # arrays that the work before this point reads or writes

    cdef int record(self, uintptr_t stream) except -1
