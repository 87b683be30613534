"""Messages between nodes."""

from libc.stdint cimport int64_t


cdef class Network:
    """Channels of messages, each to and from one rank of another node, in order both ways.

    A channel has a fixed number of buffers for each way. Who sends fills a free one (`room`, then `send`); who receives
    looks at the oldest message (`arrived`) and gives its buffer back (`release`). Nothing waits: `progress` lets
    messages come and go.
    """

    cdef readonly str name

    cdef int progress(self) except -1
    cdef int give_up(self, dead) except -1
    cdef char *arrived(self, int channel) except? NULL
    cdef int release(self, int channel) except -1
    cdef char *room(self, int channel, int num=*) except? NULL
    cdef int send(self, int channel, int64_t num_bytes) except -1
    cdef bint has_sent(self, int channel) noexcept
    cdef bint is_lost(self, int channel)


cdef class MpiNetwork(Network):
    """Over MPI: receives are always posted, one for each free buffer."""

    cdef object comm, test, byte, failure       # of mpi4py
    cdef list requests                  # by channel: its receives, then its sends
    cdef list buffers                   # likewise: memoryviews
    cdef list receives                  # (peer, tag) by channel
    cdef set lost                       # peers that have ended, and broke off a message
    cdef int *owner                     # of each request: its channel
    cdef int *first                     # of each channel: its first request; one more at the end
    cdef int *num_buffers               # by channel
    cdef int *synchronous
    cdef int *oldest                    # the buffer of the oldest message, and the next one to send
    cdef int *newest
    cdef char **address                 # of each buffer
    cdef char *pending                  # of each request: the message has not come, or not left

    cdef bint take_back(self, bint together) except -1
