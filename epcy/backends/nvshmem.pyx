# cython: boundscheck=False, wraparound=False
# distutils: libraries = epcy_cuda
"""The NVSHMEM backend: CUDA kernels over symmetric memory, ordered by streams.

A call is one kernel, and one step of the epoch that kernels keep on the device. The host waits for a kernel only where
a dispatch must know how many rows come; everything else that goes wrong is reported to mapped host memory and raised by
check() or the next call that waits.
"""

import time

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

import numpy as np

from epcy.arrays cimport KIND_INT64, Array
from epcy.backends.base cimport Backend
from epcy.backends.call cimport Call, CombineCall, DispatchCall
from epcy.backends.cuda cimport *
from epcy.backends.cuda_low_latency cimport (
    EPCY_LOW_LATENCY_FP8, EPCY_LOW_LATENCY_LOGFMT, EPCY_LOW_LATENCY_ROUND_SCALE, EPCY_LOW_LATENCY_SOURCE,
    EPCY_LOW_LATENCY_UE8M0, EPCY_LOW_LATENCY_WEIGHTS, epcy_cuda_launch_reset, epcy_low_latency_wire_layout)
from epcy.backends.counters cimport Counters
from epcy.backends.symmetric cimport check
from epcy.event cimport Event
from epcy.handle cimport Combine, Dispatch, Handle
from epcy.layout cimport EPCY_NUM_AREAS, epcy_heap_layout, epcy_num_local_experts, epcy_num_scales

from epcy.backends import bootstrap, symmetric, verdicts
from epcy.backends.host_waits import bound_exit
from epcy.errors import (
    ArgumentError, BackendError, CapacityError, HeapError, NotSupportedError, PeerError,
    StateError)
from epcy.status import OPERATIONS

cdef enum:
    OP_DISPATCH = 1
    OP_COMBINE = 2
    OP_BARRIER = 3
    OP_FREE = 4

cdef int64_t SLICE_NS = 100_000_000     # how long a wait stays in C before it looks for Ctrl-C and dead ranks
# enum epcy_cuda_phase
PHASES = ("", "arrival", "counts", "starts", "data", "completion", "reset", "acknowledgement", "data")
OP_LOW_LATENCY = OPERATIONS.index("low_latency_dispatch")   # operations from here on have headers of their own

cdef void *spare_events[64]             # a process uses one GPU: any event fits anywhere
cdef int num_spare_events = 0


cdef class CudaEvent(Event):
    def __dealloc__(self):
        global num_spare_events
        if self.event != NULL and num_spare_events < 64:
            spare_events[num_spare_events] = self.event
            num_spare_events += 1
        elif self.event != NULL:
            epcy_cuda_event_free(self.event)

    cdef int record(self, uintptr_t stream) except -1:
        global num_spare_events
        if self.event == NULL and num_spare_events:
            num_spare_events -= 1
            self.event = spare_events[num_spare_events]
        elif self.event == NULL:
            check(epcy_cuda_event(&self.event), "cudaEventCreate")
        return check(epcy_cuda_event_record(self.event, <void *>stream), "cudaEventRecord")

    def current_stream_wait(self):
        import cupy
        check(epcy_cuda_event_wait(self.event, <void *><uintptr_t>cupy.cuda.get_current_stream().ptr),
              "cudaStreamWaitEvent")

    def query(self):
        cdef int done = 0
        check(epcy_cuda_event_query(self.event, &done), "cudaEventQuery")
        return done != 0

    def synchronize(self):
        while not self.query():
            PyErr_CheckSignals()
            time.sleep(2e-5)

    def __repr__(self):
        return "<epcy.Event on a CUDA stream>"


cdef class Mapped:
    def __cinit__(self, int64_t num_experts):
        cdef void *host = NULL
        cdef void *device = NULL
        check(epcy_cuda_mapped(sizeof(epcy_report) + num_experts * 8, &host, &device), "cudaHostAlloc")
        self.report, self.device_report = <epcy_report *>host, <epcy_report *>device

    def __dealloc__(self):
        if self.report != NULL:
            epcy_cuda_unmap(self.report)


