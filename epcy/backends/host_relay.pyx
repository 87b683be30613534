# cython: boundscheck=False, wraparound=False
# distutils: libraries = epcy_host
"""The host backend's dispatch and combine between nodes: streams of messages over links (include/epcy/nodes.h).

Each is one loop without a wait in it: what has come is worked on, what has room is sent, own rows are moved in between.
Why that ends is in docs/nodes.md: what a message needs to be worked on never depends on a message behind it.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from epcy.arrays cimport KIND_FP32
from epcy.backends.node_waits cimport NodeWait

PHASE = "forward"                       # of errors: rows, or sums of them, that did not come from another node


cdef class Relayed:
    def __cinit__(self, int num_links):
        self.num_links = num_links
        self.num_out = <int64_t *>calloc(2 * num_links + 1, sizeof(int64_t))
        self.routes = <epcy_route **>calloc(num_links + 1, sizeof(epcy_route *))
        if self.num_out == NULL or self.routes == NULL:
            raise MemoryError
        self.num_in = self.num_out + num_links

    def __dealloc__(self):
        cdef int link
        if self.routes != NULL:
            for link in range(self.num_links):
                free(self.routes[link])
        free(self.routes)
        free(self.num_out)

    cdef int open(self, int link, int64_t num_in, int64_t num_topk) except -1:
        """Make room for a stream's routes."""
        self.num_in[link] = num_in
        self.routes[link] = <epcy_route *>malloc(max(1, num_in * num_topk) * sizeof(epcy_route))
        if self.routes[link] == NULL:
            raise MemoryError
        return 0


cdef class Streams:
    def __cinit__(self, int64_t num_links):
        self.num_links = num_links
        self.out = <epcy_stream *>calloc(2 * num_links + 1, sizeof(epcy_stream))
        self.to_send = <int64_t *>calloc(6 * num_links + 1, sizeof(int64_t))
        self.weights = <float **>calloc(2 * num_links + 1, sizeof(void *))
        if self.out == NULL or self.to_send == NULL or self.weights == NULL:
            raise MemoryError
        self.weights_out = self.out + num_links
        self.num_sent, self.to_come = self.to_send + num_links, self.to_send + 2 * num_links
        self.num_come, self.num_weights = self.to_send + 3 * num_links, self.to_send + 4 * num_links
        self.next, self.messages = self.to_send + 5 * num_links, <const char **>self.weights + num_links

    def __dealloc__(self):
        cdef int64_t link
        if self.weights != NULL:
            for link in range(self.num_links):
                free(self.weights[link])
        free(self.weights)
        free(self.to_send)
        free(self.out)

    cdef bint are_over(self) noexcept:
        cdef int64_t link
        for link in range(self.num_links):
            if self.num_sent[link] != self.to_send[link] or self.num_come[link] != self.to_come[link]:
                return False
        return True


