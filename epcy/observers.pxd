from epcy.state cimport BufferState


cdef int open_range(str name) except -1
cdef int close_range() except -1
cdef bint is_recorded(BufferState buf) noexcept
cdef object recorded(BufferState buf, str op, function, dict arguments)
