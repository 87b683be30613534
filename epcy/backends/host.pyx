# cython: boundscheck=False, wraparound=False
# distutils: libraries = epcy_host
"""The host backend: dispatch and combine between ranks of one node over an MPI shared-memory window.

A call is one step of the epoch on every rank: `begin` a record, `arrive` (publish it, wait for everybody's, compare),
move the data, `finish` (say so, wait for everybody). The base classes are the steps (host_epoch.pyx), the waits
(host_waits.pyx) and the memory (host_heap.pyx); the C side is src/host. No MPI call is made between the constructor
and `free`.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

import numpy as np

from epcy.arrays cimport KIND_INT64
from epcy.backends.call cimport CombineCall, DispatchCall
from epcy.backends.meter cimport (
    COMBINE_ROWS, EPCY_SPAN_COUNT, EPCY_SPAN_SEND, RECEIVE_ROWS, epcy_meter_rows, epcy_meter_tokens)
from epcy.event cimport completed
from epcy.handle cimport Combine, Handle
from epcy.layout cimport epcy_num_local_experts, epcy_num_scales

from epcy.backends import verdicts
from epcy.backends.names import LAYOUTS
from epcy.errors import CapacityError, HeapError, MismatchError, PeerError

NO_ID = -0x7F7F7F7F7F7F7F80             # bytes of 0x80


cdef class HostHandle(Handle):
    def __dealloc__(self):
        free(self.routes)
        free(self.expert_numbers)

    cdef int64_t _num_recv_tokens(self) noexcept:
        return self.num_true_rows

    cpdef object expert_counts(self):
        return np.array([self.expert_numbers[i] for i in range(self.num_local)], np.int64)


cdef class HostBackend(HostEpoch):
    # ---- dispatch -------------------------------------------------------------------------------------------

    def dispatch(self, DispatchCall call):
        cdef epcy_record *record = self.begin(EPCY_OP_DISPATCH)
        cdef HostHandle handle
        cdef epcy_host_dispatch d
        cdef int area = self.next_area, i
        cdef bint uncached = call.handle is None
        try:
            handle = self.count(call, record) if uncached else call.handle
        except MemoryError as error:
            self.publish_refusal(EPCY_OP_DISPATCH, "out of memory")
            raise HeapError(f"x: no memory for the routes of {call.x.shape[0]} tokens") from error
        if handle.error is not None and uncached:
            if call.num_worst_tokens == 0:
                self.publish_refusal(EPCY_OP_DISPATCH, str(handle.error))
                raise handle.error
            self.deferred = handle.error
        record.dtype, record.layout = call.x.kind, LAYOUTS.index(handle.layout)
        record.cached, record.has_weights = not uncached, call.topk_weights is not None
        record.alignment = handle.expert_alignment
        record.waits = uncached and call.num_worst_tokens == 0
        record.routing = 0 if uncached else handle.epoch
        record.num_tokens, record.limit = call.x.shape[0], call.num_worst_tokens or self.h.shape.num_rows
        record.area_offset = self.h.heap.receive[area]
        epcy_host_span(&self.h, EPCY_SPAN_COUNT)
        if self.checks:
            self.poison(self.h.heap.receive[area])
        self.arrive(EPCY_OP_DISPATCH)

        error = self.disagreement()
        if error is None and uncached:
            error = self.implausible() or self.overflow_error()
        if error is not None and (call.num_worst_tokens == 0 or isinstance(error, MismatchError)):
            self.step_out(EPCY_OP_DISPATCH)
            raise error

        self.take_area()
        memset(&d, 0, sizeof(d))
        d.x, d.x_stride_bytes, d.num_tokens = call.x.data, call.x.strides[0], call.x.shape[0]
        d.row_bytes = self.h.shape.hidden * call.x.item_bytes()
        if call.scales is not None:
            d.scales, d.num_scales = call.scales.data, epcy_num_scales(self.h.shape.hidden)
        if call.topk_weights is not None:
            d.topk_weights = <float *>call.topk_weights.data
        d.routes, d.expert_counts, d.num_rows = handle.routes, handle.expert_numbers, handle.num_true_rows
        d.expert_offsets = handle.expert_numbers + handle.num_local
        d.fill_to = handle.num_worst_tokens
        epcy_host_phase(&self.h, EPCY_OP_DISPATCH, EPCY_PHASE_DATA)
        if error is not None:       # a refusal that this call reports later: it moves nothing
            handle = self.nothing_came(handle, error)
            d.routes, d.expert_counts, d.num_rows, d.num_tokens = handle.routes, handle.expert_numbers, 0, 0
            d.expert_offsets = handle.expert_numbers + handle.num_local
            uncached = False
        self.move(handle, &d, uncached)
        if uncached:
            handle.num_true_rows = d.num_rows
            handle.num_rows = call.num_worst_tokens or d.num_rows
            if d.num_rows > handle.num_rows and handle.error is None:
                handle.error = self.deferred = verdicts.dropped(self.h.epoch, self.h.rank, d.num_rows, handle.num_rows)
        if self.meter is not None:
            self.count_tokens(handle, call, area, uncached)
        self.finish(EPCY_OP_DISPATCH)
        if self.checks:
            self.inspect_rows(handle, area)
        counts = None
        if handle.num_worst_tokens == 0:
            counts = [handle.expert_numbers[i] for i in range(handle.num_local)]
        return self.result(call, handle, area, counts, completed())

    cdef int move(self, HostHandle handle, epcy_host_dispatch *d, bint uncached) except -1:
        """Put rows where they belong."""
        with nogil:
            if uncached:
                epcy_host_place(&self.h, d)
            epcy_host_send(&self.h, d)
            epcy_host_fill(&self.h, d)
        return 0

    cdef HostHandle count(self, DispatchCall call, epcy_record *record):
        """Make a handle: this rank's routes as ordinals, and its counts into the record."""
        cdef int64_t T = call.topk_idx.shape[0]
        cdef int layout = LAYOUTS.index(call.layout)
        cdef HostHandle handle = self.new_handle(call.layout, T, call.expert_alignment, call.num_worst_tokens)
        cdef epcy_bad_id bad
        with nogil:
            epcy_host_count(&self.h, call.topk_idx.data, call.topk_idx.kind == KIND_INT64, T, layout, handle.routes,
                            epcy_host_counts(&self.h, self.h.rank, self.h.epoch),
                            epcy_host_expert_counts(&self.h, self.h.rank, self.h.epoch), &bad)
        if bad.num_bad:
            handle.error = verdicts.bad_id(self.h.rank, bad.token, bad.lane, bad.value, self.h.shape.num_experts,
                                           bad.num_bad)
        if self.faults is not None:
            epcy_host_counts(&self.h, self.h.rank, self.h.epoch)[0] += self.faults.lie("dispatch")
        return handle

    cdef HostHandle new_handle(self, str layout, int64_t num_tokens, int64_t alignment, int64_t num_worst_tokens):
        cdef HostHandle handle = HostHandle.__new__(HostHandle)
        handle.buffer_token, handle.layout, handle.num_tokens = self.token, layout, num_tokens
        handle.expert_alignment, handle.num_worst_tokens = alignment, num_worst_tokens
        handle.epoch, handle.num_local = self.h.epoch, epcy_num_local_experts(&self.h.shape)
        handle.routes = <epcy_route *>malloc(max(1, num_tokens * self.h.shape.num_topk) * sizeof(epcy_route))
        handle.expert_numbers = <int64_t *>calloc(2 * handle.num_local + 1 + 2 * self.h.shape.num_ranks, 8)
        handle.tokens = handle.expert_numbers + 2 * handle.num_local + 1
        fails = self.faults is not None and self.faults.fails("dispatch")
        if handle.routes == NULL or handle.expert_numbers == NULL or fails:
            raise MemoryError
        return handle

    cdef object implausible(self):
        """An error for every rank if somebody's counts cannot be: more tokens than it has, or fewer than none."""
        cdef const int64_t *counts
        cdef const int64_t *experts
        cdef int64_t rank, d, e, lanes, tokens, local = epcy_num_local_experts(&self.h.shape)
        for rank in range(self.h.shape.num_ranks):
            tokens = epcy_host_record(&self.h, rank, self.h.epoch).num_tokens
            counts = epcy_host_counts(&self.h, rank, self.h.epoch)
            experts = epcy_host_expert_counts(&self.h, rank, self.h.epoch)
            for d in range(self.h.shape.num_ranks):
                lanes = 0
                for e in range(d * local, (d + 1) * local):
                    lanes += experts[e] if experts[e] >= 0 else -(1 << 60)
                if not (0 <= counts[d] <= tokens and counts[d] <= lanes <= counts[d] * self.h.shape.num_topk):
                    return verdicts.implausible(self.h.epoch, rank, d, counts[d], tokens, lanes)
        return None

    cdef object overflow_error(self):
        """An error for every rank if one that waits for its count has no room for its rows."""
        cdef int64_t rank, rows, limit = 0
        for rank in range(self.h.shape.num_ranks):
            rows = epcy_host_rows(&self.h, rank, &limit)
            if rows > limit and epcy_host_record(&self.h, rank, self.h.epoch).waits:
                text = verdicts.no_room_for_rows(self.h.epoch, rank, rows, limit)
                return CapacityError(text) if rank == self.h.rank else PeerError(text, [rank])
        return None

    cdef HostHandle nothing_came(self, HostHandle of, error):
        """A handle like `of` (which may be an earlier call's and stays as it is) by which nothing was sent."""
        cdef HostHandle handle = self.new_handle(of.layout, of.num_tokens, of.expert_alignment, of.num_worst_tokens)
        cdef int64_t i
        handle.error = self.deferred = error
        handle.num_rows, handle.num_true_rows = handle.num_worst_tokens, 0
        for i in range(handle.num_tokens * self.h.shape.num_topk):
            handle.routes[i].rank = handle.routes[i].lane = -1
            handle.routes[i].row = -1
        return handle

    cdef int count_tokens(self, HostHandle handle, DispatchCall call, int area, bint uncached) except -1:
        """Add a dispatch to the meter."""
        cdef int64_t r, size = self.h.shape.num_ranks, row_bytes
        if uncached:        # the records are others' soon: a handle keeps its numbers
            memcpy(handle.tokens, epcy_host_counts(&self.h, self.h.rank, self.h.epoch), size * 8)
            for r in range(size):
                handle.tokens[size + r] = epcy_host_counts(&self.h, r, self.h.epoch)[self.h.rank]
        epcy_meter_tokens(self.meter.m, handle.tokens, handle.tokens + size, handle.expert_numbers)
        epcy_meter_rows(self.meter.m, RECEIVE_ROWS, area, min(handle.num_true_rows, handle.num_rows))
        row_bytes = call.x.shape[1] * call.x.item_bytes()
        if call.scales is not None:
            row_bytes += epcy_num_scales(self.h.shape.hidden) * 4
        for r in range(size):
            if r != self.h.rank:
                self.meter.m.gauges.bytes_moved += handle.tokens[r] * row_bytes
        if self.meter.flows is not None:
            self.meter.note(self.h.epoch, EPCY_OP_DISPATCH, handle.tokens)
        return 0

    # ---- combine --------------------------------------------------------------------------------------------

    def combine(self, CombineCall call):
        cdef epcy_record *record = self.begin(EPCY_OP_COMBINE)
        cdef HostHandle handle = call.handle
        cdef epcy_host_combine c
        self.stage(call)
        record.dtype, record.layout = call.x.kind, LAYOUTS.index(handle.layout)
        record.has_weights, record.alignment = call.topk_weights is not None, handle.expert_alignment
        record.routing, record.num_tokens = handle.epoch, handle.num_tokens
        record.area_offset, record.weights_offset = call.x_offset, call.weights_offset
        epcy_host_span(&self.h, EPCY_SPAN_SEND)
        self.arrive(EPCY_OP_COMBINE)
        error = self.disagreement()
        if error is not None:
            self.step_out(EPCY_OP_COMBINE)
            raise error

        memset(&c, 0, sizeof(c))
        c.routes, c.num_tokens, c.dtype, c.out = handle.routes, handle.num_tokens, call.x.kind, call.out.data
        if call.bias0 is not None:
            c.bias[0] = call.bias0.data
        if call.bias1 is not None:
            c.bias[1] = call.bias1.data
        if call.out_weights is not None:
            c.out_weights = <float *>call.out_weights.data
        elif call.topk_weights is not None:
            c.topk_weights = <float *>call.topk_weights.data
        epcy_host_phase(&self.h, EPCY_OP_COMBINE, EPCY_PHASE_DATA)
        self.add_up(handle, &c)
        if self.meter is not None:
            self.count_sums(handle, call.x.shape[1] * call.x.item_bytes())
            if call.area >= 0:
                epcy_meter_rows(self.meter.m, COMBINE_ROWS, call.area, call.x.shape[0])
        self.finish(EPCY_OP_COMBINE)
        if call.consumed >= 0:
            self.taken[call.consumed] = False
        cdef Combine r = Combine.__new__(Combine)
        r.combined_x, r.combined_topk_weights, r.event = call.out.owner, None, completed()
        if call.out_weights is not None:
            r.combined_topk_weights = call.out_weights.owner
        return r

    cdef int add_up(self, HostHandle handle, epcy_host_combine *c) except -1:
        """Sum this rank's tokens."""
        with nogil:
            epcy_host_combine_rows(&self.h, c)
        return 0

    cdef int stage(self, CombineCall call) except -1:
        """Copy what lies outside the symmetric memory into the combine area."""
        cdef char *area = self.h.base[self.h.rank]
        cdef int64_t row_bytes = call.x.shape[1] * call.x.item_bytes(), i, at
        if call.x_offset < 0:
            call.x_offset = at = self.h.heap.combine[call.area] + self.h.area.payload
            with nogil:
                for i in range(call.x.shape[0]):
                    memcpy(area + at + i * row_bytes, call.x.data + i * call.x.strides[0], row_bytes)
        if call.out_weights is not None and call.weights_offset < 0:
            call.weights_offset = at = self.h.heap.combine[call.area] + self.h.area.topk_weights
            memcpy(area + at, call.topk_weights.data, call.topk_weights.shape[0] * self.h.shape.num_topk * 4)
        return 0

    cdef int count_sums(self, HostHandle handle, int64_t row_bytes) except -1:
        """Add a combine to the meter: what it sends to a rank is what came from there."""
        cdef int64_t r, size = self.h.shape.num_ranks
        for r in range(size):
            if r != self.h.rank:
                self.meter.m.gauges.bytes_moved += handle.tokens[size + r] * row_bytes
        if self.meter.flows is not None:
            self.meter.note(self.h.epoch, EPCY_OP_COMBINE, handle.tokens + size)
        return 0

    # ---- the option `check` ---------------------------------------------------------------------------------

    cdef int poison(self, int64_t at) except -1:
        """Fill an area with NaN, and its ids with what is no id."""
        memset(self.start + at + self.h.area.payload, 0xFF, self.h.shape.num_rows * self.h.shape.row_bytes)
        memset(self.start + at + self.h.area.topk_idx, 0x80, self.h.shape.num_rows * self.h.shape.num_topk * 8)
        return 0

    def inspect_rows(self, HostHandle handle, int area):
        """Raise if a row that was announced did not come, or one came that was not."""
        cdef int64_t width = self.h.shape.num_topk if handle.layout == "rank" else 1
        cdef int64_t filled = max(handle.num_rows, handle.num_worst_tokens)
        ids = self.receive_views[area]["idx", "rank"].reshape(-1)
        unwritten = ids == NO_ID
        missing = unwritten[:min(handle.num_true_rows, handle.num_rows) * width]
        if missing.any():
            row = int(missing.argmax()) // width
            raise verdicts.never_came(self.h.epoch, self.h.rank, row, handle.num_true_rows, self.announced(handle))
        if not unwritten[filled * width:].all():
            row = filled + int((~unwritten[filled * width:]).argmax()) // width
            raise verdicts.not_announced(self.h.epoch, self.h.rank, row, filled, self.announced(handle))

    def announced(self, HostHandle handle):
        """What each rank said in this call that it sends here; None where the routing is an older call's."""
        if epcy_host_record(&self.h, self.h.rank, self.h.epoch).cached:
            return None
        return [epcy_host_counts(&self.h, r, self.h.epoch)[self.h.rank] for r in range(self.h.shape.num_ranks)]
