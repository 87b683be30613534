from epcy.state cimport BufferState


cdef int open_range(str name) except -1
cdef int open_call(BufferState buf, str name) except -1
cdef int close_call(BufferState buf) except -1
cdef bint is_recorded(BufferState buf) noexcept
cdef object recorded(BufferState buf, str op, function, dict arguments)
