# cython: boundscheck=False, wraparound=False
# distutils: libraries = epcy_host
"""The host backend's low-latency calls between nodes: direct, a message a call to each rank of another node.

The slots of a rank of another node are copied here by its messages, so what follows a call's arrival is what happens
in one node. Sending waits for nobody: a slot is used again only when everybody has received what it held, so the
buffers of the call before the last are free.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc

from epcy.backends.host_nodes cimport HostNodes
from epcy.backends.node_waits cimport NodeWait

from epcy.backends.host_relay import PHASE

cdef int TAG_LOW_LATENCY = 3
cdef int *OPS = [EPCY_OP_LOW_LATENCY_DISPATCH, EPCY_OP_LOW_LATENCY_COMBINE]


cdef class HostRelayLowLatency(HostRelay):
    def __init__(self, *args):
        super().__init__(*args)
        if self.low_latency is not None:
            self.low_latency_transport = f"shared memory inside a node, {self.network.name} between nodes"

    def __dealloc__(self):
        free(self.reached)

    def low_latency_channels(self):
        cdef int64_t lanes = self.h.shape.num_low_latency_tokens * self.h.shape.num_topk
        if lanes == 0:
            return []
        self.reached = <epcy_route *>malloc(lanes * sizeof(epcy_route))
        if self.reached == NULL:
            raise MemoryError
        self.first_channel = <int>self.nodes.num_links + self.num_remote
        return [(self.remote[i // 2], TAG_LOW_LATENCY + i % 2, epcy_nodes_low_latency_bytes(&self.h.shape, i % 2),
                 EPCY_NUM_SLOTS, False) for i in range(2 * self.num_remote)]

    cdef int pump(self) except -1:
        cdef int moved = HostNodes.pump(self)
        if self.reached != NULL:
            self.take_slots()
        return moved

    cdef int take_slots(self) except -1:
        """Apply what came. A combine's rows lie in the message itself: it is kept until the call is received."""
        cdef char *message
        cdef int i, channel
        for i in range(2 * self.num_remote):
            channel = self.first_channel + i
            message = self.network.arrived(channel)
            while message != NULL:
                # Of a call that this rank is not in, the header tells which it was.
                epcy_nodes_low_latency_apply(&self.h, self.remote[i // 2], message)
                if i % 2 and epcy_nodes_low_latency_epoch(message) > self.received_up_to(EPCY_LOW_LATENCY_COMBINE):
                    break
                self.network.release(channel)
                message = self.network.arrived(channel)
        return 0

    cdef int post(self, int kind, int slot, uint64_t epoch, const int64_t *counts) except -1:
        cdef NodeWait wait = None
        cdef int64_t num_bytes, payload = 0
        cdef int i, channel
        cdef char *room
        for i in range(self.num_remote):
            channel = self.first_channel + 2 * i + kind
            room = self.network.room(channel)
            while room == NULL and not self.h.masked[self.remote[i]]:   # it has come, and this rank has not looked
                if wait is None:
                    wait = NodeWait(self, OPS[kind], PHASE, -1, epoch, self.timeout)
                elif wait.rest():
                    wait.look([self.remote[i]])
                self.pump()
                room = self.network.room(channel)
            if self.h.masked[self.remote[i]]:
                continue
            with nogil:
                num_bytes = epcy_nodes_low_latency_pack(&self.h, kind, slot, epoch, self.remote[i], counts, room,
                                                        &payload)
            if num_bytes < 0:
                raise MemoryError
            self.count_bytes(payload, num_bytes)
            self.network.send(channel, num_bytes)
        return 0

    cdef int await_slots(self, int kind, uint64_t epoch) except -1:
        cdef NodeWait wait = None
        cdef int i
        while True:
            self.pump()
            missing = [r for r in [self.remote[i] for i in range(self.num_remote)]
                       if not self.h.masked[r] and not self.op_of(r, epoch) and not self.is_masked_by(r, epoch)]
            if not missing:
                return 0
            if wait is None:
                wait = NodeWait(self, OPS[kind], PHASE, -1, epoch, self.timeout)
            if wait.rest():
                wait.look(missing)

    cdef const epcy_route *reachable(self, const epcy_route *routes, int64_t num_tokens, uint64_t epoch) except NULL:
        epcy_nodes_low_latency_routes(&self.h, epoch, routes, num_tokens, self.reached)
        return self.reached
