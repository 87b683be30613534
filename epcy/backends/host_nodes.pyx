# cython: boundscheck=False, wraparound=False
# distutils: libraries = epcy_host
"""The host backend between nodes: each node has a window of its own, and ranks of other nodes are known by messages.

Of a rank of another node there is a copy of its control block here, which its messages keep up to date. All that looks
at other ranks' words and records (the base classes) looks at these copies, so the protocol, its errors and reset() are
those of one node. How words come and go is in the base class (host_snapshots.pyx).
"""

import threading
import time

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free

from epcy.backends.host_epoch cimport HostEpoch
from epcy.backends.host_low_latency cimport HostLowLatencyBackend
from epcy.backends.host_waits cimport HostWaits
from epcy.backends.network cimport MpiNetwork
from epcy.backends.node_waits cimport NodeWait
from epcy.backends.window cimport allocate
from epcy.layout cimport epcy_num_scales

from epcy.backends import bootstrap
from epcy.errors import HeapError

cdef int64_t SHORT_NS = 4_000, LONG_NS = 500_000        # how long a wait looks at memory alone
cdef int TAG_DATA = 1, TAG_CONTROL = 2
cdef int64_t USUAL_MESSAGE_BYTES = 1 << 18


cdef class HostNodes(HostSnapshots):
    def __init__(self, topology, comm, dict shape, dict options, list identities, object token):
        """Collective, blocking, over the ranks of any number of nodes; on the hierarchical path of one size."""
        cdef int size = comm.size
        self.topology = topology
        self.groups = <int32_t *>calloc(2 * size, sizeof(int32_t))
        self.is_remote = <uint8_t *>calloc(size, 1)
        self.node_base = <char **>calloc(size, sizeof(char *))
        try:
            if self.groups == NULL or self.is_remote == NULL or self.node_base == NULL:
                raise MemoryError
            self.open_told(size)
            self.find_links(topology, options["path"])
            bootstrap.exchange(comm, None, None, options["timeout"], "Buffer()")
            self.node_comm = comm.Split(topology.node, comm.rank)
            super().__init__(comm, shape, options, identities, token)
            bootstrap.exchange(comm, None, None, self.timeout, "Buffer()")
            self.network_comm = bootstrap.duplicate(comm, self.timeout, "Buffer()")
            try:
                self.take()
                self.open_network(self.network_comm, options)
                self.take()
            except MemoryError:
                raise HeapError(f"num_node_buffers: no memory for {options['num_node_buffers']} messages of "
                                f"{options['node_chunk_tokens']} tokens to and from each of {self.num_remote} ranks of "
                                f"other nodes (rank {self.rank}); give fewer, or fewer node_chunk_tokens") from None
            bootstrap.exchange(comm, None, None, self.timeout, "Buffer()")
        except BaseException as error:
            self.failed(comm, error, options["timeout"])

    def abandon(self, bint together):
        if self.network is not None:
            self.network.close(together)
        elif together and self.network_comm is not None:
            self.network_comm.Free()
        self.network = self.network_comm = None
        HostLowLatencyBackend.abandon(self, together)
        if together and self.node_comm is not None:
            self.node_comm.Free()
            self.node_comm = None

    def __dealloc__(self):
        cdef int i
        for i in range(self.num_remote):
            if self.h.base != NULL:
                free(self.h.base[self.remote[i]])
        free(self.groups)
        free(self.is_remote)
        free(self.node_base)

    def find_links(self, topology, path):
        """Whom this rank exchanges rows with, and in which order sums are made."""
        cdef int rank, size = topology.num_ranks
        self.peers = []
        self.nodes.link_of, self.nodes.group_of = self.groups, self.groups + size
        for node in range(topology.num_nodes):
            ranks = topology.ranks_of_node(node)
            for rank in ranks:
                self.groups[rank] = -1
                self.groups[size + rank] = node if path == "hierarchical" else rank
                if node == topology.node:
                    continue
                self.is_remote[rank] = True
                self.remote[self.num_remote] = rank
                self.num_remote += 1
                if path == "direct":
                    self.peers.append(rank)
                elif rank == ranks[0]:
                    self.peers.append(ranks[topology.local_rank])
                self.groups[rank] = len(self.peers) - 1
        self.nodes.num_links = len(self.peers)

    def open_network(self, comm, options):
        """Post the receives; every rank of another node may send from now on."""
        cdef int64_t token_bytes = self.h.shape.row_bytes + epcy_num_scales(self.h.shape.hidden) * 4
        token_bytes += self.h.shape.num_topk * (sizeof(epcy_route) + 4)
        if options["node_chunk_tokens"] is None:
            options["node_chunk_tokens"] = max(1, min(USUAL_MESSAGE_BYTES // token_bytes, self.h.shape.num_max_tokens))
        self.nodes.chunk_tokens = options["node_chunk_tokens"]
        data = (epcy_nodes_message_bytes(&self.h, &self.nodes), options["num_node_buffers"], True)
        control = self.open_pieces()
        self.first_control = <int>self.nodes.num_links
        self.peers.extend([self.remote[i] for i in range(self.num_remote)])
        self.network = MpiNetwork(comm, [
            (peer, TAG_DATA, *data) if c < self.nodes.num_links else (peer, TAG_CONTROL, *control)
            for c, peer in enumerate(self.peers)] + self.low_latency_channels())

    def low_latency_channels(self):
        """More channels of the network, behind the others."""
        return []

    # ---- memory ---------------------------------------------------------------------------------------------

    def num_ranks_here(self):
        """Virtual nodes of a machine share its memory."""
        return sum([host == self.topology.hostnames[self.topology.node] for host in
                    [self.topology.hostnames[node] for node in self.topology.node_of_rank]])

    cdef int take_memory(self, int64_t nbytes) except -1:
        """A window for the ranks of this node, and a copy of the control block of each other one."""
        cdef int i
        allocate(self.heap, self.node_comm, nbytes, self.node_base)
        for i, rank in enumerate(self.topology.ranks_of_node(self.topology.node)):
            self.h.base[rank] = self.node_base[i]
        for i in range(self.num_remote):
            self.take()
            self.h.base[self.remote[i]] = <char *>calloc(1, epcy_host_control_bytes(&self.h.shape))
            if self.h.base[self.remote[i]] == NULL:
                raise MemoryError
        self.h.is_remote = self.is_remote
        return 0

    cdef int give_memory_back(self) except -1:
        self.leaving = True
        self.flush(self.timeout)
        together = self.is_told(0)
        self.network.close(together)
        self.heap.close()
        if self.node_comm is not None:
            self.node_comm.Free()
        self.comm.Free()
        return 0

    cdef int listen(self) except -1:
        self.pump()
        return 0

    def close(self, together):
        try:
            HostEpoch.close(self, together)
        finally:
            if not self.leaving:        # the others may be anywhere
                self.network.close(False)

    # ---- waits ----------------------------------------------------------------------------------------------

    cdef int catch_up(self) except -1:
        """Ask everybody for an answer and wait for it: what they stored before they heard the question is known then.

        Words that a rank waits for only grow, and it sees them when they come. Which reset() others are in is another
        matter: a rank that they went on without has not listened for long.
        """
        cdef NodeWait wait = NodeWait(self, 0, "reset", EPCY_WORD_RESET, self.num_resets | 1, self.timeout)
        cdef int i
        self.asked += 1
        while True:
            self.pump()
            missing = [self.remote[i] for i in range(self.num_remote)
                       if self.heard[i].answered < self.asked and not self.h.masked[self.remote[i]]]
            if not missing:
                return 0
            if wait.rest():             # who has answered may not have come either
                late = [r for r in self.missing(EPCY_WORD_RESET, self.num_resets | 1) if r != self.rank]
                wait.look(missing, None, late or missing)

    cdef int leave(self) except -1:
        HostEpoch.leave(self)
        return self.flush(min(self.timeout, 1.0) if self.broken else self.timeout)

    cpdef set_mask(self, int rank, bint masked):
        HostLowLatencyBackend.set_mask(self, rank, masked)
        self.pump()

    cdef int wait_slice(self, int word, uint64_t value, int64_t slice_ns) except -1:
        cdef double end = time.monotonic() + slice_ns * 1e-9
        cdef int64_t nap = SHORT_NS
        cdef int state
        while True:
            nap = SHORT_NS if self.pump() else min(2 * nap, LONG_NS)
            with nogil:
                state = epcy_host_wait(&self.h, word, value, nap)
            if state != EPCY_WAIT_PENDING or time.monotonic() > end:
                return state

    def reset(self):
        if self.reset_round == 0:
            try:
                self.catch_up()
            except BaseException:       # a signal's handler: the others, in reset() too, still wait for this rank
                self.broken = True
                raise
        HostEpoch.reset(self)

    def waits_there(self, HostWaits first, int rank):
        # MPI lets other threads run, one of which may use this Buffer and its network: then this is left undone.
        if self.network is not None and not self.broken and not self.leaving and not self.in_call \
                and threading.active_count() == 1:
            self.pump()
        return HostEpoch.waits_there(self, first, rank)

    def node_of(self, rank):
        return f", node {self.topology.node_of_rank[rank]}"

    def break_off(self, uint64_t first):
        HostEpoch.break_off(self, first)
        self.flush(0.1)
