# cython: boundscheck=False, wraparound=False
# distutils: libraries = epcy_cuda
"""The GPU's part of what a Buffer counts: kernels add to counters in device memory and stamp their times; here they are
read, when somebody asks, and added to the meter. Nothing is read in a call but while `python -m epcy top` looks on.

The last 1024 calls of a kind have stamps: of more between two readings, the earlier ones count nowhere.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

import contextlib
import os
import time

import numpy as np

from epcy.backends.cuda cimport *
from epcy.backends.meter cimport (
    EPCY_GAUGES_AT, EPCY_METER_OPS, EPCY_NUM_SPANS, EPCY_SPAN_CALL, LOW_LATENCY_ROWS, RECEIVE_ROWS, Meter,
    epcy_gauge_experts, epcy_gauges, epcy_gauges_bytes, epcy_meter, epcy_meter_record, epcy_meter_rows)
from epcy.backends.symmetric cimport check

from epcy import status as status_pages
from epcy.errors import ArgumentError, BackendError


cdef class Counters:
    cdef int open(self, Meter meter, char *address, int device, int64_t num_experts) except -1:
        """Local: compare the clocks; the device is the current one and its counters are zero."""
        cdef int64_t error_ns = 0
        self.meter, self.address, self.device, self.num_experts = meter, address, device, num_experts
        self.nbytes = sizeof(epcy_counters) + num_experts * 8
        self.seen = np.zeros(self.nbytes, np.uint8)
        self.calls = []
        check(epcy_cuda_compare_clocks(20, &self.ahead_ns, &error_ns), "comparing clocks")
        meter.clock_error_ns = error_ns
        meter.refresh, meter.forget = self.read, self.forget_most_rows
        return 0

    cdef object open_page(self, directory):
        """Make the status page of this rank; returns an error, or None. What it says of calls is what the host does."""
        cdef uint8_t[::1] view
        if directory == "":
            return None
        nbytes = EPCY_GAUGES_AT + epcy_gauges_bytes(self.num_experts)
        try:
            self.page, self.page_path = status_pages.open_page(status_pages.folder(directory), self.meter.rank, nbytes)
        except ArgumentError as error:
            return error
        except OSError as error:
            return ArgumentError(f"status_dir: could not make a status page: {error}; set EPCY_STATUS_DIR")
        view = self.page
        self.status = <epcy_status *>&view[0]
        self.meter.attach(self.page)
        self.status.version, self.status.pid = EPCY_STATUS_VERSION, os.getpid()
        self.status.rank, self.status.size = self.meter.rank, self.meter.num_ranks
        self.status.since_ns, self.status.magic = time.monotonic_ns(), EPCY_STATUS_MAGIC
        return None

    cdef int enter(self, int op) except -1:
        """The host begins a call."""
        if self.status != NULL:
            self.status.op, self.status.phase, self.status.since_ns = op, EPCY_PHASE_DATA, time.monotonic_ns()
            self.status.num_calls[op] += 1
            self.status.epoch += 1
        return 0

    cdef int leave(self) except -1:
        """The host leaves a call, outside of captures; while somebody looks on, sums are fetched once a second."""
        cdef int64_t now
        if self.status != NULL:
            now = time.monotonic_ns()
            self.status.phase, self.status.since_ns = EPCY_PHASE_IDLE, now
            if (now - self.status.watched_ns < 3_000_000_000 and now - self.last_read_ns > 1_000_000_000
                    and self.meter.flows is None):
                self.last_read_ns = now
                self.read()
        return 0

    cdef int close(self) except -1:
        """Read a last time: the memory goes; and so does the page."""
        with contextlib.suppress(BackendError):     # why the Buffer ends is somebody else's to tell
            self.read()
        self.meter.refresh = self.meter.forget = None
        self.meter.attach(None)
        self.status = NULL
        if self.page_path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.page_path)
        self.page = self.page_path = None
        return 0

    cdef int follow(self, int op, const int32_t *counts, int num_chunks, object owner, object event) except -1:
        """Keep where a call's tokens went, so many numbers a rank, until its arrows can be drawn; and when it ends."""
        self.calls.append((op, <uint64_t>counts, num_chunks, owner))
        self.last_call = event
        return 0

    def read(self, bint wait=False):
        """Bring everything new into the meter; `wait`: for the end of the calls that a trace follows too."""
        cdef epcy_meter *m = self.meter.m
        cdef epcy_gauges *g = m.gauges
        cdef int64_t *all_experts = epcy_gauge_experts(g)
        cdef epcy_counters *now
        cdef epcy_counters *before
        cdef uint64_t *experts
        cdef uint64_t *experts_before
        cdef uint8_t[::1] raw, raw_before = self.seen
        cdef int previous = 0
        cdef int64_t r
        if wait and self.last_call is not None:
            self.last_call.synchronize()
            self.last_call = None
        fetched = np.empty(self.nbytes, np.uint8)
        raw = fetched
        check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
        try:
            check(epcy_cuda_fetch(&raw[0], self.address, self.nbytes), "cudaMemcpy")
            now, before = <epcy_counters *>&raw[0], <epcy_counters *>&raw_before[0]
            for r in range(self.meter.num_ranks):
                m.wait_ns[r] += now.wait_ns[r] - before.wait_ns[r]
                g.wait_ns += now.wait_ns[r] - before.wait_ns[r]
                m.tokens_to[r] += now.tokens_to[r] - before.tokens_to[r]
                g.tokens_sent += now.tokens_to[r] - before.tokens_to[r]
                m.tokens_from[r] += now.tokens_from[r] - before.tokens_from[r]
                g.tokens_received += now.tokens_from[r] - before.tokens_from[r]
            g.bytes_moved += now.bytes_moved - before.bytes_moved
            experts, experts_before = <uint64_t *>(now + 1), <uint64_t *>(before + 1)
            for r in range(self.num_experts):
                all_experts[r] += experts[r] - experts_before[r]
            for r in range(2):
                epcy_meter_rows(m, RECEIVE_ROWS, r, now.most_rows[0][r])
                epcy_meter_rows(m, LOW_LATENCY_ROWS, r, now.most_rows[1][r])
            self.seen = fetched
            self.read_stamps(now)
            if self.beside is not None:
                self.beside()
        finally:
            epcy_cuda_set_device(previous, NULL)

    def forget_most_rows(self):
        """Let the kernels find anew how full the receive areas are; all else counts on, and is read as differences."""
        cdef epcy_counters *at = <epcy_counters *>self.address
        cdef uint64_t[4] none = [0, 0, 0, 0]
        cdef int previous = 0
        check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
        try:
            check(epcy_cuda_put(&at.most_rows[0][0], &none[0], sizeof(none)), "cudaMemcpy")
        finally:
            epcy_cuda_set_device(previous, NULL)

    cdef int read_stamps(self, epcy_counters *now) except -1:
        """Record the calls that are new, in the order in which they began."""
        cdef const epcy_stamp *s
        cdef int kind, i
        found = []
        for kind in range(EPCY_NUM_STAMP_KINDS):
            for i in range(EPCY_NUM_STAMPS):
                s = &now.stamps[kind][i]
                if s.epoch_op and s.again == s.epoch_op and s.end_ns[EPCY_SPAN_CALL] >= s.start_ns and (
                        <int32_t>(<uint32_t>(s.epoch_op >> 32) - self.last_epochs[kind]) > 0):
                    found.append((s.start_ns, kind, i))
        found.sort()
        epochs = {}
        for _, kind, i in found:
            s = &now.stamps[kind][i]
            self.last_epochs[kind] = <uint32_t>(s.epoch_op >> 32)
            if kind < EPCY_STAMP_LOW_LATENCY_DISPATCH_RECEIVE:     # a hook's half has had its arrows
                epochs.setdefault(<uint32_t>s.epoch_op, []).append(s.epoch_op >> 32)
            self.record(s)
        if self.meter.flows is not None:
            self.draw(epochs)
        self.calls = []
        return 0

    def draw(self, dict epochs):
        """Tell the trace which tokens went where: where each call made here has its stamp (graphs make others too)."""
        cdef int32_t counts[32 * 32]
        cdef int r, c
        for op in {call[0] for call in self.calls}:
            mine = [call for call in self.calls if call[0] == op]
            if len(mine) != len(epochs.get(op, ())):
                continue
            for epoch, (_, address, num_chunks, _) in zip(epochs[op], mine):
                check(epcy_cuda_fetch(&counts[0], <const void *><uint64_t>address,
                                      self.meter.num_ranks * num_chunks * 4), "cudaMemcpy")
                to = [0] * self.meter.num_ranks
                for r in range(self.meter.num_ranks):
                    for c in range(num_chunks):
                        to[r] += counts[r * num_chunks + c]
                self.meter.flows.append((epoch, op, tuple(to)))

    cdef int record(self, const epcy_stamp *s) except -1:
        """One call: its phases follow each other in the order of their ends."""
        cdef epcy_meter *m = self.meter.m
        cdef uint32_t op = <uint32_t>s.epoch_op
        cdef uint64_t at = s.start_ns, epoch = s.epoch_op >> 32
        cdef int span, first
        if op >= EPCY_METER_OPS:
            return 0
        while True:
            first = -1
            for span in range(1, EPCY_NUM_SPANS):
                if s.end_ns[span] > at and (first < 0 or s.end_ns[span] < s.end_ns[first]):
                    first = span
            if first < 0:
                break
            epcy_meter_record(m, op, first, <int64_t>at - self.ahead_ns, <int64_t>s.end_ns[first] - self.ahead_ns,
                              epoch)
            at = s.end_ns[first]
        epcy_meter_record(m, op, EPCY_SPAN_CALL, <int64_t>s.start_ns - self.ahead_ns,
                          <int64_t>s.end_ns[EPCY_SPAN_CALL] - self.ahead_ns, epoch)
        m.gauges.num_calls += 1
        m.gauges.busy_ns += s.end_ns[EPCY_SPAN_CALL] - s.start_ns
        return 0
