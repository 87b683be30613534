"""The host backend between nodes: what a rank knows of the others, and how it waits for them."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

from epcy.backends.host_kernels cimport *
from epcy.backends.host_low_latency cimport HostLowLatencyBackend
from epcy.backends.network cimport Network
from epcy.backends.nodes_kernels cimport *


cdef class HostNodes(HostLowLatencyBackend):
    """Shared memory inside the node, messages to the ranks of other nodes; copies of their control blocks."""

    cdef object topology, node_comm
    cdef readonly Network network
    cdef epcy_nodes nodes
    cdef int32_t *groups                # (2, R): link_of, group_of
    cdef uint8_t *is_remote             # (R,)
    cdef int *remote                    # the ranks of other nodes
    cdef int num_remote
    cdef epcy_told *told                # what each of them knows of this rank
    cdef epcy_heard *heard              # what each of them said last
    cdef list peers                     # by link: the rank; then by remote rank: itself. Channels of the network.
    cdef bint leaving
    cdef int num_pieces                 # of the largest snapshot; each leaves without this rank's help
    cdef int64_t piece_bytes
    cdef char *pieces                   # where there are several: a whole snapshot to send, then one from each rank
    cdef int64_t *num_come              # bytes of the latter
    cdef uint32_t asked                 # questions of this rank so far

    cdef int pump(self) except -1
    cdef object must_be_dead(self)
    cdef int take_piece(self, int i, const char *message) except -1
    cdef int tell_nodes(self) except -1
    cdef int send_pieces(self, int channel, const char *snapshot, int64_t num_bytes) except -1
    cdef int flush(self, double limit) except -1
    cdef bint is_told(self, int untold) noexcept
    cdef bint is_untold(self, int i) noexcept
    cdef bint all_dead(self) except -1
    cdef int catch_up(self) except -1
