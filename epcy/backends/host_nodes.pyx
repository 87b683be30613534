# cython: boundscheck=False, wraparound=False
# distutils: libraries = epcy_host
"""The host backend between nodes: each node has a window of its own, and ranks of other nodes are known by messages.

Of a rank of another node there is a copy of its control block here, which its messages keep up to date. All that looks
at other ranks' words and records (the base classes) looks at these copies, so the protocol, its errors and reset() are
those of one node. What remains is to send this rank's words when they change, and to let messages come while it waits.
"""

import threading
import time

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from epcy.backends.host_epoch cimport HostEpoch
from epcy.backends.host_waits cimport HostWaits
from epcy.backends.network cimport MpiNetwork
from epcy.backends.node_waits cimport NodeWait
from epcy.backends.window cimport Heap, allocate
from epcy.layout cimport epcy_num_scales

from epcy.backends import bootstrap
from epcy.errors import BackendError, EpcyError, HeapError, PeerTimeoutError

cdef int64_t SHORT_NS = 4_000, LONG_NS = 500_000        # how long a wait looks at memory alone
cdef int MOST_AT_ONCE = 256             # messages that a turn takes
cdef int TAG_DATA = 1, TAG_CONTROL = 2
cdef int64_t USUAL_MESSAGE_BYTES = 1 << 18
cdef int64_t EAGER_BYTES = 8192         # of messages that surely leave without their sender's help
cdef int NUM_SNAPSHOTS = 8              # of the largest kind, that may be on their way to a rank


