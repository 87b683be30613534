# cython: boundscheck=False, wraparound=False
# distutils: libraries = epcy_put epcy_cuda
"""The nvshmem backend between nodes: rows go to other nodes by NVSHMEM's put, see include/epcy/put_nodes.h.

A call is the same as inside a node but for the kernels that do it: a record to everybody, places from everybody's
records, rows, and the step of the epoch. Importing this loads NVSHMEM's device library.
"""

import time

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

import numpy as np

from epcy.backends.call cimport DispatchCall
from epcy.backends.cuda cimport *
from epcy.backends.cuda_event cimport CudaEvent
from epcy.backends.cuda_handle cimport CudaHandle
from epcy.backends.cuda_nodes cimport *
from epcy.backends.cuda_put cimport epcy_put_quiet, epcy_put_start
from epcy.backends.nvshmem cimport NvshmemBackend
from epcy.backends.nvshmem_waits cimport LEFT
from epcy.backends.symmetric cimport check

from epcy.backends import bootstrap, cuda_sizes, verdicts
from epcy.backends.nvshmem_waits import records
from epcy.errors import BackendError, CapacityError, PeerError


cdef class NodesNvshmemBackend(LowLatencyNvshmemBackend):
    def __init__(self, topology, comm, dict shape, dict options, list identities, object token):
        """Collective, blocking, over the ranks of several nodes of one machine."""
        cdef int previous = 0
        self.nodes, self.node_bytes = topology, np.zeros(2, np.uint64)
        super().__init__(comm, shape, options, identities, token)
        try:
            check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
            try:
                status = epcy_put_start(self.device)
                if status:
                    raise BackendError(f"NVSHMEM's device library did not start (status {status}); set "
                                       "NVSHMEM_DEBUG=INFO to see why", "NVSHMEM", status)
                check(epcy_nodes_load(), "loading kernels")
                check(epcy_cuda_stream(<void **>&self.leave_stream), "cudaStreamCreate")
            finally:
                epcy_cuda_set_device(previous, NULL)
            self.fill_map(options["path"])
            self.transport = f"NVSHMEM put, {options['path']} path"
            if self.counters is not None:
                self.counters.beside = self.read_node_bytes
            options["num_sms"] = max(options["num_sms"], self.num_blocks("dispatch", "rank"))
            bootstrap.exchange(self.comm, None, None, self.timeout, "Buffer()")
        except BaseException as error:
            self.failed(comm, error, options["timeout"])

    def abandon(self, bint together):
        if self.leave_stream:
            epcy_cuda_stream_free(<void *>self.leave_stream)
            self.leave_stream = 0
        LowLatencyNvshmemBackend.abandon(self, together)

    def more_words(self, options, begin):
        groups = self.groups(self.rank, options["path"])
        chunk = cuda_sizes.chunk_tokens(options, self.shape.row_bytes, self.shape.num_max_tokens)
        options["node_chunk_tokens"] = chunk
        most = max([len(self.groups(rank, options["path"])) for rank in range(self.num_ranks)])
        self.nodes_wire = epcy_nodes_layout(&self.shape, begin, most, options["num_node_buffers"], chunk)
        self.nodes_wire.num_groups = len(groups)    # nodes may differ in size on the direct path
        return self.nodes_wire.bytes

    def groups(self, rank, path):
        """By group of a rank: whom it sends to, and all its ranks."""
        own = self.nodes.node_of_rank[rank]
        others = [self.nodes.ranks_of_node(node) for node in range(self.nodes.num_nodes) if node != own]
        if path == "direct":
            return [(peer, (peer,)) for ranks in others for peer in ranks]
        place = self.nodes.ranks_of_node(own).index(rank)
        return [(ranks[place], ranks) for ranks in others]

    def fill_map(self, path):
        cdef epcy_nodes_map *m = &self.map
        cdef int g, r
        memset(m, 0, sizeof(self.map))
        near = self.nodes.ranks_of_node(self.nodes.node)
        for r in range(self.num_ranks):
            m.name[r], m.pe[r] = <char *><uintptr_t>self.memory.names[r], self.memory.pes[r]
            m.group_of[r] = -1
        m.near_ranks, m.num_near = sum([1 << rank for rank in near]), len(near)
        m.hierarchical = path == "hierarchical"
        for g, (peer, members) in enumerate(self.groups(self.rank, path)):
            m.peer[g], m.members[g] = peer, sum([1 << rank for rank in members])
            m.back[g] = [back for back, _ in self.groups(peer, path)].index(self.rank)
            for rank in members:
                m.group_of[<int>rank] = g
        if m.hierarchical:
            first = [self.nodes.ranks_of_node(node)[0] for node in range(self.nodes.num_nodes)]
            steps = [EPCY_NODES_OWN_NODE if rank in near else m.group_of[<int>rank] for rank in first]
        else:
            steps = [-2 - rank if rank in near else m.group_of[<int>rank] for rank in range(self.num_ranks)]
        for g, step in enumerate(steps):
            m.order[g] = step
        m.num_steps = len(steps)

    def choose_blocks(self, num_sms):
        """Each thing that a kernel does has as many blocks: to send and to receive for each group, and at home. Two
        share a multiprocessor, if they can."""
        cdef int each = 0
        NvshmemBackend.choose_blocks(self, num_sms)
        check(epcy_nodes_resident(&each), "cudaOccupancyMaxActiveBlocksPerMultiprocessor")
        self.blocks_each = max(1, min(2, each))
        most = self.blocks_each * min(num_sms or self.num_multiprocessors, self.num_multiprocessors)
        kinds = 1 + 2 * max(1, self.nodes_wire.num_groups)
        self.node_blocks = max(1, min(self.nodes_wire.num_channels, most // kinds))

    def num_blocks(self, str op, str layout):
        return -(-self.node_blocks * (1 + 2 * self.nodes_wire.num_groups) // self.blocks_each)

    # ---- calls ------------------------------------------------------------------------------------------------

    cdef CudaHandle make_handle(self, DispatchCall call, uintptr_t stream):
        cdef CudaHandle h = NvshmemBackend.make_handle(self, call, stream)
        cdef NodesRouting beside = NodesRouting.__new__(NodesRouting)
        cdef epcy_nodes_routing *n = &beside.routing
        cdef int64_t R = self.num_ranks, M = self.shape.num_max_tokens, K = self.shape.num_topk
        cdef int64_t G = self.nodes_wire.num_groups, C = self.nodes_wire.num_channels, E = self.shape.num_experts
        cdef int64_t lanes = R * M * K if call.layout == "expert" else 0
        cdef int64_t P = self.map.num_near if self.map.hierarchical else 1
        cdef int32_t *at
        beside.memory = self.pool.malloc(4 * (R * M * K + lanes + R * M + G * M * (P + 3) + 2 * G * C
                                              + R + R * R + R * E))
        at = <int32_t *><uintptr_t>beside.memory.ptr
        n.ids, at = at, at + R * M * K
        n.lane_rows, at = at, at + lanes
        n.first, at = at, at + R * M
        n.feed_rows, at = at, at + G * M * P
        n.own_list, at = at, at + G * M
        n.own_order, at = at, at + G * M
        n.feed_list, at = at, at + G * M
        n.own_count, at = at, at + G * C
        n.feed_count, at = at, at + G * C
        n.tokens, at = at, at + R
        n.counts, n.lanes = at, at + R * R
        h.beside = beside
        return h

    cdef int open_call(self, epcy_nodes_call *c, const epcy_peers *peers) except -1:
        memset(c, 0, sizeof(epcy_nodes_call))
        c.peers, c.wire, c.map, c.num_blocks = peers[0], self.nodes_wire, self.map, self.node_blocks
        c.peers.far = (<uint32_t>((<uint64_t>1 << self.num_ranks) - 1)) & ~self.map.near_ranks
        return 0

    cdef int run_dispatch(self, epcy_cuda_dispatch *d, CudaHandle handle, uintptr_t stream) except -1:
        cdef epcy_nodes_call c
        cdef void *s = <void *>stream
        self.open_call(&c, &d.peers)
        self.last_handle = handle
        c.routing, c.nodes = handle.routing, (<NodesRouting>handle.beside).routing
        c.header, c.limit, c.num_tokens, c.row_bytes = <uint32_t>d.header, <uint32_t>d.limit, d.num_tokens, d.row_bytes
        c.x, c.x_stride_bytes, c.scales, c.num_scales = d.x, d.x_stride_bytes, <const float *>d.scales, d.num_scales
        c.topk_idx, c.is_int64, c.lane_ids_out, c.topk_weights = d.topk_idx, d.is_int64, d.lane_ids_out, d.topk_weights
        c.fill_to, c.alignment = d.fill_to, d.alignment
        c.parts = (0 if d.cached else EPCY_NODES_IDS) | (EPCY_NODES_WEIGHTS if c.header >> 8 & 1 else 0)
        check(epcy_nodes_launch_record(&c, NULL, s), "launching dispatch")
        check(epcy_nodes_launch_await(&c, s) if d.cached else epcy_nodes_launch_plan(&c, s), "launching dispatch")
        check(epcy_nodes_launch_dispatch(&c, s), "launching dispatch")
        return check(epcy_nodes_launch_end(&c, s), "launching dispatch")

    cdef int run_combine(self, epcy_cuda_combine *d, CudaHandle handle, uintptr_t stream) except -1:
        cdef epcy_nodes_call c
        cdef void *s = <void *>stream
        cdef bint by_expert = handle.layout == "expert"
        self.open_call(&c, &d.peers)
        c.routing, c.nodes = handle.routing, (<NodesRouting>handle.beside).routing
        c.header, c.num_tokens, c.row_bytes, c.dtype = <uint32_t>d.header, d.num_tokens, d.row_bytes, d.dtype
        c.y_offset, c.weights_offset, c.out, c.bias[0], c.bias[1] = (
            d.y_offset, d.weights_offset, d.out, d.bias[0], d.bias[1])
        c.lane_ids, c.out_weights = d.lane_ids, d.out_weights
        c.own_rows, c.own_stride_bytes = d.own_rows, d.own_stride_bytes
        if by_expert:
            c.x, c.x_stride_bytes, c.topk_weights = d.x, d.x_stride_bytes, d.topk_weights
            c.parts = EPCY_NODES_WEIGHTS if c.header >> 8 & 1 else 0
        check(epcy_nodes_launch_record(&c, NULL, s), "launching combine")
        check(epcy_nodes_launch_await(&c, s), "launching combine")
        if by_expert:
            check(epcy_nodes_launch_sums(&c, s), "launching combine")
        check(epcy_nodes_launch_combine(&c, s), "launching combine")
        return check(epcy_nodes_launch_end(&c, s), "launching combine")

    cdef int run_step(self, epcy_peers *peers, uint32_t header, const char *text, uintptr_t stream) except -1:
        cdef epcy_nodes_call c
        cdef void *s = <void *>stream
        self.open_call(&c, peers)
        c.header = header
        check(epcy_nodes_launch_record(&c, text, s), "launching a step")
        check(epcy_nodes_launch_await(&c, s), "launching a step")
        return check(epcy_nodes_launch_end(&c, s), "launching a step")

    cdef int launch_reset(self, epcy_peers *peers) except -1:
        cdef epcy_nodes_call c
        self.open_call(&c, peers)
        check(epcy_put_quiet(<void *>self.own_stream), "nvshmemx_quiet_on_stream")  # what calls that failed have put
        return check(epcy_nodes_launch_reset(&c, &self.wire, self.num_resets, <void *>self.own_stream),
                     "launching reset")

    cdef int tell_gone(self, uint32_t spared=0, uint32_t how=LEFT) noexcept:
        cdef epcy_nodes_call c
        cdef CudaEvent event
        try:
            self.open_call(&c, &self.peers)
            check(epcy_nodes_launch_leave(&c, <void *>self.leave_stream), "leaving")
            event = CudaEvent.__new__(CudaEvent)
            event.record(self.leave_stream)
            limit = time.monotonic() + 2        # behind nothing but kernels that end by themselves
            while not event.query() and time.monotonic() < limit:
                time.sleep(1e-4)
        except BackendError:        # this rank's GPU is lost: the others find out by their limits
            return 0
        return 0

    def close(self, bint together):
        LowLatencyNvshmemBackend.close(self, together)
        if self.leave_stream:
            epcy_cuda_stream_free(<void *>self.leave_stream)
            self.leave_stream = 0

    # ---- what went wrong --------------------------------------------------------------------------------------

    def node_of(self, rank):
        return f", node {self.nodes.node_of_rank[rank]}"

    def all_records(self):
        """Everybody's record of the last call."""
        cdef epcy_nodes_record *at = NULL
        cdef int rank
        epoch = int(self.fetch(self.peers.control.local, 1, np.uint32)[0])
        found = []
        for rank in range(self.num_ranks):
            begin = self.nodes_wire.records + ((epoch & 1) * self.num_ranks + rank) * self.nodes_wire.record_bytes
            raw = self.fetch(begin, EPCY_NODES_RECORD_BYTES, np.uint8)
            bad = raw[<int64_t>&at.bad[0][0]:][:16 * EPCY_NODES_PARTS].view(np.int64).reshape(-1, 2)
            text = raw[<int64_t>&at.text[0]:][:EPCY_CUDA_TEXT_BYTES].tobytes().partition(b"\0")[0]
            found.append((*raw[:8].view(np.uint32).tolist(), bad, text.decode(errors="replace")))
        return epoch, found

    def fail(self, op, outcomes):
        cdef int64_t R = self.num_ranks, E = self.shape.num_experts, K = self.shape.num_topk
        cdef NodesRouting beside
        verdict = max(outcomes)
        if verdict == EPCY_VERDICT_BROKEN:
            NvshmemBackend.fail(self, op, outcomes)
        self.settle(op)
        epoch, found = self.all_records()
        headers = [record[0] for record in found]
        if verdict == EPCY_VERDICT_REFUSED:
            rank = next(rank for rank in range(R) if headers[rank] & EPCY_HEADER_REFUSED)
            raise PeerError(found[rank][3], [rank])
        if verdict == EPCY_VERDICT_MISMATCH:
            raise verdicts.mismatch(epoch, records(headers))
        if verdict == EPCY_VERDICT_BAD_ID:
            bad = {rank: min([tuple(one) for one in record[2].tolist() if one[0] >= 0])
                   for rank, record in enumerate(found)
                   if headers[rank] & EPCY_HEADER_WAITS and (record[2][:, 0] >= 0).any()}
            rank = self.rank if self.rank in bad else min(bad)
            lane, value = bad[rank]
            error = verdicts.bad_id(rank, lane // K, lane % K, value, E)
            raise error if rank == self.rank else PeerError(f"rank {rank} refused {op} (call {epoch}): {error}", [rank])
        rank = outcomes.index(EPCY_VERDICT_OVERFLOW)
        beside = self.last_handle.beside
        if self.last_handle.layout == "expert":
            lanes = self.fetch_array(<uintptr_t>beside.routing.lanes, R * E).reshape(R, R, -1)[:, rank].sum(0)
            step = self.last_handle.expert_alignment
            rows = int((-(-lanes // step) * step).sum())
        else:
            rows = int(self.fetch_array(<uintptr_t>beside.routing.counts, R * R).reshape(R, R)[:, rank].sum())
        text = verdicts.no_room_for_rows(epoch, rank, rows, found[rank][1])
        raise CapacityError(text) if rank == self.rank else PeerError(text, [rank])

    def fetch_array(self, uintptr_t address, int64_t count):
        """Read numbers of a handle."""
        out = np.empty(count, np.int32)
        cdef int32_t[::1] raw = out
        check(epcy_cuda_fetch(&raw[0], <const void *>address, count * 4), "cudaMemcpy")
        return out

    def read_node_bytes(self):
        """Bring what was sent to other nodes into the meter."""
        cdef epcy_nodes_local *at = NULL
        cdef int i
        now = self.fetch(self.nodes_wire.local + <int64_t>&at.node_bytes[0], 2, np.uint64)
        for i in range(2):
            self.meter.m.node_bytes[i] += <int64_t>int(now[i] - self.node_bytes[i])
        self.node_bytes = now

    def put_rows(self, int peer, int num_rows, int num_blocks, uintptr_t stream):
        """Put the first rows of this rank's receive area into a rank's combine area, by NVSHMEM alone."""
        cdef char *to = self.map.name[peer] + self.heap_layout.combine[0]
        cdef char *start = self.start + self.heap_layout.receive[0]
        return check(epcy_put_launch_rows(to, start, num_rows, self.shape.row_bytes, self.map.pe[peer], num_blocks,
                                          <void *>stream), "launching puts")
