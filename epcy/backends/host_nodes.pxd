"""The host backend between nodes: what a rank knows of the others, and how it waits for them."""

from libc.stdint cimport int32_t, int64_t, uint8_t

from epcy.backends.host_kernels cimport *
from epcy.backends.host_snapshots cimport HostSnapshots
from epcy.backends.nodes_kernels cimport *


cdef class HostNodes(HostSnapshots):
    """Shared memory inside the node, messages to the ranks of other nodes; copies of their control blocks."""

    cdef object topology, node_comm, network_comm
    cdef char **node_base               # where each rank of this node has its memory
    cdef epcy_nodes nodes
    cdef int32_t *groups                # (2, R): link_of, group_of
    cdef uint8_t *is_remote             # (R,)
    cdef list peers                     # by link: the rank; then by remote rank: itself. Channels of the network.

    cdef int catch_up(self) except -1
