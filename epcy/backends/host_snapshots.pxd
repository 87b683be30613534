"""Control blocks in messages."""

from libc.stdint cimport int64_t, uint32_t

from epcy.backends.host_kernels cimport *
from epcy.backends.host_low_latency cimport HostLowLatencyBackend
from epcy.backends.network cimport Network
from epcy.backends.nodes_kernels cimport *


cdef class HostSnapshots(HostLowLatencyBackend):
    """Words and records of this rank told to other nodes, and theirs put into the copies here."""

    cdef readonly Network network
    cdef int *remote                    # the ranks of other nodes
    cdef int num_remote
    cdef int first_control              # of the network's channels: one for each of them
    cdef epcy_told *told                # what each of them knows of this rank
    cdef epcy_heard *heard              # what each of them said last
    cdef bint leaving
    cdef uint32_t asked                 # questions of this rank so far
    cdef int num_pieces                 # of the largest snapshot; each leaves without this rank's help
    cdef int64_t piece_bytes
    cdef char *pieces                   # where there are several: a whole snapshot to send, then one from each rank
    cdef int64_t *num_come              # bytes of the latter

    cdef int open_told(self, int size) except -1
    cdef tuple open_pieces(self)
    cdef int pump(self) except -1
    cdef object must_be_dead(self)
    cdef int take_piece(self, int i, const char *message) except -1
    cdef int tell_nodes(self) except -1
    cdef int send_pieces(self, int channel, const char *snapshot, int64_t num_bytes) except -1
    cdef int flush(self, double limit) except -1
    cdef bint is_told(self, int untold) noexcept
    cdef bint is_untold(self, int i) noexcept
    cdef bint all_dead(self) except -1
