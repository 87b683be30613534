"""C declarations of epcy/window.h, and the memory of the host backend."""

from libc.stdint cimport int64_t


cdef extern from "epcy/window.h" nogil:
    int epcy_window_guard(void *address, int64_t nbytes)
    void epcy_window_unguard(void *address, int64_t nbytes)
    int64_t epcy_window_untouched(void *address, int64_t nbytes)


cdef class Heap:
    """A rank's own part of the window: its addresses stay valid while an array looks at them."""

    cdef object __weakref__
    cdef object window                  # keeps the memory mapped; None after free()
    cdef char *start
    cdef int64_t nbytes
    cdef int num_ranks
    cdef bint guarded                   # empty pages stand where the memory was

    cdef int64_t untouched(self) noexcept
    cdef int close(self) except -1


cdef int allocate(Heap heap, object comm, int64_t nbytes, char **base) except -1
