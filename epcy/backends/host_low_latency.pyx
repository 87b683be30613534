# cython: boundscheck=False, wraparound=False
# distutils: libraries = epcy_host
"""The host backend's low-latency dispatch and combine, each with a half that sends and a half that receives.

What both halves begin and end with is in the base class (host_low_latency_step.pyx).
"""

from cpython.bytearray cimport PyByteArray_AS_STRING
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

import numpy as np

from epcy.arrays cimport KIND_INT64, copied
from epcy.backends.call cimport LowLatencyCombineCall, LowLatencyDispatchCall
from epcy.backends.low_latency cimport LOW_LATENCY_COMBINE, LOW_LATENCY_DISPATCH
from epcy.backends.meter cimport EPCY_SPAN_WAIT, LOW_LATENCY_ROWS, epcy_meter_rows, epcy_meter_tokens
from epcy.event cimport completed
from epcy.handle cimport LowLatencyHandle
from epcy.layout cimport epcy_low_latency_area, epcy_low_latency_area_layout, epcy_num_local_experts

from epcy.backends import verdicts
from epcy.errors import HeapError, MismatchError


cdef class HostLowLatencyHandle(LowLatencyHandle):
    def __dealloc__(self):
        free(self.routes)
        free(self.counts)
        free(self.weights)
        free(self.sources)
        free(self.bases)
        free(self.before)
        free(self.not_sent)

    cdef int64_t _num_recv_tokens(self) noexcept:
        cdef int64_t rows = 0, i
        for i in range(self.num_local):
            rows += self.counts[i]
        return rows

    cpdef object expert_counts(self):
        return np.array([self.counts[i] for i in range(self.num_local)], np.int64)

    @property
    def num_lanes_not_sent(self):
        return np.array([self.not_sent[r] for r in range(self.num_ranks)], np.int64)

    @property
    def num_lanes_not_returned(self):
        return np.array([self.not_sent[self.num_ranks + r] for r in range(self.num_ranks)], np.int64)

    @property
    def missing_ranks(self):
        return tuple([r for r in range(self.num_ranks) if self.received and not self.sources[r]])


