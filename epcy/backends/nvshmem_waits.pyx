# cython: boundscheck=False, wraparound=False
# distutils: libraries = epcy_cuda
"""Waits of the host for kernels, and what can go wrong in a kernel: what its report says becomes an error."""

import time

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t, uint8_t, uint32_t

import numpy as np

from epcy.backends.cuda cimport *
from epcy.backends.cuda_low_latency cimport (
    EPCY_LOW_LATENCY_FP8, EPCY_LOW_LATENCY_LOGFMT, EPCY_LOW_LATENCY_ROUND_SCALE, EPCY_LOW_LATENCY_SOURCE,
    EPCY_LOW_LATENCY_UE8M0, EPCY_LOW_LATENCY_WEIGHTS)
from epcy.backends.symmetric cimport check

from epcy.backends import verdicts
from epcy.backends.host_waits import bound_exit
from epcy.errors import BackendError, CapacityError, PeerError, StateError
from epcy.status import OPERATIONS

cdef int64_t SLICE_NS = 100_000_000     # how long a wait stays in C before it looks for Ctrl-C and dead ranks
# enum epcy_cuda_phase
PHASES = ("", "arrival", "counts", "starts", "data", "completion", "reset", "acknowledgement", "data", "arrival",
          "forward", "credit")
OP_LOW_LATENCY = OPERATIONS.index("low_latency_dispatch")   # operations from here on have headers of their own


cdef class NvshmemWaits(NvshmemHeap):
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
        """Make the kernels that wait give up; those of reset do not, nor do others wait for a rank that is in it."""
        cdef uint32_t one = 1
        cdef epcy_local *local = NULL
        self.broken = True
        if self.reset_is_open:
            return
        # First in memory that the kernels look at: streams share queues, and a copy may stand behind the kernel.
        self.mapped.report.stop = 1
        told = epcy_cuda_put(self.start + self.peers.control.local + <int64_t>&local.broken, &one, 4) == 0
        self.tell_gone()
        if told:                                # who comes later finds the Buffer broken
            self.mapped.report.stop = 0

    cdef int tell_gone(self, uint32_t spared=0, uint32_t how=LEFT) noexcept:
        """Tell the other ranks' kernels, but for some, that they need not wait for this one."""
        cdef int rank
        for rank in range(self.num_ranks):
            if spared >> rank & 1:
                continue
            epcy_cuda_put(self.peers.base[rank] + self.peers.control.left + 4 * self.rank, &how, 4)
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
        if r.expired and r.phase == EPCY_CUDA_ELSEWHERE:
            self.broken = True      # the ranks' epochs of the calls that they are in differ from now on
            headers = <uint32_t *>&r.late_text[0]
            error = verdicts.elsewhere(r.epoch, self.rank, [headers[i] & 7 for i in range(self.num_ranks)])
        elif r.expired:
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
        elif r.without:
            error = verdicts.left_out(r.without_epoch, OPERATIONS[r.without_operation],
                                      [i for i in range(self.num_ranks) if r.without >> i & 1])
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
        r.expired = r.late_verdict = r.without = 0
        r.late_rows = 0
        return error

    cdef object late_ranks(self):
        """The error of a wait that expired: who had not come, as far as this rank's words tell."""
        cdef epcy_report *r = self.mapped.report
        cdef int64_t R = self.num_ranks
        phase, culprits, seen, words = PHASES[r.phase], [r.peer], [r.seen >> 32], None
        expected = r.expected >> 32
        if phase == "arrival" and r.operation < OP_LOW_LATENCY:
            words = self.arrival_words(r.epoch)
        elif phase == "reset":
            words = self.fetch(self.peers.control.resets, R, np.uint64)
        if words is not None:
            words = (words >> np.uint64(32)).tolist()
            missing = [rank for rank in range(R) if words[rank] != expected]
            if missing:
                culprits, seen = missing, [words[rank] for rank in missing]
        operation = "reset" if phase == "reset" else OPERATIONS[r.operation]
        where = ", ".join([f"rank {rank} (pid {self.identities[rank].pid}{self.node_of(rank)}) was last seen in call "
                           f"{epoch}" for rank, epoch in zip(culprits[:4], seen)])
        gone = [r.peer] if r.gone else []
        return verdicts.late(operation, r.epoch, self.rank, gone or culprits, phase, expected, seen, where, gone,
                             0.0 if r.gone else r.timeout_ns * 1e-9, r.timeout_ns * 1e-9)

    def arrival_words(self, epoch):
        """The words by which ranks tell that they are in a call, by rank."""
        at = self.peers.control.headers + (epoch & 1) * self.num_ranks * EPCY_NUM_HEADERS * 8
        return self.fetch(at, self.num_ranks * EPCY_NUM_HEADERS, np.uint64)[::EPCY_NUM_HEADERS]

    def node_of(self, rank):
        """A word for errors on where a rank is, where there are several nodes."""
        return ""

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


def records(headers):
    """Take headers apart: operation, dtype, layout, cached, has weights, alignment, routing of each rank."""
    return [(h & 7, h >> 3 & 7, h >> 6 & 1, h >> 7 & 1, h >> 8 & 1, h >> 9 & 1023, h >> 19 & 511) for h in headers]


def low_latency_records(headers):
    """Take those of low-latency calls apart: operation, dtype, the options, has weights, routing."""
    bits = (EPCY_LOW_LATENCY_FP8, EPCY_LOW_LATENCY_ROUND_SCALE, EPCY_LOW_LATENCY_UE8M0, EPCY_LOW_LATENCY_SOURCE,
            EPCY_LOW_LATENCY_LOGFMT, EPCY_LOW_LATENCY_WEIGHTS)
    return [(h & 7, h >> 3 & 7, *[int(h & bit != 0) for bit in bits], h >> 19 & 511) for h in headers]