cdef class CudaHandle(Handle):
    @property
    def num_recv_tokens(self):
        return self.num_recv[0]

    @property
    def overflow(self):
        return self.num_recv[0] > self.num_rows

    cpdef object expert_counts(self):
        return self.experts

    @property
    def expert_offsets(self):
        return self.offsets

    def check(self):
        if self.event is not None:
            self.event.synchronize()
        if self.error is None and self.num_worst_tokens:
            rows = int(self.num_recv[0])
            if rows > self.num_worst_tokens:
                raise verdicts.dropped(self.epoch, self.rank, rows, self.num_worst_tokens)
        if self.error is not None:
            raise self.error
        if self.backend is not None:        # which cannot tell of which call: check() of the Buffer shall know too
            error = self.backend.late_error()
            if error is not None:
                self.backend.deferred = error
                raise error

    def __repr__(self):
        return f"<epcy.Handle: {self.layout} layout, {self.num_tokens} tokens sent, on a GPU>"


cdef class NvshmemBackend(Backend):
    def __init__(self, comm, dict shape, dict options, list identities, object token):
        """Collective, blocking: start NVSHMEM if it is not running, and allocate on its heap."""
        import cupy

        super().__init__(comm, shape, options, identities, token, cupy)
        cdef int rank, previous = 0
        if self.num_ranks > EPCY_MAX_RANKS:
            raise NotSupportedError(f"comm: backend 'nvshmem' takes up to {EPCY_MAX_RANKS} ranks of one NVLink domain, "
                                    f"got {self.num_ranks}")
        options["device"] = self.device = symmetric.choose_device(options["device"], identities, self.rank)
        symmetric.start(comm, self.device, None, self.timeout)
        self.peers.control = epcy_control_layout(&self.shape)
        self.wire = epcy_low_latency_wire_layout(&self.shape, self.peers.control.bytes)
        words_bytes = self.peers.control.bytes + self.wire.bytes
        self.heap_layout = epcy_heap_layout(&self.shape, words_bytes)
        check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
        try:
            free_bytes = cupy.cuda.runtime.memGetInfo()[0]
            error = None
            if self.heap_layout.bytes > free_bytes:
                error = HeapError(f"num_max_tokens_per_rank: the Buffer needs {self.heap_layout.bytes} bytes, GPU "
                                  f"{self.device} has {free_bytes} free; give fewer num_max_tokens_per_rank or "
                                  "num_max_recv_tokens")
            bootstrap.exchange(comm, None, error, self.timeout, "Buffer()")
            self.memory = symmetric.allocate(comm, self.heap_layout.bytes, self.timeout)
            unreachable = [r for r in range(self.num_ranks) if not self.memory.bases[r]]
            if unreachable:
                raise NotSupportedError(f"comm: rank {self.rank} cannot reach the memory of ranks {unreachable} by "
                                        "NVLink or PCIe; this build moves tokens inside one NVLink domain")
            for rank in range(self.num_ranks):
                self.peers.base[rank] = <char *><uintptr_t>self.memory.bases[rank]
            self.start = self.peers.base[self.rank]
            check(epcy_cuda_zero(self.start, words_bytes), "cudaMemset")
            self.mapped = Mapped(epcy_num_local_experts(&self.shape))
            self.peers.shape, self.peers.area, self.peers.heap = self.shape, self.area, self.heap_layout
            self.peers.rank, self.peers.report = self.rank, self.mapped.device_report
            self.peers.timeout_ns = <int64_t>(self.timeout * 1e9)
            self.peers.num_local = <int32_t>epcy_num_local_experts(&self.shape)
            check(epcy_cuda_stream(<void **>&self.own_stream), "cudaStreamCreate")
            check(epcy_cuda_load(), "loading kernels")
            if self.meter is not None:
                self.counters = Counters()
                self.counters.open(self.meter, self.start + self.peers.control.counters, self.device,
                                   epcy_num_local_experts(&self.shape))
            self.num_multiprocessors = cupy.cuda.Device(self.device).attributes["MultiProcessorCount"]
            self.choose_blocks(options["num_sms"])
            options["num_sms"] = max(options["num_sms"] or self.combine_blocks, self.dispatch_peer_blocks * (
                self.num_ranks - 1) + self.dispatch_own_blocks)
            self.pool, self.alive, self.captured = cupy.cuda.MemoryPool(), [], []
            self.open_areas(self.memory)
            error = self.counters.open_page(options["status_dir"]) if self.counters is not None else None
            bootstrap.exchange(comm, None, error, self.timeout, "Buffer()")  # every control region is zero now
        finally:
            epcy_cuda_set_device(previous, NULL)

    def choose_blocks(self, num_sms):
        """Blocks for each destination. About 8 fill the link out of a rank, and more fill it less well; a rank's own
        rows need as many as a peer's. In the expert layout a rank also copies rows, or sums them, in its own memory."""
        others = self.num_ranks - 1
        each = -(-8 // max(1, others))
        most = self.num_multiprocessors     # all blocks run at once
        if num_sms:
            num_sms = min(num_sms, most)
            each = max(1, min(each, num_sms // self.num_ranks))
        self.dispatch_peer_blocks = self.dispatch_own_blocks = each
        rest = (num_sms or min(104, most)) - each * others
        self.expert_own_blocks = max(1, min(EPCY_MAX_CHUNKS, rest // 3))
        self.expert_copy_blocks = max(0, rest - self.expert_own_blocks)
        self.combine_blocks = num_sms or min(24, most)
        self.combine_expert_blocks = num_sms or min(128, most)

    def use_sms(self, num_sms):
        """Let calls use so many blocks from now on, or (None) the usual ones; handles made before know theirs."""
        self.choose_blocks(num_sms)

    def num_blocks(self, str op, str layout):
        """How many blocks, each with a multiprocessor of its own, a "dispatch" or "combine" takes."""
        by_expert = layout == "expert"
        if op == "combine":
            return self.combine_expert_blocks if by_expert else self.combine_blocks
        own = self.expert_own_blocks + self.expert_copy_blocks if by_expert else self.dispatch_own_blocks
        return self.dispatch_peer_blocks * (self.num_ranks - 1) + own

    cdef object view(self, int64_t offset, tuple shape, dtype, owner):
        cupy = self.xp
        nbytes = int(np.prod(shape)) * dtype.itemsize
        memory = cupy.cuda.UnownedMemory(<uintptr_t>(self.start + offset), nbytes, owner, self.device)
        return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))

    def peer_address(self, int rank):
        """Where a rank's memory starts, as this GPU reaches it."""
        return <uintptr_t>self.peers.base[rank]

    # ---- streams --------------------------------------------------------------------------------------------

    cdef uintptr_t begin(self, Call call, bint *capturing) except? 0:
        """Choose the stream of a call, and make it wait for what the call must come after."""
        cdef int yes = 0
        cdef uintptr_t stream = call.stream
        cdef CudaEvent fork
        if self.mapped.report.expired:
            raise self.late_error()
        self.num_calls += 1
        check(epcy_cuda_is_capturing(<void *>stream, &yes), "cudaStreamIsCapturing")
        capturing[0] = yes
        if call.async_finish or call.previous_event is not None:
            stream = self.own_stream
            fork = call.previous_event if isinstance(call.previous_event, CudaEvent) else None
            if fork is None:
                fork = CudaEvent.__new__(CudaEvent)
                fork.record(call.stream)
            check(epcy_cuda_event_wait(fork.event, <void *>stream), "cudaStreamWaitEvent")
        if not yes and self.last is not None and self.last_stream != stream:
            check(epcy_cuda_event_wait(self.last.event, <void *>stream), "cudaStreamWaitEvent")
        return stream

    cdef CudaEvent end(self, Call call, uintptr_t stream, bint capturing, list keeps):
        """Mark the end of a call, and keep its arrays until the stream has passed it."""
        cdef CudaEvent event = CudaEvent.__new__(CudaEvent)
        event.record(stream)
        if stream != call.stream and not call.async_finish:
            check(epcy_cuda_event_wait(event.event, <void *>call.stream), "cudaStreamWaitEvent")
        if capturing:
            self.captured.append(keeps)     # a graph may replay for as long as the Buffer lives
            return event
        event.keeps = keeps
        self.last, self.last_stream = event, stream
        if self.counters is not None:
            self.counters.leave()
        self.alive.append(event)
        if len(self.alive) % 4 == 0:        # to ask after an event takes longer than to keep one
            while self.alive and (<CudaEvent>self.alive[0]).query():
                (<CudaEvent>self.alive.pop(0)).keeps = None
        return event

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
        return 0

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
            stream = self.begin(call, &capturing)
            if self.counters is not None and not capturing:
                self.counters.enter(OP_DISPATCH)
            if waits and capturing:
                raise StateError(f"num_worst_tokens: a dispatch inside a graph capture cannot wait for its count (rank "
                                 f"{self.rank}); give num_worst_tokens, or handle=")
            handle = self.make_handle(call, stream) if uncached else call.handle
            area = self.take_area()
            self.fill(&d, call, handle, area, waits)
            if handle.layout == "expert":
                check(epcy_cuda_launch_dispatch_expert(&d, <void *>stream), "launching dispatch")
            else:
                check(epcy_cuda_launch_dispatch(&d, <void *>stream), "launching dispatch")
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

    # ---- combine --------------------------------------------------------------------------------------------

    def combine(self, CombineCall call):
        cdef epcy_cuda_combine c
        cdef epcy_cuda_staging g
        cdef CudaHandle handle = call.handle
        cdef Combine r
        cdef bint capturing = False, by_expert = handle.layout == "expert"
        cdef uintptr_t stream
        cdef int previous = 0
        cdef int64_t row_bytes = call.x.shape[1] * call.x.item_bytes(), stride, after
        cdef char *area = NULL
        check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
        try:
            self.reach("combine", "arrival")
            stream = self.begin(call, &capturing)
            if self.counters is not None and not capturing:
                self.counters.enter(OP_COMBINE)
            if call.area >= 0:
                area = self.start + self.heap_layout.combine[call.area]
            memset(&c, 0, sizeof(c))
            if call.x_offset < 0 and not by_expert:
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
            c.peers, c.pos, c.num_tokens = self.peers, handle.routing.pos, <int32_t>handle.num_tokens
            c.peers.operation = OP_COMBINE
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
                check(epcy_cuda_launch_combine_expert(&c, self.combine_expert_blocks, <void *>stream),
                      "launching combine")
            else:
                check(epcy_cuda_launch_combine(&c, self.combine_blocks, <void *>stream), "launching combine")
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

    # ---- calls that move nothing ----------------------------------------------------------------------------

    def next_ticket(self):
        self.num_tickets = (self.num_tickets + 1) & 0xFFFFFFFF or 1
        return self.num_tickets

    def step(self, uint32_t header, bytes text, uint32_t ticket):
        """Launch a call that moves nothing, behind all others, on the Buffer's own stream."""
        self.launch_step(header, text, ticket, self.own_stream)

    def align(self, uintptr_t stream):
        """Launch a barrier of all ranks on a stream; the host does not wait."""
        self.launch_step(OP_BARRIER, None, 0, stream)

    cdef int launch_step(self, uint32_t header, bytes text, uint32_t ticket, uintptr_t stream) except -1:
        cdef epcy_peers peers = self.peers
        cdef int previous = 0
        cdef const char *c_text = NULL
        cdef CudaEvent event = CudaEvent.__new__(CudaEvent)
        self.num_calls += 1
        if text is not None:
            c_text = text
        check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
        try:
            if self.last is not None and self.last_stream != stream:
                check(epcy_cuda_event_wait(self.last.event, <void *>stream), "cudaStreamWaitEvent")
            peers.ticket, peers.operation = ticket, header & 7
            check(epcy_cuda_launch_step(&peers, header, c_text, <void *>stream), "launching a step")
            event.record(stream)
            self.last, self.last_stream = event, stream
        finally:
            epcy_cuda_set_device(previous, NULL)
        return 0

    def refuse(self, int op, str text):
        """Take part in a call without data, so that the others learn why and stay in step."""
        raw = f"rank {self.rank} refused {OPERATIONS[op]}: {text}".encode()[:EPCY_CUDA_TEXT_BYTES - 1]
        self.step(<uint32_t>op | EPCY_HEADER_REFUSED, raw, 0)

    def barrier(self, int op=OP_BARRIER):
        """Wait for every rank to come here."""
        self.reach(OPERATIONS[op], "arrival")
        ticket = self.next_ticket()
        self.step(op, None, ticket)
        self.wait_report(ticket, self.rank, 1, 0, OPERATIONS[op])

    # ---- waiting on the host, and what can go wrong -----------------------------------------------------------

    cdef int wait_report(self, uint32_t ticket, int first_rank, int num_ranks, int64_t num_experts, str op) except -1:
        """Wait until the kernel has reported what its ticket asks for, or raise."""
        cdef int done = 0
        cdef double start = time.monotonic()
        while True:
            with nogil:
                epcy_cuda_poll(self.mapped.report, ticket, first_rank, num_ranks, num_experts, SLICE_NS, &done)
            if done:
                break
            try:
                PyErr_CheckSignals()
            except BaseException:
                self.break_off()
                raise
            dead = self.dead(range(self.num_ranks))
            if dead:
                self.break_off()
                bound_exit()
                raise verdicts.ended(op, self.num_calls, self.rank, dead, self.identities[dead[0]].pid, "arrival")
            if time.monotonic() - start > 2 * self.timeout + 10:
                self.break_off()
                raise BackendError(f"{op} on rank {self.rank}: the kernel neither ended nor gave up within "
                                   f"{time.monotonic() - start:.1f} s; see cuda-gdb or compute-sanitizer", "CUDA", 0)
        outcomes = [<uint32_t>self.mapped.report.verdict[first_rank + r] for r in range(num_ranks)]
        if max(outcomes) != EPCY_VERDICT_OK:
            self.fail(op, outcomes)

    def break_off(self):
        """Make the kernels that wait give up."""
        cdef uint32_t one = 1
        cdef epcy_local *local = NULL
        self.broken = True
        epcy_cuda_put(self.start + self.peers.control.local + <int64_t>&local.broken, &one, 4)
        self.tell_gone()

    cdef int tell_gone(self) noexcept:
        """Tell the other ranks' kernels that they need not wait for this one."""
        cdef uint32_t one = 1
        cdef int rank
        for rank in range(self.num_ranks):
            epcy_cuda_put(self.peers.base[rank] + self.peers.control.left + 4 * self.rank, &one, 4)
        return 0

    cdef int settle(self, str op) except -1:
        """Wait until nothing of this Buffer runs; every kernel ends by itself within the timeout."""
        cdef double limit = time.monotonic() + 2 * self.timeout + 10
        while self.last is not None and not self.last.query():
            PyErr_CheckSignals()
            if time.monotonic() > limit:
                raise BackendError(f"{op} on rank {self.rank}: a kernel of this Buffer does not end", "CUDA", 0)
            time.sleep(2e-5)
        return 0

    def fetch(self, int64_t offset, int64_t count, dtype):
        """Read words of this rank's control region."""
        out = np.empty(count, dtype)
        cdef uint8_t[::1] raw = out.view(np.uint8)
        check(epcy_cuda_fetch(&raw[0], self.start + offset, raw.shape[0]), "cudaMemcpy")
        return out

    def fail(self, op, outcomes):
        """Raise what made a call fail for which the host waited."""
        cdef int64_t R = self.num_ranks, C = EPCY_MAX_CHUNKS
        verdict = max(outcomes)
        if verdict == EPCY_VERDICT_BROKEN:
            limit = time.monotonic() + 0.2      # one block tells that it gave up, another one why
            while not self.mapped.report.expired and time.monotonic() < limit:
                time.sleep(1e-4)
            raise self.late_error() or StateError(f"{op}: an earlier call on this Buffer did not end (rank "
                                                  f"{self.rank}); call reset() on all ranks first")
        self.settle(op)
        epoch = int(self.fetch(self.peers.control.local, 1, np.uint32)[0])
        half = epoch & 1
        headers = self.fetch(self.peers.control.headers + half * R * EPCY_NUM_HEADERS * 8, R * EPCY_NUM_HEADERS,
                             np.uint64)
        headers = (headers & np.uint64(0xFFFFFFFF)).astype(np.int64).reshape(R, EPCY_NUM_HEADERS)
        if verdict == EPCY_VERDICT_REFUSED:
            rank = int(np.nonzero(headers[:, 0] & EPCY_HEADER_REFUSED)[0][0])
            text = self.fetch(self.peers.control.text + (half * R + rank) * EPCY_CUDA_TEXT_BYTES,
                              EPCY_CUDA_TEXT_BYTES, np.uint8)
            raise PeerError(text.tobytes().partition(b"\0")[0].decode(errors="replace"), [rank])
        if verdict == EPCY_VERDICT_MISMATCH:
            raise verdicts.mismatch(epoch, records(headers[:, 0].tolist()))
        counts = self.fetch(self.peers.control.counts + half * R * C * R * 8, R * C * R, np.uint64)
        counts = (counts & np.uint64(0xFFFFFFFF)).astype(np.int64).reshape(R, C, R)
        if verdict == EPCY_VERDICT_BAD_ID:
            places = np.argwhere(counts[:, :, 0] & EPCY_COUNT_BAD).tolist()
            rank, chunk = next((place for place in places if place[0] == self.rank), places[0])
            slot = self.fetch(self.peers.control.bad + ((half * R + rank) * C + chunk) * 32, 3, np.int64).tolist()
            error = verdicts.bad_id(rank, *slot, self.shape.num_experts)
            raise error if rank == self.rank else PeerError(f"rank {rank} refused {op} (call {epoch}): {error}", [rank])
        rank = outcomes.index(EPCY_VERDICT_OVERFLOW)
        rows, limit = int((counts[:, :, rank] & 0x7FFFFFFF).sum()), int(headers[rank, 1])
        if headers[rank, 0] >> 6 & 1:       # expert layout: rows are not tokens
            at = self.peers.control.marks + ((half * R + rank) * EPCY_NUM_MARKS + EPCY_MARK_ROWS) * 8
            rows = int(self.fetch(at, 1, np.uint64)[0]) & 0xFFFFFFFF
        text = verdicts.no_room_for_rows(epoch, rank, rows, limit)
        raise CapacityError(text) if rank == self.rank else PeerError(text, [rank])

    cdef object reported(self):
        """What a kernel reported for which the host did not wait; or None."""
        cdef epcy_report *r = self.mapped.report
        cdef uint32_t *headers
        cdef int i
        cdef int first = -1
        for i in range(EPCY_MAX_CHUNKS):
            if r.bad[i].epoch and (first < 0 or (r.bad[i].epoch, r.bad[i].token) < (
                    r.bad[first].epoch, r.bad[first].token)):
                first = i
        error = None
        if r.expired:
            self.broken = True
            error = self.late_ranks()
        elif r.late_verdict == EPCY_VERDICT_REFUSED:
            error = PeerError((<bytes>r.late_text).decode(errors="replace"), [r.late_rank])
        elif r.late_verdict == EPCY_VERDICT_MISMATCH:
            headers = <uint32_t *>&r.late_text[0]
            found = [headers[i] for i in range(self.num_ranks)]
            if max([h & 7 for h in found]) >= OP_LOW_LATENCY:
                error = verdicts.low_latency_mismatch(headers[self.num_ranks], low_latency_records(found))
            else:
                error = verdicts.mismatch(headers[self.num_ranks], records(found))
        elif r.late_verdict == EPCY_VERDICT_OVERFLOW:
            error = PeerError(verdicts.no_room_for_rows(self.num_calls, r.late_rank, r.late_rows, r.late_limit),
                              [r.late_rank])
        elif first >= 0:
            error = verdicts.bad_id(self.rank, r.bad[first].token, r.bad[first].lane, r.bad[first].value,
                                    self.shape.num_experts)
        elif r.late_rows:
            error = verdicts.dropped(self.num_calls, self.rank, r.late_rows, r.late_limit)
        return error

    cdef object late_error(self):
        """The same, once."""
        cdef epcy_report *r = self.mapped.report
        cdef int i
        error = self.reported()
        if error is not None:
            self.last_error = error
        for i in range(EPCY_MAX_CHUNKS):
            r.bad[i].epoch = 0
        r.expired = r.late_verdict = 0
        r.late_rows = 0
        return error

    cdef object late_ranks(self):
        """The error of a wait that expired: who had not come, as far as this rank's words tell."""
        cdef epcy_report *r = self.mapped.report
        cdef int64_t R = self.num_ranks
        phase, culprits, seen, words = PHASES[r.phase], [r.peer], [r.seen >> 32], None
        expected = r.expected >> 32
        if phase == "arrival" and r.operation < OP_LOW_LATENCY:
            at = self.peers.control.headers + (r.epoch & 1) * R * EPCY_NUM_HEADERS * 8
            words = self.fetch(at, R * EPCY_NUM_HEADERS, np.uint64)[::EPCY_NUM_HEADERS]
        elif phase == "reset":
            words = self.fetch(self.peers.control.resets, R, np.uint64)
        if words is not None:
            words = (words >> np.uint64(32)).tolist()
            missing = [rank for rank in range(R) if words[rank] != expected]
            if missing:
                culprits, seen = missing, [words[rank] for rank in missing]
        operation = "reset" if phase == "reset" else OPERATIONS[r.operation]
        where = ", ".join([f"rank {rank} (pid {self.identities[rank].pid}) was last seen in call {epoch}"
                           for rank, epoch in zip(culprits[:4], seen)])
        gone = [r.peer] if r.gone else []
        return verdicts.late(operation, r.epoch, self.rank, gone or culprits, phase, expected, seen, where, gone,
                             0.0 if r.gone else self.timeout, self.timeout)

    def take_deferred(self):
        error, self.deferred = self.deferred, None
        return error if error is not None else self.late_error()

    def capture(self):
        cdef CudaEvent event = CudaEvent.__new__(CudaEvent)
        event.record(self.xp.cuda.get_current_stream().ptr)
        return event

    def wait_all(self):
        """Let everything of this Buffer come to its end."""
        self.settle("check")

    # ---- life -----------------------------------------------------------------------------------------------

    cdef void set_timeout(self, double seconds) noexcept:
        self.timeout = seconds
        self.peers.timeout_ns = <int64_t>(seconds * 1e9)

    def reset(self):
        """Bring every rank to one epoch again, by a kernel of two rounds.

        After a timeout the next reset() goes on with the same rounds, and then takes part in those that others have
        begun since.
        """
        cdef bint again = self.reset_is_open
        cdef int previous = 0
        check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
        try:
            self.tell_gone()
            self.settle("reset")
            self.late_error()
            self.one_reset()
            while again:
                rounds = self.fetch(self.peers.control.resets, self.num_ranks, np.uint64) >> np.uint64(32)
                if rounds.max() <= self.num_resets:
                    break
                self.one_reset()
            self.forget_areas()
        finally:
            epcy_cuda_set_device(previous, NULL)

    def one_reset(self):
        cdef epcy_peers peers = self.peers
        if not self.reset_is_open:
            self.reach("reset", "arrival")
            self.num_resets += 1
        self.reset_is_open = self.broken = True
        peers.ticket = self.next_ticket()
        check(epcy_cuda_launch_reset(&peers, &self.wire, self.num_resets, <void *>self.own_stream), "launching reset")
        self.wait_report(peers.ticket, self.rank, 1, 0, "reset")
        self.reset_is_open = self.broken = False
        # The same on every rank, whatever calls each had tried: handles are compared by the number of their call.
        self.num_calls = int(self.fetch(self.peers.control.local, 1, np.uint32)[0])

    def close(self, bint together):
        """Give the memory back; `together` is collective."""
        from mpi4py import MPI

        cdef int previous = 0
        check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
        try:
            agreed = False
            try:
                if together:
                    self.barrier(OP_FREE)
                    agreed = True
            finally:
                if self.counters is not None:
                    self.counters.close()
                if not agreed:
                    self.tell_gone()
                self.close_areas()
                self.alive, self.captured = [], []
            if agreed and not MPI.Is_finalized():
                self.settle("free")
                self.memory.free()
                epcy_cuda_stream_free(<void *>self.own_stream)
                self.comm.Free()
        finally:
            epcy_cuda_set_device(previous, NULL)


class Foreign:
    """A stream's address, as CuPy takes it."""

    def __init__(self, address):
        self.address = address

    def __cuda_stream__(self):
        return 0, self.address


def records(headers):
    """Take headers apart: operation, dtype, layout, cached, has weights, alignment, routing of each rank."""
    return [(h & 7, h >> 3 & 7, h >> 6 & 1, h >> 7 & 1, h >> 8 & 1, h >> 9 & 1023, h >> 19 & 511) for h in headers]


def low_latency_records(headers):
    """Take those of low-latency calls apart: operation, dtype, the options, has weights, routing."""
    bits = (EPCY_LOW_LATENCY_FP8, EPCY_LOW_LATENCY_ROUND_SCALE, EPCY_LOW_LATENCY_UE8M0, EPCY_LOW_LATENCY_SOURCE,
            EPCY_LOW_LATENCY_LOGFMT, EPCY_LOW_LATENCY_WEIGHTS)
    return [(h & 7, h >> 3 & 7, *[int(h & bit != 0) for bit in bits], h >> 19 & 511) for h in headers]
