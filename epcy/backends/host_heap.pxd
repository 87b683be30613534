"""The shared heap of the host backend."""

from libc.stdint cimport int64_t

from epcy.backends.base cimport Backend
from epcy.backends.host_kernels cimport *
from epcy.backends.window cimport Heap


cdef class HostHeap(Backend):
    """A rank's part of the shared memory, and the others' as mapped here."""

    cdef epcy_host h
    cdef Heap heap
    cdef object page, page_path, __weakref__
    cdef int num_threads                # of a call, now

    cdef int take_memory(self, int64_t nbytes) except -1
    cdef int open(self, dict options, int64_t nbytes) except -1
    cdef int give_memory_back(self) except -1
    cdef object open_status(self, directory)
    cdef int touch_rank(self, int64_t rank) except -1
