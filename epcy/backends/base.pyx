# cython: boundscheck=False, wraparound=False
"""What the backends share: receive areas in turn, combine areas given out, and views into both."""

from libc.stdint cimport int64_t

import numpy as np

from epcy.arrays cimport KIND_BF16, KIND_FP8, KIND_FP16, KIND_FP32, Array, copied, overlap
from epcy.backends.call cimport CombineCall, DispatchCall, LowLatencyCombineCall, LowLatencyDispatchCall
from epcy.backends.low_latency cimport LowLatency
from epcy.backends.meter cimport COMBINE_ROWS, Meter, epcy_meter_rows
from epcy.event cimport completed
from epcy.handle cimport Area, Dispatch, Handle, LowLatencyHandle
from epcy.layout cimport (
    EPCY_GUARD_BYTES, EPCY_NUM_AREAS, epcy_area_layout, epcy_heap, epcy_num_local_experts, epcy_num_low_latency_rows,
    epcy_num_scales, epcy_shape, shape_of)

from epcy.arrays import DTYPES
from epcy.backends import bootstrap
from epcy.backends.inspection import Inspection
from epcy.errors import ArgumentError, EpcyError, StateError
from epcy.faults import Faults


cdef class Backend:
    def __init__(self, comm, dict shape, dict options, list identities, object token, xp):
        self.device = -1                # none yet: abandon() asks
        self.comm, self.token, self.identities, self.xp = comm, token, identities, xp
        self.rank, self.num_ranks = comm.rank, comm.size
        self.timeout = self.default_timeout = options["timeout"]
        self.masks_late = options["on_timeout"] == "mask"
        self.faults = Faults(options["faults"], comm.rank) if options["faults"] else None
        self.take()
        self.checks = options["check"]
        self.shape = shape_of(shape)
        self.area = epcy_area_layout(&self.shape)
        if options["stats"]:
            self.meter = Meter(comm, options["backend"], epcy_num_local_experts(&self.shape))
        # All ranks live at this moment; one in another container's pid namespace can never be seen.
        self.watched = {r for r, identity in enumerate(identities) if identity.is_visible()}

    def dead(self, ranks):
        """Those of `ranks` whose processes are known to have ended."""
        return [r for r in ranks if r in self.watched and self.identities[r].is_dead()]

    cdef void set_timeout(self, double seconds) noexcept:
        """Bound the waits of the call that begins."""
        self.timeout = seconds

    cdef int reach(self, str operation, str phase) except -1:
        """Come to a phase of a call, where a fault may have been asked for."""
        if self.faults is not None:
            self.faults.reach(operation, phase)
        return 0

    cdef int take(self) except -1:
        """Come to where the constructor acquires something, which a fault may have been asked to refuse."""
        if self.faults is not None:
            self.faults.take("constructor", "data")
        return 0

    def failed(self, comm, error, double timeout):
        """End a constructor in which an error came up: tell it, give back what was taken, and raise."""
        all_raise = False
        try:
            told, all_raise = bootstrap.tell(comm, error, timeout, "Buffer()")
        finally:
            self.abandon(all_raise)
        if told is error:
            raise error
        raise told from error

    def abandon(self, bint together):
        """Give back what a constructor took that ended in an error; `together`: on every rank. It may come twice."""
        if self.meter is not None:
            self.meter.take_back()

    cdef bint is_left_out(self) except -1:
        """Whether a rank has freed without this one, since it went on without some rank."""
        return False

    cdef bint leaves_alone(self, bint together, int op) except -1:
        """Meet all ranks in free(), operation `op`, if `together`. True: they do not free together, since this rank, or
        one that has freed, goes on without some rank."""
        if self.num_masked() or together and self.is_left_out():
            return True
        if together:
            try:
                self.barrier(op)
            except EpcyError:
                if not self.is_left_out():
                    raise
                return True
        return False

    cdef int leave(self) except -1:
        """Return to the user: an error in mid-call, whatever it is, must not leave the others waiting."""
        return 0

    # ---- areas ----------------------------------------------------------------------------------------------

    cdef int open_areas(self, owner) except -1:
        """Make the views; `owner` keeps their memory. self.start and self.heap_layout are known."""
        cdef int i
        cdef epcy_heap *h = &self.heap_layout
        self.areas = [Area() for _ in range(EPCY_NUM_AREAS)]
        self.receive_views = [self.views(self.heap_layout.receive[i], owner) for i in range(EPCY_NUM_AREAS)]
        self.combine_views = [self.views(self.heap_layout.combine[i], owner) for i in range(EPCY_NUM_AREAS)]
        if self.shape.num_low_latency_tokens:
            self.low_latency = LowLatency(self, owner)
        if self.meter is not None:
            self.meter.know_heap(h.receive[0], h.combine[0] - h.receive[0], h.low_latency_x[0] - h.combine[0],
                                 h.bytes - h.low_latency_x[0], self.area.bytes // self.shape.num_rows,
                                 (h.low_latency_x[1] - h.low_latency_x[0])
                                 // max(1, epcy_num_low_latency_rows(&self.shape)))
        if self.checks:
            ends = {"the control region": h.receive[0], "receive area 0": h.receive[1],
                    "receive area 1": h.combine[0], "combine area 0": h.combine[1],
                    "combine area 1": h.low_latency_x[0]}
            if self.shape.num_low_latency_tokens:
                ends |= {"low-latency receive area 0": h.low_latency_x[1],
                         "low-latency receive area 1": h.low_latency_y[0],
                         "low-latency combine area 0": h.low_latency_y[1], "low-latency combine area 1": h.bytes}
            self.inspection = Inspection(self.rank, {
                name: self.view(end - EPCY_GUARD_BYTES, (EPCY_GUARD_BYTES,), np.dtype(np.uint8), owner)
                for name, end in ends.items()})
        return 0

    cdef int close_areas(self) except -1:
        for area in self.areas:
            (<Area>area).generation += 1
        self.receive_views = self.combine_views = self.low_latency = self.inspection = None
        return 0

    cdef int take_area(self) except -1:
        """The receive area of the next dispatch; what lay there is given away."""
        cdef int area = self.next_area
        self.next_area = (area + 1) % EPCY_NUM_AREAS
        (<Area>self.areas[area]).generation += 1
        return area

    def forget_areas(self):
        """Give up all results and all combine inputs."""
        for area in self.areas:
            (<Area>area).generation += 1
        self.next_area = 0
        self.taken[0] = self.taken[1] = False
        if self.low_latency is not None:
            self.low_latency.forget()

    cdef object view(self, int64_t offset, tuple shape, dtype, owner):
        raise NotImplementedError

    def views(self, int64_t offset, owner):
        """Whole-area arrays, to be sliced: by payload kind, and "scales", "idx" and "weights" by layout."""
        cdef epcy_shape *s = &self.shape
        cdef epcy_area *a = &self.area
        rows, topk, out = s.num_rows, s.num_topk, {}
        for kind in (KIND_BF16, KIND_FP16, KIND_FP32, KIND_FP8):
            if s.hidden * DTYPES[kind].itemsize <= s.row_bytes:
                out[kind] = self.view(offset + a.payload, (rows, s.hidden), DTYPES[kind], owner)
        out["scales"] = self.view(offset + a.scales, (rows, epcy_num_scales(s.hidden)), np.dtype(np.float32), owner)
        for layout, shape in (("rank", (rows, topk)), ("expert", (rows,))):
            out["idx", layout] = self.view(offset + a.topk_idx, shape, np.dtype(np.int64), owner)
            out["weights", layout] = self.view(offset + a.topk_weights, shape, np.dtype(np.float32), owner)
        return out

    cdef bint lies_in(self, Array array, char *begin) noexcept:
        """Whether an array, or None, shares memory with the area that begins there."""
        return array is not None and overlap(array, begin, self.area.bytes)

    cdef Array kept(self, Array array):
        """The array, or a copy of it where the next dispatch writes over it."""
        return copied(array) if self.lies_in(array, self.start + self.heap_layout.receive[self.next_area]) else array

    cdef int keep_inputs(self, DispatchCall call) except -1:
        """Save what lies in the receive area that this dispatch gives away: the result before the last, say."""
        call.x, call.scales, call.topk_weights = self.kept(call.x), self.kept(call.scales), self.kept(call.topk_weights)
        return 0

    def touch(self):
        """Have the memory that calls use, before there is a call; collective where there is something to do."""

    # ---- dispatch -------------------------------------------------------------------------------------------

    cdef Dispatch result(self, DispatchCall call, Handle handle, int area, list counts, event):
        """What dispatch returns: views of the area."""
        cdef Dispatch r = Dispatch.__new__(Dispatch)
        cdef int64_t n = handle.num_rows
        r._area = self.areas[area]
        r._generation = r._area.generation
        r._views, r._layout, r._num_rows, r._kind = self.receive_views[area], handle.layout, n, call.x.kind
        r._has_scales, r._has_weights = call.scales is not None, call.topk_weights is not None
        r.num_recv_tokens_per_expert, r.handle, r.event = counts, handle, event
        if call.out is not None:
            self.own(r, call.out, n)
        return r

    def own(self, Dispatch r, out, n):
        """Turn a result's views into the user's own arrays."""
        received, idx, weights = r.recv_x, r.recv_topk_idx, r.recv_topk_weights
        views = received if isinstance(received, tuple) else (received,)
        if out is True:
            arrays = [view.copy() for view in views]
        else:
            arrays = list(out) if isinstance(out, (tuple, list)) else [out]
            for i, view in enumerate(views):
                if len(arrays[i]) < n:
                    raise ArgumentError(f"out: expected at least the {n} rows that came, got {len(arrays[i])} "
                                        f"(rank {self.rank}); give a larger array, or out=True")
                arrays[i] = arrays[i][:n]
                bits = f"u{view.dtype.itemsize}"    # not as numbers: a NaN keeps its payload; e4m3 fits float8
                arrays[i].view(bits)[...] = view.view(bits)
        r._recv_x = tuple(arrays) if len(arrays) > 1 else arrays[0]
        r._recv_topk_idx = idx.copy()
        if weights is not None:
            r._recv_topk_weights = weights.copy()
        r._area = None

    # ---- combine --------------------------------------------------------------------------------------------

    def combine_input(self, Handle handle, int kind):
        """Give out a combine area, until the combine that uses it."""
        cdef int area
        for area in range(EPCY_NUM_AREAS):
            if not self.taken[area]:
                self.taken[area] = True
                if self.meter is not None:
                    epcy_meter_rows(self.meter.m, COMBINE_ROWS, area, handle.num_rows)
                if self.checks:             # NaN, where the user writes nothing
                    max([view for key, view in self.combine_views[area].items() if isinstance(key, int)],
                        key=lambda view: view.nbytes).view(np.uint8)[...] = 0xFF
                return self.combine_views[area][kind][:handle.num_rows]
        raise StateError(f"combine_input: both combine areas are given out (rank {self.rank}); call combine with one "
                         "of them first")

    def dtype_fits(self, int kind):
        return kind in self.combine_views[0]

    cdef int64_t offset_in_heap(self, Array array) noexcept:
        """Where a contiguous array lies in this rank's allocation, or -1."""
        cdef int64_t nbytes = array.shape[0] * array.shape[1] * array.item_bytes()
        cdef char *end = self.start + self.heap_layout.bytes
        if array.is_contiguous and self.start <= array.data and array.data + nbytes <= end:
            return array.data - self.start
        return -1

    cdef int check_out(self, Array out) except -1:
        if overlap(out, self.start, self.heap_layout.bytes):
            raise ArgumentError(f"out: expected memory of your own, got the Buffer's, which other ranks may be reading "
                                f"(rank {self.rank}); leave it out, or give an array from numpy.empty or cupy.empty")
        return 0

    def prepare_combine(self, CombineCall call):
        """Find out where x and the weights lie, and a combine area for what lies outside; local."""
        cdef int i
        cdef bint stage_weights = False
        call.x_offset, call.weights_offset, call.area, call.consumed = self.offset_in_heap(call.x), -1, -1, -1
        self.check_out(call.out)
        for i in range(EPCY_NUM_AREAS):
            if 0 <= call.x.data - self.start - self.heap_layout.combine[i] < self.area.bytes:
                call.area = call.consumed = i
                if call.x_offset < 0:       # rows in another order, or apart: they are put where they should have been
                    call.x = copied(call.x)
        if call.out_weights is not None:
            call.weights_offset = self.offset_in_heap(call.topk_weights)
            stage_weights = call.weights_offset < 0
        if call.area < 0 and (call.x_offset < 0 or stage_weights):
            call.area = 0 if not self.taken[0] else 1
            if self.taken[call.area]:
                raise StateError(f"x: it lies outside the Buffer's memory, and both combine areas are given out by "
                                 f"combine_input (rank {self.rank}); combine one of those first")

    # ---- low latency ----------------------------------------------------------------------------------------

    cdef tuple low_latency_dispatch(self, LowLatencyDispatchCall call):
        """Send, and unless call.return_recv_hook receive; return LowLatency.result()."""
        raise NotImplementedError

    cdef int low_latency_dispatch_receive(self, LowLatencyDispatchCall call, LowLatencyHandle handle) except -1:
        """Receive what was only sent: the hook."""
        raise NotImplementedError

    cdef object low_latency_combine(self, LowLatencyCombineCall call):
        """Send, and unless call.return_recv_hook receive; return the event. call.area is taken."""
        raise NotImplementedError

    cdef int low_latency_combine_receive(self, LowLatencyCombineCall call) except -1:
        """Receive what was only sent: the hook."""
        raise NotImplementedError

    cdef object low_latency_combine_input(self, int kind):
        """Give out a low-latency combine area, until the combine that uses it is received."""
        return self.low_latency.inputs[self.low_latency.give_input()][kind]

    def use_sms(self, num_sms):
        """Let calls use so much of the machine from now on; None: the backend's own choice."""
        raise NotImplementedError

    def use_knobs(self, dict options):
        """Take from now on what the options say of how a call goes about its work; nothing where only num_sms does."""

    def num_blocks(self, str op, str layout):
        """How much of the machine a "dispatch" or "combine" takes now."""
        raise NotImplementedError

    def most_sms(self, str op, str layout, int num_cores):
        """How much could be of use to one; `num_cores`: of a rank."""
        return self.num_blocks(op, layout)

    # ---- what has no meaning where every call is over when it returns ------------------------------------------

    def capture(self):
        """Mark this point of the current stream."""
        return completed()

    def wait_all(self):
        """Let everything of this Buffer come to its end."""

    # ---- going on without a rank ------------------------------------------------------------------------------

    cdef int64_t num_masked(self) noexcept:
        return 0

    cpdef set_mask(self, int rank, bint masked):
        raise NotImplementedError

    cpdef masked(self):
        return ()

    cpdef dropped(self, int which):
        return None

    # ---- the option `check` -----------------------------------------------------------------------------------

    def inspect(self, str operation):
        """Raise if something was written past the end of a region; nothing of this Buffer runs now."""
        if self.inspection is not None:
            self.inspection.verify(operation)

    # ---- errors that come later -----------------------------------------------------------------------------

    def take_deferred(self):
        """The error that waits to be raised, once."""
        error, self.deferred = self.deferred, None
        return error
