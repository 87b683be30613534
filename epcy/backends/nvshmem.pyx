# cython: boundscheck=False, wraparound=False
# distutils: libraries = epcy_cuda
"""The nvshmem backend: CUDA kernels over symmetric memory, ordered by streams.

A call is one kernel, and one step of the epoch that kernels keep on the device. The host waits for a kernel only where
a dispatch must know how many rows come; everything else that goes wrong is reported to mapped host memory and raised by
check() or the next call that waits. Here are dispatch and combine; what they stand on are the steps of a call
(nvshmem_epoch.pyx), the waits and what can go wrong in them (nvshmem_waits.pyx), the memory (nvshmem_heap.pyx), and
what all backends share (base.pyx).
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

import numpy as np

from epcy.arrays cimport KIND_INT64, Array
from epcy.backends.base cimport Backend
from epcy.backends.call cimport CombineCall, DispatchCall
from epcy.backends.cuda cimport *
from epcy.backends.cuda_event cimport CudaEvent
from epcy.backends.cuda_handle cimport CudaHandle
from epcy.backends.nvshmem_epoch cimport OP_COMBINE, OP_DISPATCH, NvshmemEpoch
from epcy.backends.symmetric cimport check
from epcy.handle cimport Combine, Dispatch, Handle
from epcy.layout cimport EPCY_NUM_AREAS, epcy_num_local_experts, epcy_num_scales

from epcy.backends.cuda_event import Foreign
from epcy.errors import ArgumentError, StateError


cdef class NvshmemBackend(NvshmemEpoch):
    cdef uint32_t header(self, int op, Array x, Handle handle, bint weights, bint routed) except? 0:
        """The first header word of a call; `routed`: by an earlier handle, which must be the same one on all ranks."""
        cdef uint32_t routing = <uint32_t>handle.epoch & 511 if routed else 0
        return (<uint32_t>op | <uint32_t>x.kind << 3 | (handle.layout == "expert") << 6 | weights << 8
                | (<uint32_t>handle.expert_alignment & 1023) << 9 | routing << 19)

    cdef int keep_inputs(self, DispatchCall call) except -1:
        """As ever, but on the call's stream: copies come after what wrote the inputs there."""
        cdef char *begin = self.start + self.heap_layout.receive[self.next_area]
        if not (self.lies_in(call.x, begin) or self.lies_in(call.scales, begin)
                or self.lies_in(call.topk_weights, begin)):
            return 0
        if call.stream == <uintptr_t>self.xp.cuda.get_current_stream().ptr:
            return Backend.keep_inputs(self, call)
        with self.xp.cuda.Stream.from_external(Foreign(call.stream)):
            return Backend.keep_inputs(self, call)

    # ---- dispatch -------------------------------------------------------------------------------------------

    cdef CudaHandle make_handle(self, DispatchCall call, uintptr_t stream):
        cdef CudaHandle h = CudaHandle.__new__(CudaHandle)
        cdef int64_t T = call.x.shape[0], R = self.num_ranks, C = EPCY_MAX_CHUNKS, at = 0
        cdef int64_t L = epcy_num_local_experts(&self.shape), num_fans = 0
        cdef bint by_expert = call.layout == "expert"
        cdef char *p
        h.buffer_token, h.layout, h.num_tokens = self.token, call.layout, T
        h.expert_alignment, h.num_worst_tokens = call.expert_alignment, call.num_worst_tokens
        h.epoch, h.backend, h.rank, h.own_count = self.num_calls, self, self.rank, -1
        lanes = T * self.shape.num_topk
        if by_expert:
            num_fans = R * self.shape.num_max_tokens * self.shape.num_topk
        h.memory = self.pool.malloc(16 + 8 * L + 8 * lanes + 4 * (2 * R * T + 3 * R * C)
                                    + by_expert * (8 * (L + 1) + 4 * (lanes + num_fans)))
        p = <char *><uintptr_t>h.memory.ptr
        h.routing.num_recv, at = <int64_t *>p, 16
        h.routing.experts, at = <int64_t *>(p + at), at + 8 * L
        h.lane_ids, at = <int64_t *>(p + at), at + 8 * lanes
        h.routing.list, at = <int32_t *>(p + at), at + 4 * R * T
        h.routing.pos, at = <int32_t *>(p + at), at + 4 * R * T
        h.routing.chunk_count, at = <int32_t *>(p + at), at + 4 * R * C
        h.routing.chunk_base, at = <int32_t *>(p + at), at + 4 * R * C
        h.routing.recv_count, at = <int32_t *>(p + at), at + 4 * R * C
        h.routing.num_peer_chunks = self.dispatch_peer_blocks
        h.routing.num_own_chunks = self.expert_own_blocks if by_expert else self.dispatch_own_blocks
        h.num_recv = self.xp.ndarray((1,), np.int64, memptr=h.memory)
        h.experts = self.xp.ndarray((L,), np.int64, memptr=h.memory + 16)
        if by_expert:       # at is a multiple of 8: all counts of 4-byte words before it are even
            h.offsets = self.xp.ndarray((L + 1,), np.int64, memptr=h.memory + at)
            h.routing.offsets, at = <int64_t *>(p + at), at + 8 * (L + 1)
            h.routing.lane_row, at = <int32_t *>(p + at), at + 4 * lanes
            h.routing.fans = <int32_t *>(p + at)
        return h

    cdef int fill(self, epcy_cuda_dispatch *d, DispatchCall call, CudaHandle handle, int area, bint waits) except -1:
        """Write down a dispatch as its kernel needs it."""
        cdef bint uncached = call.handle is None
        memset(d, 0, sizeof(epcy_cuda_dispatch))
        d.peers, d.routing = self.peers, handle.routing
        d.peers.operation = OP_DISPATCH
        d.row_bytes = self.shape.hidden * call.x.item_bytes()
        d.x, d.num_tokens = call.x.data, <int32_t>call.x.shape[0]
        d.x_stride_bytes = d.row_bytes if call.x.is_contiguous else call.x.strides[0]
        if call.scales is not None:
            d.scales, d.num_scales = call.scales.data, <int32_t>epcy_num_scales(self.shape.hidden)
        if call.topk_weights is not None:
            d.topk_weights = <float *>call.topk_weights.data
        if uncached:
            d.topk_idx, d.is_int64 = call.topk_idx.data, call.topk_idx.kind == KIND_INT64
            d.lane_ids_out = handle.lane_ids
        else:
            d.lane_ids, d.is_int64, d.cached = handle.lane_ids, 1, 1
        d.limit = <int32_t>min(handle.num_worst_tokens or self.shape.num_rows, 2**31 - 1)
        d.fill_to = <int32_t>handle.num_worst_tokens
        d.header = <int32_t>(self.header(OP_DISPATCH, call.x, handle, call.topk_weights is not None, not uncached)
                             | <uint32_t>(not uncached) << 7 | <uint32_t>area << 30
                             | (EPCY_HEADER_WAITS if waits else 0))
        d.num_peer_blocks, d.num_own_blocks = self.dispatch_peer_blocks, self.dispatch_own_blocks
        if handle.layout == "expert":
            d.num_own_blocks, d.num_copy_blocks = self.expert_own_blocks, self.expert_copy_blocks
        d.alignment = <int32_t>handle.expert_alignment
        if waits:
            d.peers.ticket = self.next_ticket()
        return self.lose_flags(&d.peers, "dispatch")

    def dispatch(self, DispatchCall call):
        cdef epcy_cuda_dispatch d
        cdef CudaHandle handle
        cdef Dispatch r
        cdef CudaEvent event
        cdef bint capturing = False, uncached = call.handle is None, waits = uncached and call.num_worst_tokens == 0
        cdef uintptr_t stream
        cdef int area, previous = 0, i
        cdef uint64_t *experts = <uint64_t *>(self.mapped.report + 1)
        check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
        try:
            self.reach("dispatch", "arrival")
            if uncached and self.faults is not None and self.faults.fails("dispatch"):
                self.refuse_memory(OP_DISPATCH, call.x.shape[0])
            stream = self.begin(call, &capturing)
            if self.counters is not None and not capturing:
                self.counters.enter(OP_DISPATCH)
            if waits and capturing:
                raise StateError(f"num_worst_tokens: a dispatch inside a graph capture cannot wait for its count (rank "
                                 f"{self.rank}); give num_worst_tokens, or handle=")
            handle = self.make_handle(call, stream) if uncached else call.handle
            area = self.take_area()
            if self.checks:
                self.poison(self.heap_layout.receive[area], self.shape.num_rows, stream)
            self.fill(&d, call, handle, area, waits)
            self.run_dispatch(&d, handle, stream)
            event = self.end(call, stream, capturing,
                             [call.x.owner, call.topk_idx, call.topk_weights, call.scales, handle])
            if self.meter is not None and self.meter.flows is not None and not capturing:
                self.counters.follow(OP_DISPATCH, handle.routing.chunk_count, EPCY_MAX_CHUNKS, handle, event)
            if waits:
                self.wait_report(d.peers.ticket, 0, self.num_ranks, handle.experts.size, "dispatch")
                handle.num_rows = <uint32_t>self.mapped.report.num_rows
                handle.own_base, handle.own_count = self.mapped.report.own_base, self.mapped.report.own_count
                handle.counts = [<uint32_t>experts[i] for i in range(handle.experts.size)]
            elif uncached:
                handle.num_rows = call.num_worst_tokens
            if uncached and not capturing:
                handle.event = event
            if call.out is None:
                return self.result(call, handle, area, handle.counts, event)
            with self.xp.cuda.Stream.from_external(Foreign(stream)):    # the copies come after the kernel
                r = self.result(call, handle, area, handle.counts, event)
            event.record(stream)
            if stream != call.stream and not call.async_finish:
                check(epcy_cuda_event_wait(event.event, <void *>call.stream), "cudaStreamWaitEvent")
            return r
        finally:
            epcy_cuda_set_device(previous, NULL)

    cdef int run_dispatch(self, epcy_cuda_dispatch *d, CudaHandle handle, uintptr_t stream) except -1:
        """Launch what does it."""
        if handle.layout == "expert":
            return check(epcy_cuda_launch_dispatch_expert(d, <void *>stream), "launching dispatch")
        return check(epcy_cuda_launch_dispatch(d, <void *>stream), "launching dispatch")

    # ---- combine --------------------------------------------------------------------------------------------

    def combine(self, CombineCall call):
        cdef epcy_cuda_combine c
        cdef CudaHandle handle = call.handle
        cdef Combine r
        cdef bint capturing = False, by_expert = handle.layout == "expert"
        cdef uintptr_t stream
        cdef int previous = 0
        cdef int64_t row_bytes = call.x.shape[1] * call.x.item_bytes()
        check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
        try:
            self.reach("combine", "arrival")
            stream = self.begin(call, &capturing)
            if self.counters is not None and not capturing:
                self.counters.enter(OP_COMBINE)
            memset(&c, 0, sizeof(c))
            self.stage(&c, call, stream)
            c.peers, c.pos, c.num_tokens = self.peers, handle.routing.pos, <int32_t>handle.num_tokens
            c.peers.operation = OP_COMBINE
            self.lose_flags(&c.peers, "combine")
            c.out, c.row_bytes, c.dtype = call.out.data, row_bytes, call.x.kind
            c.y_offset, c.weights_offset = call.x_offset, max(call.weights_offset, 0)
            if call.bias0 is not None:
                c.bias[0] = call.bias0.data
            if call.bias1 is not None:
                c.bias[1] = call.bias1.data
            if call.out_weights is not None:
                c.out_weights, c.lane_ids = <float *>call.out_weights.data, handle.lane_ids
            c.header = <int32_t>self.header(OP_COMBINE, call.x, handle, call.topk_weights is not None, True)
            if by_expert:
                self.place_sums(&c, call, stream)
            self.run_combine(&c, handle, stream)
            if call.consumed >= 0:
                self.taken[call.consumed] = False
            r = Combine.__new__(Combine)
            r.combined_x = call.out.owner
            if call.out_weights is not None:
                r.combined_topk_weights = call.out_weights.owner
            r.event = self.end(call, stream, capturing, [call.x.owner, call.topk_weights, call.bias0, call.bias1,
                                                         call.out,
                                                         call.out_weights, handle])
            if self.meter is not None and self.meter.flows is not None and not capturing:
                self.counters.follow(OP_COMBINE, handle.routing.recv_count, EPCY_MAX_CHUNKS, handle, r.event)
            return r
        finally:
            epcy_cuda_set_device(previous, NULL)

    cdef int run_combine(self, epcy_cuda_combine *c, CudaHandle handle, uintptr_t stream) except -1:
        """Launch what does it."""
        if handle.layout == "expert":
            return check(epcy_cuda_launch_combine_expert(c, self.combine_expert_blocks, <void *>stream),
                         "launching combine")
        return check(epcy_cuda_launch_combine(c, self.combine_blocks, <void *>stream), "launching combine")

    cdef int stage(self, epcy_cuda_combine *c, CombineCall call, uintptr_t stream) except -1:
        """Rank layout: copy x to where others can pull its rows, if it is not there; weights in both layouts."""
        cdef epcy_cuda_staging g
        cdef CudaHandle handle = call.handle
        cdef int64_t row_bytes = call.x.shape[1] * call.x.item_bytes(), stride, after
        cdef char *area = NULL
        if call.area >= 0:
            area = self.start + self.heap_layout.combine[call.area]
        if call.x_offset < 0 and handle.layout == "rank":
            call.x_offset = self.heap_layout.combine[call.area] + self.area.payload
            stride = row_bytes if call.x.is_contiguous else call.x.strides[0]
            if (<uintptr_t>call.x.data | <uintptr_t>stride) % 16:
                check(epcy_cuda_stage(area + self.area.payload, call.x.data, call.x.shape[0], row_bytes, stride,
                                      <void *>stream), "staging x")
            elif handle.own_count >= 0:         # other ranks' rows alone, by the copy engine
                c.own_rows, c.own_stride_bytes = call.x.data, stride
                after = handle.own_base + handle.own_count
                check(epcy_cuda_stage(area + self.area.payload, call.x.data, handle.own_base, row_bytes, stride,
                                      <void *>stream), "staging x")
                check(epcy_cuda_stage(area + self.area.payload + after * row_bytes, call.x.data + after * stride,
                                      call.x.shape[0] - after, row_bytes, stride, <void *>stream), "staging x")
            else:                               # the same where the host does not know which those are
                memset(&g, 0, sizeof(g))
                g.src, g.to, g.num_recv = call.x.data, area + self.area.payload, handle.routing.num_recv
                g.own_base = handle.routing.chunk_base + self.rank * EPCY_MAX_CHUNKS
                g.own_count = handle.routing.chunk_count + self.rank * EPCY_MAX_CHUNKS
                g.num_rows, g.row_bytes, g.stride_bytes = call.x.shape[0], row_bytes, stride
                check(epcy_cuda_launch_staging(&g, self.combine_blocks, <void *>stream), "staging x")
                c.own_rows, c.own_stride_bytes = call.x.data, stride
        if call.out_weights is not None and call.weights_offset < 0:
            call.weights_offset = self.heap_layout.combine[call.area] + self.area.topk_weights
            check(epcy_cuda_stage(area + self.area.topk_weights, call.topk_weights.data, call.topk_weights.shape[0],
                                  self.shape.num_topk * 4, self.shape.num_topk * 4, <void *>stream),
                  "staging weights")
        return 0

    def prepare_combine(self, CombineCall call):
        """In the expert layout x is read where it lies; sums go to a combine area, or over x if no other is free."""
        cdef int i
        cdef int64_t at
        if call.handle.layout == "rank":
            return Backend.prepare_combine(self, call)
        call.x_offset = call.weights_offset = call.area = call.consumed = -1
        self.check_out(call.out)
        for i in range(EPCY_NUM_AREAS):
            at = call.x.data - self.start - self.heap_layout.combine[i]
            if 0 <= at < self.area.bytes:
                call.consumed = i
            elif call.area < 0 and not self.taken[i]:
                call.area = i
        if call.area < 0:
            call.area, call.x_offset = call.consumed, self.offset_in_heap(call.x)
            if call.x_offset < 0:
                raise StateError(f"x: both combine areas are given out by combine_input, and x is neither of them "
                                 f"(rank {self.rank}); combine one of those first")

    cdef int place_sums(self, epcy_cuda_combine *c, CombineCall call, uintptr_t stream) except -1:
        """Expert layout: say where the rows are, and where their sums and weights go."""
        cdef CudaHandle handle = call.handle
        cdef int64_t area = self.heap_layout.combine[call.area]
        c.routing, c.lane_ids = handle.routing, handle.lane_ids
        c.x, c.x_stride_bytes = call.x.data, c.row_bytes if call.x.is_contiguous else call.x.strides[0]
        c.y_offset = call.x_offset if call.x_offset >= 0 else area + self.area.payload
        c.weights_offset = area + self.area.topk_weights
        if call.topk_weights is not None:
            c.topk_weights = <const float *>call.topk_weights.data
        if (<uintptr_t>c.x | <uintptr_t>c.x_stride_bytes) % 16:
            check(epcy_cuda_stage(self.start + c.y_offset, c.x, call.x.shape[0], c.row_bytes, c.x_stride_bytes,
                                  <void *>stream), "staging x")
            c.x, c.x_stride_bytes = self.start + c.y_offset, c.row_bytes
        return 0

    cdef int check_out(self, Array out) except -1:
        if <uintptr_t>out.data % 16:
            raise ArgumentError(f"out: expected memory that begins at a multiple of 16 bytes, got "
                                f"{<uintptr_t>out.data:#x} (rank {self.rank}); give a whole array from cupy.empty")
        return Backend.check_out(self, out)

    cdef int64_t offset_in_heap(self, Array array) noexcept:
        # Headers name places in steps of 128 bytes.
        cdef int64_t offset = Backend.offset_in_heap(self, array)
        return offset if offset % 128 == 0 else -1
