cdef int check(int code, str what) except -1