cdef class HostRelay(HostNodes):
    def open_network(self, comm, options):
        HostNodes.open_network(self, comm, options)
        self.scratch = <char *>malloc(max(self.topology.ranks_per_node) * self.h.shape.row_bytes)
        if self.scratch == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.scratch)

    cdef epcy_message *next_message(self, int link) except? NULL:
        """The oldest message over a link, or NULL; what an abandoned call has left is thrown away."""
        cdef epcy_message *m
        while True:
            m = <epcy_message *>self.network.arrived(link)
            if m == NULL or m.epoch >= self.h.epoch:
                return m
            self.network.release(link)

    # ---- dispatch -------------------------------------------------------------------------------------------

    cdef int move(self, HostHandle handle, epcy_host_dispatch *d, bint uncached) except -1:
        cdef Streams s = Streams(self.nodes.num_links)
        cdef NodeWait wait = NodeWait(self, EPCY_OP_DISPATCH, PHASE, EPCY_WORD_DONE, self.h.epoch, self.timeout)
        cdef Relayed relayed
        cdef int64_t own = 0, moved
        cdef int link
        if handle.relayed is None:
            handle.relayed = Relayed(self.nodes.num_links)
        relayed = handle.relayed
        with nogil:
            if uncached:
                epcy_host_place(&self.h, d)
                epcy_nodes_count(&self.h, &self.nodes, d.routes, d.num_tokens, relayed.num_out)
            epcy_host_fill(&self.h, d)
        for link in range(self.nodes.num_links):
            s.to_send[link] = s.out[link].num_in_all = relayed.num_out[link]
            s.to_come[link] = relayed.num_in[link]
            if uncached:        # a message tells how many there are, if only that there are none
                s.num_sent[link] = s.num_come[link] = -1
        while own < d.num_tokens or not s.are_over():
            moved = self.pump()
            for link in range(self.nodes.num_links):
                moved += self.take_rows(link, d, relayed, s, uncached)
                moved += self.send_rows(link, d, s, uncached)
            if own < d.num_tokens:
                own += self.move_own(d, own)
            elif moved:
                wait.idle = 0
            elif wait.rest():
                self.look(wait, s)
        return 0

    cdef int take_rows(self, int link, epcy_host_dispatch *d, Relayed relayed, Streams s, bint uncached) except -1:
        """Put rows that came over a link into their places in this node; how many messages."""
        cdef epcy_message *m
        cdef int taken = 0
        while s.num_come[link] != s.to_come[link]:
            m = self.next_message(link)
            if m == NULL:
                break
            if uncached and m.first == 0:
                relayed.open(link, m.num_in_all, self.h.shape.num_topk)
                s.to_come[link] = m.num_in_all
            with nogil:
                epcy_nodes_forward(&self.h, d, uncached, relayed.routes[link], <const char *>m)
            s.num_come[link] = m.first + m.num_tokens
            self.network.release(link)
            taken += 1
        return taken

    cdef int send_rows(self, int link, epcy_host_dispatch *d, Streams s, bint uncached) except -1:
        """Send as many messages of rows as there is room for."""
        cdef char *room
        cdef int64_t num_bytes
        cdef int sent = 0
        while s.num_sent[link] != s.to_send[link]:
            room = self.network.room(link)
            if room == NULL:
                break
            with nogil:
                num_bytes = epcy_nodes_pack(&self.h, &self.nodes, d, link, uncached, &s.out[link], room)
            self.count_bytes(epcy_nodes_payload_bytes(d, room), num_bytes)
            self.network.send(link, num_bytes)
            s.num_sent[link] = s.out[link].next
            sent += 1
        return sent

    cdef int move_own(self, epcy_host_dispatch *d, int64_t first) except -1:
        """Write some of this rank's own rows to ranks of this node; how many tokens' it were."""
        cdef epcy_host_dispatch part = d[0]
        part.num_tokens = min(4 * self.nodes.chunk_tokens, d.num_tokens - first)
        part.x, part.routes = d.x + first * d.x_stride_bytes, d.routes + first * self.h.shape.num_topk
        if d.scales != NULL:
            part.scales = d.scales + first * d.num_scales * 4
        if d.topk_weights != NULL:
            part.topk_weights = d.topk_weights + first * self.h.shape.num_topk
        with nogil:
            epcy_host_send(&self.h, &part)
        return <int>part.num_tokens

    # ---- combine --------------------------------------------------------------------------------------------

    cdef int add_up(self, HostHandle handle, epcy_host_combine *c) except -1:
        cdef Relayed relayed = handle.relayed
        cdef Streams s = Streams(self.nodes.num_links)
        cdef NodeWait wait = NodeWait(self, EPCY_OP_COMBINE, PHASE, EPCY_WORD_DONE, self.h.epoch, self.timeout)
        cdef bint weighted = c.topk_weights != NULL, brought = c.out_weights != NULL
        cdef epcy_nodes_sum sums
        cdef int64_t before, moved, num_topk = self.h.shape.num_topk
        cdef int link
        sums.call, sums.messages, sums.next, sums.token = c, s.messages, s.next, 0
        sums.scratch, sums.wanted = self.scratch, 0
        for link in range(self.nodes.num_links):
            s.weights_out[link].num_in_all = s.to_come[link] = relayed.num_out[link]
            s.out[link].num_in_all = s.to_send[link] = relayed.num_in[link]
            if weighted:
                s.weights[link] = <float *>malloc(max(1, relayed.num_in[link] * num_topk) * sizeof(float))
                if s.weights[link] == NULL:
                    raise MemoryError
        while sums.wanted >= 0 or not s.are_over():
            moved = self.pump()
            for link in range(self.nodes.num_links):
                moved += self.send_sums(link, c, relayed, s, weighted)
                moved += self.take_sums(link, s, weighted)
            before = sums.token
            if sums.wanted >= 0:
                with nogil:
                    epcy_nodes_sum_tokens(&self.h, &self.nodes, &sums, brought)
            moved += sums.token - before
            for link in range(self.nodes.num_links):
                s.num_come[link] = sums.next[link]
            if moved:
                wait.idle = 0
            elif wait.rest():
                self.look(wait, s)
        for link in range(self.nodes.num_links):
            if s.messages[link] != NULL:
                self.network.release(link)
        return 0

    cdef int take_sums(self, int link, Streams s, bint weighted) except -1:
        """Keep the weights that came over a link, and have the next sums at hand; how many messages."""
        cdef epcy_message *m = <epcy_message *>s.messages[link]
        cdef int64_t num_topk = self.h.shape.num_topk
        cdef int taken = 0
        if m != NULL:
            if s.next[link] < m.first + m.num_tokens:
                return 0
            s.messages[link] = NULL
            self.network.release(link)
        while True:
            m = self.next_message(link)
            if m == NULL or s.next[link] == s.to_come[link] and m.kind == EPCY_MESSAGE_SUMS:
                return taken
            taken += 1
            if m.kind == EPCY_MESSAGE_SUMS:
                s.messages[link] = <const char *>m
                return taken
            memcpy(s.weights[link] + m.first * num_topk, <char *>m + sizeof(epcy_message), m.num_tokens * num_topk * 4)
            s.num_weights[link] = m.first + m.num_tokens
            self.network.release(link)

    cdef int send_sums(self, int link, epcy_host_combine *c, Relayed relayed, Streams s, bint weighted) except -1:
        """Send weights, all of them first, then sums whose weights are here; as many messages as there is room for."""
        cdef char *room
        cdef int64_t num_bytes, payload, ready, first
        cdef bint brought = c.out_weights != NULL
        cdef int sent = 0
        while True:
            room = self.network.room(link)
            if room == NULL:
                return sent
            if weighted and s.weights_out[link].next < s.weights_out[link].num_in_all:
                payload = 0
                with nogil:
                    num_bytes = epcy_nodes_pack_weights(
                        &self.h, &self.nodes, c.routes, c.topk_weights, link, &s.weights_out[link],
                        epcy_nodes_message_bytes(&self.h, &self.nodes), room)
            else:
                first = s.out[link].next
                ready = min(first + self.nodes.chunk_tokens, s.out[link].num_in_all)
                if first == ready or weighted and s.num_weights[link] < ready:
                    return sent
                with nogil:
                    num_bytes = epcy_nodes_reduce(&self.h, &self.nodes, c, relayed.routes[link], s.weights[link],
                                                  brought, &s.out[link], room)
                s.num_sent[link] = s.out[link].next
                payload = (s.out[link].next - first) * self.h.shape.hidden * (4 if c.dtype == KIND_FP32 else 2)
            self.count_bytes(payload, num_bytes)
            self.network.send(link, num_bytes)
            sent += 1

    # ---- seeing, and what can go wrong ----------------------------------------------------------------------

    cdef int count_bytes(self, int64_t payload, int64_t all_bytes) except -1:
        if self.meter is not None:
            self.meter.m.node_bytes[0] += payload
            self.meter.m.node_bytes[1] += all_bytes - payload
        return 0

    cdef int look(self, NodeWait wait, Streams s) except -1:
        """Raise if this will not end: a rank has left this call, has ended, or is too late."""
        cdef int64_t r, link
        others = [r for r in range(self.num_ranks) if r != self.rank and not self.h.masked[r]]
        # In a combine, a link whose next sums are at hand waits for another one's, and so may one that takes none.
        late = [link for link in range(s.num_links)
                if s.num_come[link] != s.to_come[link] and s.messages[link] == NULL]
        if wait.op != EPCY_OP_COMBINE or not late:
            late = [link for link in range(s.num_links)
                    if link in late or s.num_sent[link] != s.to_send[link]]
        return wait.look([r for r in others if epcy_host_word(&self.h, r, EPCY_WORD_DONE) < self.h.epoch],
                         [r for r in others if self.has_left(r)], [self.peers[link] for link in late])