cdef class HostNodes(HostLowLatencyBackend):
    def __init__(self, topology, comm, dict shape, dict options, list identities, object token):
        """Collective, blocking, over the ranks of any number of nodes; on the hierarchical path of one size."""
        cdef int size = comm.size
        self.topology = topology
        self.groups = <int32_t *>calloc(2 * size, sizeof(int32_t))
        self.is_remote = <uint8_t *>calloc(size, 1)
        self.remote = <int *>calloc(size, sizeof(int))
        self.told = <epcy_told *>calloc(size, sizeof(epcy_told))
        self.heard = <epcy_heard *>calloc(size, sizeof(epcy_heard))
        if (self.groups == NULL or self.is_remote == NULL or self.remote == NULL or self.told == NULL
                or self.heard == NULL):
            raise MemoryError
        self.find_links(topology, options["path"])
        self.node_comm = comm.Split(topology.node, comm.rank)
        super().__init__(comm, shape, options, identities, token)
        own = bootstrap.duplicate(comm, self.timeout, "Buffer()")
        error = None
        try:
            self.open_network(own, options)
        except MemoryError:
            error = HeapError(f"num_node_buffers: no memory for {options['num_node_buffers']} messages of "
                              f"{options['node_chunk_tokens']} tokens to and from each of {self.num_remote} ranks of "
                              f"other nodes (rank {self.rank}); give fewer, or fewer node_chunk_tokens")
        try:
            bootstrap.exchange(comm, None, error, self.timeout, "Buffer()")
        except EpcyError as refused:
            self.remove_page()
            if self.network is not None:
                self.network.close(False)
            if not isinstance(refused, PeerTimeoutError):
                self.heap.close()
            raise

    def __dealloc__(self):
        cdef int i
        for i in range(self.num_remote):
            if self.h.base != NULL:
                free(self.h.base[self.remote[i]])
        free(self.groups)
        free(self.is_remote)
        free(self.remote)
        free(self.told)
        free(self.heard)
        free(self.pieces)
        free(self.num_come)

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
        cdef int64_t whole_bytes = epcy_snapshot_bytes(&self.h.shape)
        self.num_pieces = <int>((whole_bytes + EAGER_BYTES - 1) // EAGER_BYTES)
        self.piece_bytes = min(whole_bytes, EAGER_BYTES)
        if self.num_pieces > 1:
            self.pieces = <char *>malloc((1 + self.num_remote) * whole_bytes)
            self.num_come = <int64_t *>calloc(self.num_remote, sizeof(int64_t))
            if self.pieces == NULL or self.num_come == NULL:
                raise MemoryError
        control = (self.piece_bytes, NUM_SNAPSHOTS * self.num_pieces, True)
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

    cdef Heap take_memory(self, int64_t nbytes):
        """A window for the ranks of this node, and a copy of the control block of each other one."""
        cdef int i, size = self.node_comm.size
        cdef char **base = <char **>malloc(size * sizeof(char *))
        cdef Heap heap
        if base == NULL:
            raise MemoryError
        try:
            heap = allocate(self.node_comm, nbytes, base)
            for i, rank in enumerate(self.topology.ranks_of_node(self.topology.node)):
                self.h.base[rank] = base[i]
        finally:
            free(base)
        for i in range(self.num_remote):
            self.h.base[self.remote[i]] = <char *>calloc(1, epcy_host_control_bytes(&self.h.shape))
            if self.h.base[self.remote[i]] == NULL:
                raise MemoryError
        self.h.is_remote = self.is_remote
        return heap

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

    def close(self, together):
        try:
            HostEpoch.close(self, together)
        finally:
            if not self.leaving:        # the others may be anywhere
                self.network.close(False)

    # ---- what ranks of other nodes know of this one, and this one of them -----------------------------------

    cdef int pump(self) except -1:
        """Let messages come and go, apply what came, tell what changed; how many came or went."""
        cdef int i, channel, moved = 0, now = 1
        cdef char *message
        while now and moved < MOST_AT_ONCE:     # all that has come: the last word of a rank may be that it has left
            try:
                now = self.network.progress()
            except BackendError:
                now = self.network.give_up(self.must_be_dead())
            moved += now
            for i in range(self.num_remote):
                channel = <int>self.nodes.num_links + i
                message = self.network.arrived(channel)
                while message != NULL:
                    self.take_piece(i, message)
                    self.network.release(channel)
                    message = self.network.arrived(channel)
        self.tell_nodes()
        return moved

    cdef object must_be_dead(self):
        """Whose message broke off because its process has ended: the wait for it finds that out. Else raise again."""
        cdef int i
        remote = [self.remote[i] for i in range(self.num_remote)]
        for _ in range(200):         # its memory went first, and what tells of its end comes a little later
            dead = self.dead(remote)
            if dead:
                return dead
            time.sleep(0.005)
        raise

    cdef int tell_nodes(self) except -1:
        """Send this rank's words to everybody who does not know them; the number of ranks that could not be told.

        Without room nothing is lost: what a rank hears is always the newest. A masked rank is not waited for, and but
        one message is under way to it, so that there is room for the news that it is masked no more.
        """
        cdef int i, channel, untold = 0
        cdef int64_t num_bytes
        cdef char *message
        for i in range(self.num_remote):
            channel = <int>self.nodes.num_links + i
            if (self.h.masked[self.remote[i]] and not self.network.has_sent(channel)
                    and self.told[i].without == epcy_host_without(&self.h, self.h.rank)[self.remote[i]]):
                continue
            message = self.network.room(channel, self.num_pieces)
            if message == NULL:
                untold += not self.h.masked[self.remote[i]]
                continue
            if self.num_pieces > 1:
                message = self.pieces
            num_bytes = epcy_snapshot_take(&self.h, self.remote[i], self.leaving, self.asked, &self.heard[i],
                                           &self.told[i], message)
            if self.num_pieces > 1:
                self.send_pieces(channel, message, num_bytes)
            elif num_bytes:
                self.network.send(channel, num_bytes)
        return untold

    cdef int send_pieces(self, int channel, const char *snapshot, int64_t num_bytes) except -1:
        """Send a snapshot in messages that leave at once: there is room for all of them."""
        cdef int64_t at = 0, some
        while at < num_bytes:
            some = min(self.piece_bytes, num_bytes - at)
            memcpy(self.network.room(channel), snapshot + at, some)
            self.network.send(channel, some)
            at += some
        return 0

    cdef int take_piece(self, int i, const char *message) except -1:
        """Apply the snapshot that a message is, or ends."""
        cdef int64_t whole_bytes = epcy_snapshot_bytes(&self.h.shape), num_bytes
        cdef char *into
        if self.num_pieces > 1 and (self.num_come[i] or epcy_snapshot_num_bytes(message) > self.piece_bytes):
            into = self.pieces + (1 + i) * whole_bytes
            num_bytes = epcy_snapshot_num_bytes(into) if self.num_come[i] else epcy_snapshot_num_bytes(message)
            memcpy(into + self.num_come[i], message, min(self.piece_bytes, num_bytes - self.num_come[i]))
            self.num_come[i] += self.piece_bytes
            if self.num_come[i] < num_bytes:
                return 0
            self.num_come[i] = 0
            message = into
        epcy_snapshot_apply(&self.h, self.remote[i], message, &self.heard[i])
        return 0

    cdef int flush(self, double limit) except -1:
        """Let everybody know what this rank has stored; when it leaves, wait until they leave too.

        That is no error's place: whoever cannot be told any more, or not in time, makes the next call fail.
        """
        cdef NodeWait wait = None
        while True:
            self.pump()
            if self.is_told(self.tell_nodes()):
                return 0
            if wait is None:
                wait = NodeWait(self, 0, "leave", -1, 0, limit)
            if wait.rest() and (wait.waited() > limit or self.all_dead()):
                return 0

    cdef bint is_told(self, int untold) noexcept:
        cdef int i
        for i in range(self.num_remote):
            untold += self.is_untold(i)
        return untold == 0

    cdef bint is_untold(self, int i) noexcept:
        """Whether this rank must not leave before a rank of another node has heard of it, or left as well."""
        if self.h.masked[self.remote[i]]:
            return False
        return self.leaving and (not self.heard[i].leaving
                                 or not self.network.has_sent(<int>self.nodes.num_links + i))

    cdef bint all_dead(self) except -1:
        """Whether all who are still to be told have ended."""
        cdef int i
        untold = [self.remote[i] for i in range(self.num_remote)
                  if self.is_untold(i) or self.network.room(<int>self.nodes.num_links + i, self.num_pieces) == NULL]
        return len(self.dead(untold)) == len(untold)

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

    # ---- waits ----------------------------------------------------------------------------------------------

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
