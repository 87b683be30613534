# cython: boundscheck=False, wraparound=False
"""What the backends share of the low-latency mode: areas in turn, combine areas given out, calls and hooks in order."""

from libc.stdint cimport int64_t, uint64_t

import numpy as np

from epcy.arrays cimport KIND_BF16, KIND_FP8, KIND_FP16, KIND_FP32
from epcy.backends.base cimport Backend
from epcy.backends.call cimport LowLatencyCombineCall, LowLatencyDispatchCall
from epcy.handle cimport LowLatencyHandle
from epcy.layout cimport (
    EPCY_NUM_AREAS, epcy_low_latency_area, epcy_low_latency_area_layout, epcy_num_local_experts,
    epcy_num_low_latency_rows, epcy_shape)

from epcy.arrays import DTYPES
from epcy.errors import ArgumentError, StateError

NAMES = ("low_latency_dispatch", "low_latency_combine")


cdef class LowLatency:
    def __init__(self, Backend backend, owner):
        """Make the views; `owner` keeps their memory. backend.start and backend.heap_layout are known."""
        cdef epcy_shape *s = &backend.shape
        cdef epcy_low_latency_area a = epcy_low_latency_area_layout(s)
        cdef int64_t local = epcy_num_local_experts(s), rows = s.num_ranks * s.num_low_latency_tokens, at
        cdef int i
        self.rank, self.xp, self.num_rows = backend.rank, backend.xp, epcy_num_low_latency_rows(s)
        self.received, self.inputs = [], []
        for i in range(EPCY_NUM_AREAS):
            at = backend.heap_layout.low_latency_x[i]
            views = {}
            for kind in (KIND_BF16, KIND_FP16, KIND_FP32, KIND_FP8):
                if s.hidden * DTYPES[kind].itemsize <= s.row_bytes:
                    views[kind] = backend.view(at + a.payload, (local, rows, s.hidden), DTYPES[kind], owner)
            for name, dtype, group in (("scales", np.float32, 128), ("ue8m0", np.int32, 512)):
                if s.hidden % group == 0:
                    views[name] = backend.view(at + a.scales, (local, rows, s.hidden // group), np.dtype(dtype), owner)
            views["counts"] = backend.view(at + a.counts, (local,), np.dtype(np.int64), owner)
            self.received.append(views)
            at = backend.heap_layout.low_latency_y[i]
            self.inputs_at[i] = backend.start + at
            self.inputs.append({kind: backend.view(at, (local, rows, s.hidden), DTYPES[kind], owner)
                                for kind in (KIND_BF16, KIND_FP16, KIND_FP32) if kind in views})

    # ---- calls and hooks in order -----------------------------------------------------------------------------

    cdef int may_send(self, int kind, bint return_recv_hook) except -1:
        """Refuse a call while too many of its kind are unreceived; nothing was sent, so no other rank is concerned."""
        cdef uint64_t unreceived = self.num_sent[kind] - self.num_received[kind]
        if unreceived == 0 or unreceived == 1 and return_recv_hook:
            return 0
        if return_recv_hook:
            raise StateError(f"{NAMES[kind]}: two calls of this kind are sent and not received (rank {self.rank}), "
                             "more have no room; call the hook of the older one first")
        raise StateError(f"{NAMES[kind]}: the hook of an earlier call has not run (rank {self.rank}), and calls are "
                         "received in the order in which they were sent; call it first, or give return_recv_hook=True")

    cdef uint64_t sent(self, int kind) noexcept:
        """Count a call that is being sent; its number, from 1."""
        self.num_sent[kind] += 1
        return self.num_sent[kind]

    cdef int may_receive(self, int kind, uint64_t number) except -1:
        """Refuse a hook out of turn."""
        if number <= self.num_received[kind]:
            raise StateError(f"hook: this {NAMES[kind]} was received already, or given up by reset() (rank "
                             f"{self.rank}); call a hook once")
        if number != self.num_received[kind] + 1:
            raise StateError(f"hook: an earlier {NAMES[kind]} was not received yet (rank {self.rank}); call the hooks "
                             "in the order in which the calls were made")
        return 0

    cdef int has_received(self, int kind) except -1:
        """Count a call that has come to its end, well or not."""
        self.num_received[kind] += 1
        return 0

    # ---- areas ------------------------------------------------------------------------------------------------

    cdef int take_area(self) noexcept:
        """The receive area of the next dispatch; what lay there is given away."""
        cdef int area = self.next_area
        self.next_area = (area + 1) % EPCY_NUM_AREAS
        return area

    cdef int free_input(self) noexcept:
        """A combine area that is nobody's, the one used longest ago first; -1: none."""
        cdef int i = self.next_input
        if self.taken[i]:
            i = (i + 1) % EPCY_NUM_AREAS
        if self.taken[i]:
            return -1
        self.next_input = (i + 1) % EPCY_NUM_AREAS
        return i

    cdef int give_input(self) except -1:
        """Take a combine area for the user."""
        cdef int i = self.free_input()
        if i < 0:
            raise StateError(f"low_latency_combine_input: both combine areas are given out, or belong to combines that "
                             f"are not received (rank {self.rank}); combine one of those, or call its hook, first")
        self.taken[i] = True
        return i

    cdef int take_input(self, LowLatencyCombineCall call, bint zero_copy) except -1:
        """Give a combine its area: the one that x is, or a free one to stage x in."""
        cdef int i
        call.area, call.in_area = -1, False
        for i in range(EPCY_NUM_AREAS):
            if call.x.data == self.inputs_at[i] and self.taken[i] and not self.unreceived[i]:
                call.area, call.in_area = i, True
        if zero_copy and not call.in_area:
            raise ArgumentError(f"x: expected, with zero_copy=True, the array that low_latency_combine_input gave out "
                                f"and that was not combined yet, got another one (rank {self.rank})")
        if not call.in_area:
            call.area = self.free_input()
        if call.area < 0:
            raise StateError(f"x: it lies outside the combine areas, and both are given out or belong to combines that "
                             f"are not received (rank {self.rank}); combine one of those, or call its hook, first")
        self.taken[call.area] = self.unreceived[call.area] = True
        return 0

    cdef int leave_input(self, LowLatencyCombineCall call) except -1:
        """Give a combine's area back."""
        self.taken[call.area] = self.unreceived[call.area] = False
        return 0

    cdef tuple result(self, LowLatencyDispatchCall call, LowLatencyHandle handle, event):
        """What a dispatch returns: views that live until the second next one."""
        cdef dict views = self.received[handle.area]
        if call.use_fp8:
            recv_x = views[KIND_FP8], views["ue8m0" if call.use_ue8m0 else "scales"]
        else:
            recv_x = views[call.x.kind]
        return recv_x, views["counts"], handle, event

    cdef int forget(self) except -1:
        """Give up all calls and all areas."""
        cdef int i
        for i in range(2):
            self.num_received[i] = self.num_sent[i]
            self.taken[i] = self.unreceived[i] = False
        self.next_area = self.next_input = 0
        return 0