cdef class HostLowLatencyBackend(HostLowLatencyStep):
    # ---- dispatch -------------------------------------------------------------------------------------------

    cdef tuple low_latency_dispatch(self, LowLatencyDispatchCall call):
        cdef HostLowLatencyHandle handle = self.make_handle(call)
        cdef int slot = self.next_slot[LOW_LATENCY_DISPATCH]
        cdef epcy_low_latency_header *header = self.take_slot(LOW_LATENCY_DISPATCH)
        cdef epcy_low_latency_send s
        handle.epoch = self.step(LOW_LATENCY_DISPATCH)
        header.dtype, header.use_fp8, header.round_scale = call.x.kind, call.use_fp8, call.round_scale
        header.use_ue8m0, header.has_weights = call.use_ue8m0, call.topk_weights is not None
        header.num_tokens = handle.num_tokens
        s.x, s.x_stride_bytes, s.num_tokens = call.x.data, call.x.strides[0], handle.num_tokens
        s.topk_idx, s.is_int64, s.dtype = call.topk_idx.data, call.topk_idx.kind == KIND_INT64, call.x.kind
        s.use_fp8, s.round_scale, s.use_ue8m0 = call.use_fp8, call.round_scale, call.use_ue8m0
        s.slot, s.routes = slot, handle.routes
        with nogil:
            epcy_host_low_latency_send(&self.h, &s)
        if s.bad.num_bad:
            handle.error = self.deferred = verdicts.bad_id(self.rank, s.bad.token, s.bad.lane, s.bad.value,
                                                           self.h.shape.num_experts, s.bad.num_bad)
        if self.h.num_masked:
            self.count_not_sent(handle)
        self.send(LOW_LATENCY_DISPATCH, header, handle.epoch, NULL)
        handle.number, handle.area = self.low_latency.num_sent[LOW_LATENCY_DISPATCH], self.low_latency.take_area()
        if call.return_recv_hook:
            self.has_sent(LOW_LATENCY_DISPATCH)
        else:
            self.low_latency_dispatch_receive(call, handle)
        return self.low_latency.result(call, handle, completed())

    cdef HostLowLatencyHandle make_handle(self, LowLatencyDispatchCall call):
        cdef HostLowLatencyHandle handle = HostLowLatencyHandle.__new__(HostLowLatencyHandle)
        cdef int64_t lanes = call.x.shape[0] * self.h.shape.num_topk
        handle.buffer_token, handle.layout, handle.num_tokens = self.token, "low_latency", call.x.shape[0]
        handle.expert_alignment, handle.num_rows = 1, self.low_latency.num_rows
        handle.num_local = epcy_num_local_experts(&self.h.shape)
        handle.routes = <epcy_route *>calloc(max(1, lanes), sizeof(epcy_route))
        handle.counts = <int64_t *>calloc(handle.num_local + 2 * self.h.shape.num_ranks, 8)
        handle.tokens = handle.counts + handle.num_local
        if call.topk_weights is not None:
            handle.weights = <float *>calloc(max(1, lanes), 4)
        handle.num_ranks = self.num_ranks
        handle.sources = <uint8_t *>calloc(self.num_ranks, 1)
        handle.bases = <int32_t *>calloc(self.h.shape.num_experts, 4)
        handle.before = <int32_t *>calloc(self.h.shape.num_experts, 4)
        handle.not_sent = <int64_t *>calloc(2 * self.num_ranks, 8)
        fails = self.faults is not None and self.faults.fails("low_latency_dispatch")
        if (handle.routes == NULL or handle.counts == NULL or handle.sources == NULL or handle.bases == NULL
                or handle.before == NULL or handle.not_sent == NULL
                or call.topk_weights is not None and handle.weights == NULL or fails):
            text = f"x: no memory for the routes of {call.x.shape[0]} tokens (rank {self.rank})"
            self.refuse(EPCY_OP_LOW_LATENCY_DISPATCH, text)
            raise HeapError(text)
        if call.topk_weights is not None:
            memcpy(handle.weights, call.topk_weights.data, lanes * 4)
        return handle

    cdef int count_not_sent(self, HostLowLatencyHandle handle) except -1:
        """Count the lanes that go to masked ranks, and so nowhere."""
        cdef int64_t i
        for i in range(handle.num_tokens * self.h.shape.num_topk):
            if handle.routes[i].rank >= 0 and handle.routes[i].row < 0:
                handle.not_sent[handle.routes[i].rank] += 1
        for i in range(self.num_ranks):
            self.num_lanes[0][i] += handle.not_sent[i]
        return 0

    cdef int low_latency_dispatch_receive(self, LowLatencyDispatchCall call, LowLatencyHandle of) except -1:
        cdef HostLowLatencyHandle handle = of
        cdef epcy_low_latency_area layout = epcy_low_latency_area_layout(&self.h.shape)
        cdef char *area = self.start + self.h.heap.low_latency_x[handle.area]
        cdef epcy_low_latency_receive r
        cdef int64_t bad = -1
        self.receiving(EPCY_OP_LOW_LATENCY_DISPATCH, handle.epoch)
        self.reach("low_latency_dispatch", "completion")
        self.wait(EPCY_OP_LOW_LATENCY_DISPATCH, EPCY_WORD_ARRIVED, handle.epoch, handle.epoch)
        self.await_slots(LOW_LATENCY_DISPATCH, handle.epoch)
        epcy_host_span(&self.h, EPCY_SPAN_WAIT)
        error = self.disagreement_of(LOW_LATENCY_DISPATCH, handle.epoch, handle.sources)
        if self.checks:
            memset(area, 0xFF, self.low_latency.num_rows * self.h.shape.row_bytes)     # NaN, where no row comes
        if self.left_out is not None:
            handle.error = self.left_out
        memset(&r, 0, sizeof(r))
        r.epoch, r.counts = handle.epoch, <int64_t *>(area + layout.counts)
        if error is None:
            r.payload, r.row_bytes = area + layout.payload, self.h.shape.hidden * call.x.item_bytes()
            if call.use_fp8:
                r.row_bytes, r.scales = self.h.shape.hidden, area + layout.scales
                r.scale_bytes = self.h.shape.hidden // (512 if call.use_ue8m0 else 128) * 4
            r.routes, r.num_tokens, r.tokens = handle.routes, handle.num_tokens, handle.tokens
            r.sources, r.bases, r.before = handle.sources, handle.bases, handle.before
            with nogil:
                bad = epcy_host_low_latency_receive(&self.h, &r)
            if bad >= 0:
                error = verdicts.nonsense(handle.epoch, bad)
            elif self.meter is not None:
                self.count_tokens_of(handle, &r)
        if error is None:
            pass
        elif not isinstance(error, MismatchError):      # a refusal: nothing came, and check() tells why
            handle.error = self.deferred = error
            memset(r.counts, 0, handle.num_local * 8)
            memset(handle.routes, 0xFF, handle.num_tokens * self.h.shape.num_topk * sizeof(epcy_route))
            error = None
        self.finish_receiving(LOW_LATENCY_DISPATCH)
        if error is not None:
            raise error
        memcpy(handle.counts, r.counts, handle.num_local * 8)
        handle.received = True
        if call.stats is not None:
            self.count_stats(call, handle)
        return 0

    cdef int count_tokens_of(self, HostLowLatencyHandle handle, epcy_low_latency_receive *r) except -1:
        """Add a dispatch to the meter."""
        cdef int64_t q, rows = 0, size = self.h.shape.num_ranks
        epcy_meter_tokens(self.meter.m, handle.tokens, handle.tokens + size, r.counts)
        for q in range(size):
            if q != self.rank:
                self.meter.m.gauges.bytes_moved += handle.tokens[size + q] * (r.row_bytes + r.scale_bytes)
        for q in range(handle.num_local):
            rows += r.counts[q]
        epcy_meter_rows(self.meter.m, LOW_LATENCY_ROWS, handle.area, rows)
        if self.meter.flows is not None:
            self.meter.note(handle.epoch, EPCY_OP_LOW_LATENCY_DISPATCH, handle.tokens)
        return 0

    cdef int count_stats(self, LowLatencyDispatchCall call, HostLowLatencyHandle handle) except -1:
        cdef int64_t i
        for i in range(handle.num_local):
            if call.stats.kind == KIND_INT64:
                (<int64_t *>call.stats.data)[i] += handle.counts[i]
            else:
                (<int32_t *>call.stats.data)[i] += <int32_t>handle.counts[i]
        return 0

    # ---- combine --------------------------------------------------------------------------------------------

    cdef object low_latency_combine_input(self, int kind):
        cdef int area = self.low_latency.give_input()
        self.await_input(area)
        if self.checks:
            memset(self.low_latency.inputs_at[area], 0xFF, self.low_latency.num_rows * self.h.shape.row_bytes)
        return self.low_latency.inputs[area][kind]

    cdef int await_input(self, int area) except -1:
        """Wait until everybody has read what lies in a combine area."""
        self.wait(EPCY_OP_LOW_LATENCY_COMBINE, EPCY_WORD_RECEIVED_COMBINE, self.input_epochs[area], self.h.epoch + 1)
        if self.h.num_masked:
            epcy_low_latency_invalidate(&self.h, LOW_LATENCY_COMBINE, self.input_epochs[area])
        return 0

    cdef object low_latency_combine(self, LowLatencyCombineCall call):
        cdef HostLowLatencyHandle handle = call.handle
        cdef int slot = self.next_slot[LOW_LATENCY_COMBINE]
        cdef epcy_low_latency_header *header = self.take_slot(LOW_LATENCY_COMBINE)
        cdef uint64_t epoch
        epcy_host_open_call(&self.h, EPCY_OP_LOW_LATENCY_COMBINE)
        if not call.in_area:
            self.put_in_area(call, handle)
        epoch = self.step(LOW_LATENCY_COMBINE)
        header.dtype, header.reduction, header.use_logfmt = call.x.kind, call.reduction, call.use_logfmt
        header.has_weights, header.routing = call.topk_weights is not None, handle.epoch
        memcpy(epcy_low_latency_bases(&self.h, self.h.rank, LOW_LATENCY_COMBINE, slot), handle.bases,
               self.h.shape.num_experts * 4)
        header.y_offset = self.h.heap.low_latency_y[call.area]
        self.input_epochs[call.area] = call.epoch = epoch
        self.send(LOW_LATENCY_COMBINE, header, epoch, handle.counts)
        if call.return_recv_hook:
            if call.topk_weights is not None:
                call.topk_weights = copied(call.topk_weights)
            self.has_sent(LOW_LATENCY_COMBINE)
        else:
            self.low_latency_combine_receive(call)
        return completed()

    cdef int put_in_area(self, LowLatencyCombineCall call, HostLowLatencyHandle handle) except -1:
        """Copy the experts' rows into the combine area: of each expert those that came."""
        cdef int64_t row_bytes = self.h.shape.hidden * call.x.item_bytes()
        self.await_input(call.area)
        with nogil:
            epcy_host_low_latency_stage(&self.h, self.low_latency.inputs_at[call.area], call.x.data, handle.counts,
                                        row_bytes)
        return 0

    cdef int low_latency_combine_receive(self, LowLatencyCombineCall call) except -1:
        cdef HostLowLatencyHandle handle = call.handle
        cdef bytearray takes_part = bytearray(self.num_ranks)
        cdef uint8_t *from_ = <uint8_t *>PyByteArray_AS_STRING(takes_part)
        self.receiving(EPCY_OP_LOW_LATENCY_COMBINE, call.epoch)
        self.reach("low_latency_combine", "completion")
        self.wait(EPCY_OP_LOW_LATENCY_COMBINE, EPCY_WORD_ARRIVED, call.epoch, call.epoch)
        self.await_slots(LOW_LATENCY_COMBINE, call.epoch)
        epcy_host_span(&self.h, EPCY_SPAN_WAIT)
        error = self.disagreement_of(LOW_LATENCY_COMBINE, call.epoch, from_)
        if error is None:
            self.sum_all(call, handle, from_)
            if self.meter is not None:
                self.count_sums_of(handle, call.epoch, self.h.shape.hidden * call.x.item_bytes())
        self.low_latency.leave_input(call)
        self.finish_receiving(LOW_LATENCY_COMBINE)
        if isinstance(error, MismatchError):
            raise error
        if error is not None:
            self.deferred = error
        return 0

    cdef int sum_all(self, LowLatencyCombineCall call, HostLowLatencyHandle handle, uint8_t *from_) except -1:
        """Sum what comes; once more without a rank that gave its rows' memory away meanwhile: it masked this one."""
        cdef epcy_low_latency_combine c
        cdef epcy_masked_routes m
        cdef int64_t lost = 0, lanes = max(1, handle.num_tokens * self.h.shape.num_topk), r
        cdef int64_t *not_returned = handle.not_sent + self.num_ranks
        cdef float *scaled = NULL
        memset(&c, 0, sizeof(c))
        memset(&m, 0, sizeof(m))
        c.epoch, c.at_source, c.use_logfmt, c.from_ = call.epoch, call.reduction, call.use_logfmt, from_
        c.sum.num_tokens, c.sum.dtype, c.sum.out = handle.num_tokens, call.x.kind, call.out.data
        m.given, m.num_tokens, m.from_, m.epoch = handle.routes, handle.num_tokens, from_, call.epoch
        m.before, m.num_dropped = handle.before, not_returned
        memset(not_returned, 0, self.num_ranks * 8)
        try:
            while lost >= 0:
                c.sum.routes, c.sum.topk_weights = handle.routes, handle.weights
                if call.topk_weights is not None:
                    c.sum.topk_weights = <const float *>call.topk_weights.data
                if not self.all_placed(handle, from_, call.epoch):
                    if m.routes == NULL:
                        m.routes, scaled = <epcy_route *>malloc(lanes * sizeof(epcy_route)), <float *>malloc(lanes * 4)
                    if m.routes == NULL or scaled == NULL:
                        raise HeapError(f"x: no memory for the routes of {handle.num_tokens} tokens (rank {self.rank})")
                    if epcy_host_mask_routes(&self.h, &m):
                        c.sum.routes = m.routes
                        if call.renormalize:
                            epcy_host_renormalize(&self.h, m.routes, handle.num_tokens, c.sum.topk_weights, scaled)
                            c.sum.topk_weights = scaled
                c.sum.routes = self.reachable(c.sum.routes, handle.num_tokens, call.epoch)
                with nogil:
                    lost = epcy_host_low_latency_combine(&self.h, &c)
                if lost >= 0:
                    from_[lost] = 0
        finally:
            free(m.routes)
            free(scaled)
        for r in range(self.num_ranks):
            self.num_lanes[1][r] += not_returned[r]
        return 0

    cdef bint all_placed(self, HostLowLatencyHandle handle, const uint8_t *from_, uint64_t epoch) noexcept:
        """Whether every rank takes part and has placed this rank's rows where it thinks: the ordinary case."""
        cdef const epcy_low_latency_header *header
        cdef const int32_t *bases
        cdef int64_t r, i
        for r in range(self.num_ranks):
            header = NULL
            if from_[r] and handle.not_sent[r] == 0:
                header = epcy_low_latency_find(&self.h, r, LOW_LATENCY_COMBINE, epoch)
            if header == NULL:
                return False
            bases = <const int32_t *>(header + 1) + self.rank * handle.num_local
            for i in range(handle.num_local):
                if bases[i] != handle.before[r * handle.num_local + i]:
                    return False
        return True

    cdef int count_sums_of(self, HostLowLatencyHandle handle, uint64_t epoch, int64_t row_bytes) except -1:
        """Add a combine to the meter: this rank fetched what it had sent."""
        cdef int64_t r, size = self.h.shape.num_ranks
        for r in range(size):
            if r != self.rank:
                self.meter.m.gauges.bytes_moved += handle.tokens[r] * row_bytes
        if self.meter.flows is not None:
            self.meter.note(epoch, EPCY_OP_LOW_LATENCY_COMBINE, handle.tokens + size)
        return 0
