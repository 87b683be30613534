# cython: boundscheck=False, wraparound=False, cdivision=True
# distutils: libraries = epcy_cuda
"""The NVSHMEM backend's low-latency calls: one kernel each, or two where a hook receives. Nothing waits on the host."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from epcy.arrays cimport KIND_INT64, Array, copied
from epcy.backends.call cimport Call, LowLatencyCombineCall, LowLatencyDispatchCall
from epcy.backends.cuda cimport (
    EPCY_CUDA_TEXT_BYTES, epcy_counters, epcy_cuda_launch_mask,
    epcy_cuda_set_device, epcy_peers)
from epcy.backends.cuda_low_latency cimport *
from epcy.backends.low_latency cimport LOW_LATENCY_COMBINE, LOW_LATENCY_DISPATCH
from epcy.backends.cuda_event cimport CudaEvent
from epcy.backends.cuda_low_latency_handle cimport Block, Blocks, CudaLowLatencyHandle
from epcy.backends.nvshmem cimport NvshmemBackend
from epcy.backends.stores cimport Stores
from epcy.backends.symmetric cimport check
from epcy.handle cimport LowLatencyHandle
from epcy.layout cimport (
    epcy_low_latency_area_layout, epcy_num_local_experts)

import numpy as np

from epcy.backends import bootstrap, cuda_sizes
from epcy.backends.cuda_event import Foreign
from epcy.errors import BackendUnavailableError, NotSupportedError, StateError
from epcy.status import OPERATIONS

cdef uint32_t OP_DISPATCH = OPERATIONS.index("low_latency_dispatch")
cdef uint32_t OP_COMBINE = OPERATIONS.index("low_latency_combine")
cdef enum:
    SCALES_OF_PART = EPCY_PART_LINES * EPCY_LINE_DATA // 128


cdef class LowLatencyNvshmemBackend(NvshmemBackend):
    def __init__(self, comm, dict shape, dict options, list identities, object token):
        cdef epcy_low_latency_handle nowhere
        cdef int previous = 0, blocks = 0
        if shape["num_low_latency_tokens"]:
            self.refuse_sizes(shape)
        super().__init__(comm, shape, options, identities, token)
        if not self.shape.num_low_latency_tokens:
            return
        try:
            self.choose_carrier(options)
            self.low_latency_area = epcy_low_latency_area_layout(&self.shape)
            memset(&self.dispatch_params, 0, sizeof(self.dispatch_params))
            memset(&self.combine_params, 0, sizeof(self.combine_params))
            for call in range(2):
                self.fill_constants(call)
            check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
            try:
                check(epcy_cuda_low_latency_dispatch_blocks(&self.shape, &blocks), "loading kernels")
                self.dispatch_params.call.max_blocks = blocks
                check(epcy_cuda_low_latency_combine_blocks(&self.shape, &blocks), "loading kernels")
                self.combine_params.call.max_blocks = blocks
                self.blocks = Blocks(self.pool, epcy_low_latency_handle_layout(&self.shape, NULL, &nowhere))
            finally:
                if previous != self.device:
                    epcy_cuda_set_device(previous, NULL)
            bootstrap.exchange(self.comm, None, None, self.timeout, "Buffer()")
        except BaseException as error:
            self.failed(comm, error, options["timeout"])

    def num_far_ranks(self, options):
        return cuda_sizes.num_far_ranks(options, self.num_ranks)

    def choose_carrier(self, dict options):
        """Local: how calls reach other ranks, and what that needs."""
        cdef Stores carrier
        cdef uint32_t far = cuda_sizes.far_ranks(options, self.num_ranks, self.rank)
        cdef bint allowed = options["allow_nvlink_for_low_latency_mode"], by_stores
        cdef int previous = 0
        by_stores = allowed and cuda_sizes.ranks_by_stores(options, self.num_ranks) == self.num_ranks
        check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
        try:
            if by_stores:
                carrier = Stores()
            else:
                from epcy.backends.puts import Puts
                carrier = Puts()
                carrier.open(&self.put_wire, far, self.memory, self.device)
            self.carrier = carrier
        except ImportError as missing:
            raise BackendUnavailableError("allow_nvlink_for_low_latency_mode: False, and more ranks than "
                                          "num_max_nvl_peers, need epcy/libepcy_put.so, which cannot be loaded "
                                          f"({missing}); leave both at their defaults") from None
        finally:
            epcy_cuda_set_device(previous, NULL)
        self.low_latency_transport = self.carrier.name
        if allowed and not by_stores:
            self.low_latency_transport = f"NVLink, between nodes {self.carrier.name}"

    def refuse_sizes(self, dict shape):
        """What this build cannot do; the same on every rank."""
        num_local = shape["num_experts"] // shape["num_ranks"]
        tokens, rows = shape["num_low_latency_tokens"], shape["num_experts"] * shape["num_low_latency_tokens"]
        if num_local > EPCY_LOW_LATENCY_MAX_LOCAL or tokens > EPCY_LOW_LATENCY_MAX_TOKENS or rows >= 2**30:
            raise NotSupportedError(
                f"num_max_low_latency_tokens_per_rank: the low-latency mode on GPUs takes up to "
                f"{EPCY_LOW_LATENCY_MAX_LOCAL} local experts, {EPCY_LOW_LATENCY_MAX_TOKENS} tokens a rank and 2^30 "
                f"rows in an area, got {num_local} experts, {tokens} tokens and {rows} rows")

    def fill_constants(self, int kind):
        cdef epcy_low_latency_call *c = &self.dispatch_params.call
        if kind == LOW_LATENCY_COMBINE:
            c = &self.combine_params.call
        c.peers, c.wire = self.peers, self.wire
        self.headers_at = self.wire.headers
        c.peers.operation = OP_DISPATCH + <uint32_t>kind
        self.carrier.prepare(&c.peers)
        epcy_low_latency_constants(c)

    # ---- steps ----------------------------------------------------------------------------------------------

    cdef int may_step(self, int kind) except -1:
        """Keep two steps, and no more, between the oldest unreceived call and the newest: refused calls take steps."""
        if self.pending[kind][0] and self.steps[kind] + 1 - self.pending[kind][0] > 1:
            raise StateError(f"{OPERATIONS[OP_DISPATCH + kind]}: a call was refused since the oldest unreceived one "
                             f"was sent (rank {self.rank}), more have no room; call its hook first")
        return 0

    cdef uint64_t step_of(self, int kind, bint return_recv_hook) noexcept:
        self.steps[kind] += 1
        if return_recv_hook:
            self.pending[kind][self.pending[kind][0] != 0] = self.steps[kind]
        return self.steps[kind]

    cdef int received_oldest(self, int kind) except -1:
        self.pending[kind][0], self.pending[kind][1] = self.pending[kind][1], 0
        return self.low_latency.has_received(kind)

    cdef Call on_current_stream(self):
        """The order of a hook: on the stream that is current when it is called."""
        cdef Call call = Call.__new__(Call)
        call.stream = self.xp.cuda.get_current_stream().ptr
        return call

    def aligned(self, Call call, Array array):
        """A copy that 16-byte loads can read, made on the call's stream."""
        if call.stream == <uintptr_t>self.xp.cuda.get_current_stream().ptr:
            return copied(array)
        with self.xp.cuda.Stream.from_external(Foreign(call.stream)):
            return copied(array)

    cdef int follow(self, int op, const int32_t *flows, object handle, object event) except -1:
        """Where a trace is taken, keep where a call's lanes go."""
        if self.meter is not None and self.meter.flows is not None:
            self.counters.follow(op, flows, 1, handle, event)
        return 0

    # ---- dispatch -------------------------------------------------------------------------------------------

    cdef Block take_block(self, LowLatencyDispatchCall call):
        """Memory of a handle; without it the call is refused."""
        if self.faults is not None and self.faults.fails("low_latency_dispatch"):
            self.refuse_memory(OP_DISPATCH, call.x.shape[0])
        try:
            return self.blocks.take()
        except self.xp.cuda.memory.OutOfMemoryError:
            self.refuse_memory(OP_DISPATCH, call.x.shape[0])

    cdef CudaLowLatencyHandle make_low_latency_handle(self, LowLatencyDispatchCall call, Block block):
        cdef CudaLowLatencyHandle h = CudaLowLatencyHandle.__new__(CudaLowLatencyHandle)
        h.block, h.num_local = block, epcy_num_local_experts(&self.shape)
        epcy_low_latency_handle_layout(&self.shape, <char *>h.block.at, &h.arrays)
        h.buffer_token, h.layout, h.num_tokens = self.token, "low_latency", call.x.shape[0]
        h.num_rows, h.expert_alignment, h.backend = self.low_latency.num_rows, 1, self
        h.number, h.epoch = self.low_latency.sent(LOW_LATENCY_DISPATCH), self.steps[LOW_LATENCY_DISPATCH]
        h.area = self.low_latency.take_area()
        return h

    cdef int launch_dispatch(self, LowLatencyDispatchCall call, CudaLowLatencyHandle handle, int phases,
                             uintptr_t stream) except -1:
        cdef epcy_low_latency_dispatch *d = &self.dispatch_params
        cdef int64_t item_bytes = call.x.item_bytes(), hidden = self.shape.hidden
        cdef char *area = self.start + self.heap_layout.low_latency_x[handle.area]
        cdef uint32_t header = OP_DISPATCH | <uint32_t>call.x.kind << 3
        if call.use_fp8:
            header |= EPCY_LOW_LATENCY_FP8
            if call.round_scale:
                header |= EPCY_LOW_LATENCY_ROUND_SCALE
            if call.use_ue8m0:
                header |= EPCY_LOW_LATENCY_UE8M0
        if call.topk_weights is not None:
            header |= EPCY_LOW_LATENCY_WEIGHTS
        d.call.dtype, d.call.phases, d.call.peers.timeout_ns = call.x.kind, phases, self.peers.timeout_ns
        epcy_low_latency_rows(&d.call, hidden if call.use_fp8 else hidden * item_bytes)
        d.call.handle, d.call.sent, d.call.header = handle.arrays, handle.arrays.sent, header
        d.call.num_tokens = <int32_t>handle.num_tokens
        d.x, d.x_stride_bytes = call.x.data, hidden * item_bytes if call.x.is_contiguous else call.x.strides[0]
        d.topk_idx, d.is_int64 = call.topk_idx.data, call.topk_idx.kind == KIND_INT64
        d.topk_weights = NULL
        if call.topk_weights is not None:
            d.topk_weights = <const float *>call.topk_weights.data
        d.recv_x, d.recv_count = area + self.low_latency_area.payload, <int64_t *>(area + self.low_latency_area.counts)
        d.recv_scales, d.num_scales, d.part_scales = NULL, 0, 0
        if call.use_fp8:
            d.recv_scales = <uint32_t *>(area + self.low_latency_area.scales)
            d.num_scales = <int32_t>(hidden // (512 if call.use_ue8m0 else 128))
            d.part_scales = SCALES_OF_PART // 4 if call.use_ue8m0 else SCALES_OF_PART
        d.area, d.stats, d.stats_is_int64 = handle.area, NULL, 0
        if call.stats is not None:
            d.stats, d.stats_is_int64 = call.stats.data, call.stats.kind == KIND_INT64
        d.call.wire.headers = self.header_words("low_latency_dispatch", phases)
        return self.carrier.dispatch(d, stream)

    cdef tuple low_latency_dispatch(self, LowLatencyDispatchCall call):
        cdef CudaLowLatencyHandle handle
        cdef CudaEvent event
        cdef Block block
        cdef bint capturing = False, hook = call.return_recv_hook
        cdef uintptr_t stream
        cdef int previous = 0
        self.may_step(LOW_LATENCY_DISPATCH)
        self.reach("low_latency_dispatch", "arrival")
        check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
        try:
            if (<uintptr_t>call.x.data | <uintptr_t>call.x.strides[0]) % 16 and call.x.shape[0]:
                call.x = self.aligned(call, call.x)
            block = self.take_block(call)
            stream = self.begin(call, &capturing)
            if self.counters is not None and not capturing:
                self.counters.enter(OP_DISPATCH)
            self.step_of(LOW_LATENCY_DISPATCH, hook)
            handle = self.make_low_latency_handle(call, block)
            if self.checks and not hook:
                self.poison(self.heap_layout.low_latency_x[handle.area], self.low_latency.num_rows, stream)
            self.launch_dispatch(call, handle, EPCY_LOW_LATENCY_SEND if hook
                                 else EPCY_LOW_LATENCY_SEND | EPCY_LOW_LATENCY_RECEIVE, stream)
            event = self.end(call, stream, capturing, [call, handle.block])
            if not capturing:
                handle.event = handle.sent = event
                self.follow(OP_DISPATCH, handle.arrays.flows, handle, event)
            if not hook:
                handle.received = True
                self.low_latency.has_received(LOW_LATENCY_DISPATCH)
            return self.low_latency.result(call, handle, event)
        finally:
            if previous != self.device:
                epcy_cuda_set_device(previous, NULL)

    cdef int low_latency_dispatch_receive(self, LowLatencyDispatchCall call, LowLatencyHandle given) except -1:
        cdef CudaLowLatencyHandle handle = given
        cdef Call order = self.on_current_stream()
        cdef CudaEvent event
        cdef bint capturing = False
        cdef uintptr_t stream
        cdef int previous = 0
        self.reach("low_latency_dispatch", "completion")
        check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
        try:
            stream = self.begin(order, &capturing)
            if self.checks:
                self.poison(self.heap_layout.low_latency_x[handle.area], self.low_latency.num_rows, stream)
            self.launch_dispatch(call, handle, EPCY_LOW_LATENCY_RECEIVE, stream)
            event = self.end(order, stream, capturing, [call, handle.block])
            if not capturing:
                handle.event = event
            handle.received = True
            return self.received_oldest(LOW_LATENCY_DISPATCH)
        finally:
            if previous != self.device:
                epcy_cuda_set_device(previous, NULL)

    # ---- combine --------------------------------------------------------------------------------------------

    cdef int launch_combine(self, LowLatencyCombineCall call, uint64_t step, int phases, uintptr_t stream) except -1:
        cdef epcy_low_latency_combine *c = &self.combine_params
        cdef CudaLowLatencyHandle handle = call.handle
        cdef uint32_t header = OP_COMBINE | <uint32_t>call.x.kind << 3 | (<uint32_t>handle.epoch & 511) << 19
        if call.reduction:
            header |= EPCY_LOW_LATENCY_SOURCE
        if call.use_logfmt:
            header |= EPCY_LOW_LATENCY_LOGFMT
        if call.topk_weights is not None or call.renormalize and not call.reduction:
            header |= EPCY_LOW_LATENCY_WEIGHTS      # they travel: the experts' ranks apply them
        if call.renormalize:
            header |= EPCY_LOW_LATENCY_RENORMALIZE
        c.call.dtype, c.call.phases, c.call.peers.timeout_ns = call.x.kind, phases, self.peers.timeout_ns
        epcy_low_latency_rows(&c.call, self.shape.hidden * call.x.item_bytes())
        c.call.handle, c.call.sent, c.call.header = handle.arrays, handle.arrays.sent + 1 + (step & 1), header
        c.call.num_tokens = <int32_t>handle.num_tokens
        c.x, c.out = call.x.data, call.out.data
        c.topk_weights = NULL
        if call.topk_weights is not None:
            c.topk_weights = <const float *>call.topk_weights.data
        c.call.wire.headers = self.header_words("low_latency_combine", phases)
        return self.carrier.combine(c, stream)

    cdef object low_latency_combine_input(self, int kind):
        cdef object stream
        inside = NvshmemBackend.low_latency_combine_input(self, kind)
        if self.checks:             # NaN, where the user writes nothing
            stream = self.xp.cuda.get_current_stream()
            self.come_behind(stream.ptr)
            self.poison(inside.data.ptr - <uintptr_t>self.start, self.low_latency.num_rows, stream.ptr)
        return inside

    cdef object low_latency_combine(self, LowLatencyCombineCall call):
        cdef CudaLowLatencyHandle handle = call.handle
        cdef CudaEvent event
        cdef bint capturing = False, hook = call.return_recv_hook
        cdef uintptr_t stream
        cdef uint64_t step
        cdef int previous = 0
        self.may_step(LOW_LATENCY_COMBINE)
        self.reach("low_latency_combine", "arrival")
        check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
        try:
            if <uintptr_t>call.x.data % 16:
                call.x = self.aligned(call, call.x)
            stream = self.begin(call, &capturing)
            if self.counters is not None and not capturing:
                self.counters.enter(OP_COMBINE)
            step = self.step_of(LOW_LATENCY_COMBINE, hook)
            self.low_latency.sent(LOW_LATENCY_COMBINE)
            self.launch_combine(call, step, EPCY_LOW_LATENCY_SEND if hook
                                else EPCY_LOW_LATENCY_SEND | EPCY_LOW_LATENCY_RECEIVE, stream)
            event = self.end(call, stream, capturing, [call, handle.block])
            if not capturing:
                handle.combined = event
                self.follow(OP_COMBINE, handle.arrays.flows + self.num_ranks, handle, event)
            if not hook:
                self.low_latency.leave_input(call)
                self.low_latency.has_received(LOW_LATENCY_COMBINE)
            return event
        finally:
            if previous != self.device:
                epcy_cuda_set_device(previous, NULL)

    cdef int low_latency_combine_receive(self, LowLatencyCombineCall call) except -1:
        cdef CudaLowLatencyHandle handle = call.handle
        cdef Call order = self.on_current_stream()
        cdef bint capturing = False
        cdef uintptr_t stream
        cdef int previous = 0
        self.reach("low_latency_combine", "completion")
        check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
        try:
            stream = self.begin(order, &capturing)
            self.launch_combine(call, self.pending[LOW_LATENCY_COMBINE][0], EPCY_LOW_LATENCY_RECEIVE, stream)
            event = self.end(order, stream, capturing, [call, handle.block])
            if not capturing:
                handle.combined = event
            self.low_latency.leave_input(call)
            return self.received_oldest(LOW_LATENCY_COMBINE)
        finally:
            if previous != self.device:
                epcy_cuda_set_device(previous, NULL)

    cdef int64_t header_words(self, str op, int phases) except -1:
        """Where a call's headers lie; or where nobody looks, if a fault loses them."""
        if self.faults is not None and phases & EPCY_LOW_LATENCY_SEND and self.faults.drops(op, "arrival"):
            return self.peers.control.lost
        return self.headers_at

    # ---- going on without a rank ----------------------------------------------------------------------------

    cdef uint32_t mask_bits(self) noexcept:
        return self.asked | self.mapped.report.masked

    cdef int64_t num_masked(self) noexcept:
        cdef uint32_t bits = self.mask_bits()
        return bin(bits).count("1") if bits else 0

    cpdef masked(self):
        bits = self.mask_bits()
        return tuple([r for r in range(self.num_ranks) if bits >> r & 1])

    cpdef set_mask(self, int rank, bint masked):
        """Behind all calls that were made: kernels read the masks when they begin."""
        cdef uint32_t bit = <uint32_t>1 << rank
        cdef int previous = 0
        if self.put_wire.bytes:
            raise NotSupportedError("rank: expected none to be masked where puts carry low-latency calls, which need "
                                    f"all ranks, got {rank} (rank {self.rank}); masks are for ranks that NVLink "
                                    "reaches")
        if bool(self.mask_bits() & bit) == masked:
            return
        if masked:
            self.asked |= bit
        else:
            self.asked &= ~bit
            self.mapped.report.masked &= ~bit
        check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
        try:
            self.come_behind(self.own_stream)
            check(epcy_cuda_launch_mask(&self.peers, bit if masked else 0, 0 if masked else bit,
                                        <void *>self.own_stream), "launching a mask")
            self.be_last(CudaEvent.__new__(CudaEvent), self.own_stream)
        finally:
            if previous != self.device:
                epcy_cuda_set_device(previous, NULL)

    cpdef dropped(self, int which):
        cdef epcy_counters *counters = NULL
        if not self.shape.num_low_latency_tokens:
            return None
        if self.last is not None:
            self.last.synchronize()
        at = self.peers.control.counters + <int64_t>&counters.lanes_lost[which][0]
        return self.fetch(at, self.num_ranks, np.uint64).astype(np.int64)

    # ---- refusals and life ------------------------------------------------------------------------------------

    def refuse(self, int op, str text):
        """Take part in a call without data, so that the others learn why and stay in step."""
        cdef int previous = 0, kind = op - <int>OP_DISPATCH
        cdef epcy_peers peers = self.peers
        if kind != LOW_LATENCY_DISPATCH and kind != LOW_LATENCY_COMBINE:
            return NvshmemBackend.refuse(self, op, text)
        raw = f"rank {self.rank} refused {OPERATIONS[op]}: {text}".encode()[:EPCY_CUDA_TEXT_BYTES - 1]
        self.num_calls += 1
        self.steps[kind] += 1
        check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
        try:
            self.come_behind(self.own_stream)
            self.carrier.prepare(&peers)
            self.carrier.refuse(&peers, &self.wire, kind, <uint32_t>op, raw, self.own_stream)
            self.be_last(CudaEvent.__new__(CudaEvent), self.own_stream)
        finally:
            if previous != self.device:
                epcy_cuda_set_device(previous, NULL)

    cdef int drain(self) except -1:
        """Behind everything launched so far: let what is under way to other ranks come there."""
        cdef int previous = 0
        if self.carrier is None:
            return 0
        check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
        try:
            self.come_behind(self.own_stream)
            return self.carrier.quiet(self.own_stream)
        finally:
            epcy_cuda_set_device(previous, NULL)

    def reset(self):
        self.drain()
        NvshmemBackend.reset(self)
        memset(self.pending, 0, sizeof(self.pending))
        self.steps[0] = self.steps[1] = <uint64_t>self.num_resets * 512     # the same number on every rank

    def close(self, bint together):
        if together:
            self.drain()
        NvshmemBackend.close(self, together)
