from libc.stdint cimport int64_t, uintptr_t

# What an element is. The first four are the payloads and are numbered as in epcy/host.h.
cpdef enum Kind:
    KIND_BF16 = 0
    KIND_FP16 = 1
    KIND_FP32 = 2
    KIND_FP8 = 3
    KIND_INT32 = 4
    KIND_INT64 = 5
    KIND_OTHER = -1


cdef class Array:
    """Somebody's array, as C sees it."""

    cdef readonly object owner      # what keeps `data` alive: the array, or a copy of it
    cdef char *data
    cdef readonly int ndim
    cdef int64_t shape[3]
    cdef int64_t strides[3]         # in bytes
    cdef readonly int kind
    cdef readonly int device        # -1: host memory
    cdef readonly bint is_writable
    cdef readonly bint is_contiguous

    cdef inline int64_t item_bytes(self) noexcept:
        return 1 if self.kind == KIND_FP8 else 2 if self.kind <= KIND_FP16 else 8 if self.kind == KIND_INT64 else 4


cdef class Memory:
    """A piece of memory that NumPy may make arrays of; `owner` is what keeps it mapped."""

    cdef char *data
    cdef Py_ssize_t nbytes
    cdef readonly object owner
    cdef readonly int num_exports   # arrays that still look at it

cdef Memory memory_at(char *data, Py_ssize_t nbytes, object owner)
cdef Array describe(object obj, str name)
cdef Array describe_cuda(object obj, str name, int device)
cdef object as_cupy(object obj, str name, cupy)
cdef bint overlap(Array array, char *begin, int64_t nbytes) noexcept
cdef Array copied(Array array)
cdef Array with_rows(Array array)
cdef Array contiguous(Array array)
