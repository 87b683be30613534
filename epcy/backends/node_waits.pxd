"""A wait for ranks of other nodes."""

from libc.stdint cimport uint64_t

from epcy.backends.host_waits cimport HostWaits


cdef class NodeWait:
    """What every wait between nodes keeps to: signals, naps without the GIL, dead ranks, masks, a limit, one error.

    Who waits looks at messages in turns; after one in which nothing happened it calls `rest`, and `look` when that says
    so. A turn with progress sets `idle` to 0.
    """

    cdef HostWaits of
    cdef int op                         # 0: reset()
    cdef str phase
    cdef int word                       # of the ranks that are waited for, which the error shows; -1: none
    cdef uint64_t value                 # that it should have: the call, but in reset()
    cdef double since, limit
    cdef int idle                       # turns in which nothing happened

    cdef double waited(self) except -1
    cdef bint rest(self) except -1
    cdef int look(self, list awaited, list gone=*, list blamed=*) except -1
