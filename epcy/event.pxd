cdef class Event:
    """A point of a stream."""


cdef Event completed()
