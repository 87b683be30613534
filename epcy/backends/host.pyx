# cython: boundscheck=False, wraparound=False
"""The host backend: ranks of one machine over an MPI shared-memory window.

A call is one step of the epoch on every rank: `begin` a record, `arrive` (publish it, wait for everybody's, compare),
move the data, `finish` (say so, wait for everybody). The C side is src/host; no MPI call is made here after the
constructor and before `free`.
"""

import os
import time
import weakref
from threading import get_native_id

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

import numpy as np

from epcy.arrays cimport KIND_INT64, Array, describe, memory_at
from epcy.backends.base cimport Backend
from epcy.backends.call cimport CombineCall, DispatchCall
from epcy.backends.meter cimport (
    COMBINE_ROWS, EPCY_GAUGES_AT, EPCY_SPAN_COUNT, EPCY_SPAN_SEND, RECEIVE_ROWS, epcy_gauges_bytes, epcy_meter_rows,
    epcy_meter_tokens)
from epcy.backends.window cimport allocate
from epcy.event cimport completed
from epcy.handle cimport Area, Combine, Handle
from epcy.layout cimport (
    EPCY_NUM_AREAS, epcy_default_num_rows, epcy_heap_layout, epcy_low_latency_area, epcy_low_latency_area_layout,
    epcy_num_local_experts, epcy_num_scales, epcy_shape, region_bytes, shape_of)

from epcy import status as status_pages
from epcy.backends import bootstrap, verdicts
from epcy.backends.names import LAYOUTS
from epcy.backends.window import no_room
from epcy.errors import ArgumentError, CapacityError, EpcyError, HeapError, MismatchError, PeerError, PeerTimeoutError

cdef int64_t SLICE_NS = 100_000_000     # how long a wait stays in C before it looks for Ctrl-C and dead ranks

cdef extern from "Python.h":
    int Py_AtExit(void (*function)() noexcept nogil)

OPERATIONS = status_pages.OPERATIONS
NO_ID = -0x7F7F7F7F7F7F7F80             # bytes of 0x80
_inspected = weakref.WeakSet()          # Buffers of this process with the option `check`
WAITED_FOR = {EPCY_WORD_ARRIVED: "arrival", EPCY_WORD_DONE: "completion", EPCY_WORD_RESET: "reset",
              EPCY_WORD_RECEIVED_DISPATCH: "receipt", EPCY_WORD_RECEIVED_COMBINE: "receipt"}


def heap_layout(dict sizes):
    """Bytes of the regions of a rank's allocation, by name."""
    cdef epcy_shape s = shape_of(sizes)
    control_bytes = epcy_host_control_bytes(&s)
    return region_bytes(epcy_heap_layout(&s, control_bytes), control_bytes - epcy_low_latency_wire_bytes(&s))


def simd_level(limit=None):
    """The instruction set in use: 0 portable, 1 AVX2, 2 AVX-512; with `limit`, use no more than that."""
    return epcy_simd_level() if limit is None else epcy_simd_limit(limit)


def to_fp8(Array x, bint power_of_two, payload, scales):
    """Cast the rows of x into the arrays given."""
    cdef Array p = describe(payload, "payload"), s = describe(scales, "scales")
    with nogil:
        epcy_cast_to_fp8(x.data, x.kind, x.shape[0], x.shape[1], power_of_two, <uint8_t *>p.data, <float *>s.data)


def from_fp8(Array payload, Array scales, out):
    """Cast the pair's rows into the array given."""
    cdef Array o = describe(out, "out")
    with nogil:
        epcy_cast_from_fp8(<uint8_t *>payload.data, <float *>scales.data, payload.shape[0], payload.shape[1], o.kind,
                           o.data)


cdef class HostHandle(Handle):
    def __dealloc__(self):
        free(self.routes)
        free(self.expert_numbers)

    cdef int64_t _num_recv_tokens(self) noexcept:
        return self.num_true_rows

    cpdef object expert_counts(self):
        return np.array([self.expert_numbers[i] for i in range(self.num_local)], np.int64)


cdef class HostBackend(Backend):
    def __cinit__(self):
        self.h.base = NULL

    def __init__(self, comm, dict shape, dict options, list identities, object token):
        """Collective, blocking: allocate the shared window over `comm`, whose ranks share this machine."""
        cdef int size = comm.size
        super().__init__(comm, shape, options, identities, token, np)
        self.h.shape, self.h.rank = self.shape, comm.rank
        options["num_sms"] = self.num_threads = options["num_sms"] or 1
        nbytes = heap_layout(shape)["total"]
        self.reach("constructor", "arrival")
        error = no_room(nbytes, size)
        if self.faults is not None and self.faults.is_full():
            error = HeapError(f"num_max_tokens_per_rank: the Buffer needs {nbytes * size} bytes of shared memory; "
                              "there is no room, says EPCY_FAULTS (full); give fewer num_max_tokens_per_rank")
        bootstrap.exchange(comm, None, error, self.timeout, "Buffer()")
        self.h.base = <char **>calloc(size, sizeof(char *))
        if self.h.base == NULL:
            raise MemoryError
        self.heap = allocate(comm, nbytes, self.h.base)
        code = epcy_host_open(&self.h, options["spin_us"], options["num_sms"])
        error = None
        if code:
            error = HeapError(f"num_sms: could not start {options['num_sms']} threads ({os.strerror(code)})")
        options["stream_bytes"] = EPCY_STREAM_BYTES if options["stream_bytes"] is None else options["stream_bytes"]
        options["chunk_tokens"] = options["chunk_tokens"] or EPCY_CHUNK_TOKENS
        self.use_knobs(options)
        if self.meter is not None:
            self.h.meter = self.meter.m
        error = self.open_status(options["status_dir"]) or error
        self.start, self.heap_layout = self.heap.start, self.h.heap
        self.open_areas(memory_at(self.start, nbytes, self.heap))
        if self.checks:
            _inspected.add(self)
        try:
            bootstrap.exchange(comm, None, error, self.timeout, "Buffer()")     # also: every control block is zero now
        except EpcyError as refused:
            self.remove_page()
            if not isinstance(refused, PeerTimeoutError):       # then every rank raises
                self.heap.close()
            raise

    def __dealloc__(self):
        if self.h.base != NULL:
            epcy_host_close(&self.h)
            free(self.h.base)

    def use_sms(self, num_sms):
        """Let calls use so many threads from now on; None: one."""
        cdef int code = epcy_host_use_threads(&self.h, num_sms or 1)
        if code:
            raise HeapError(f"num_sms: could not start {num_sms} threads ({os.strerror(code)}; rank {self.rank}); "
                            "give fewer")
        self.num_threads = num_sms or 1

    def use_knobs(self, dict options):
        """Take from now on what the options say of how a call goes about its work."""
        self.h.stream_bytes, self.h.chunk_tokens = options["stream_bytes"], options["chunk_tokens"]

    def num_blocks(self, str op, str layout):
        """How many threads a call has now."""
        return self.num_threads

    def most_sms(self, str op, str layout, int num_cores):
        """How many threads could be of use: a core each."""
        return num_cores

    cdef object open_status(self, directory):
        """Map the status file; the first fields of it and of the status in the window."""
        cdef epcy_status start
        cdef const uint8_t[::1] view
        start.magic, start.version, start.pid = EPCY_STATUS_MAGIC, EPCY_STATUS_VERSION, os.getpid()
        start.rank, start.size = <int>self.h.rank, <int>self.h.shape.num_ranks
        memcpy(epcy_host_status(&self.h, self.h.rank), &start, 24)
        if directory == "":
            return None
        try:
            nbytes = EPCY_GAUGES_AT + epcy_gauges_bytes(epcy_num_local_experts(&self.h.shape))
            self.page, self.page_path = status_pages.open_page(status_pages.folder(directory), self.h.rank, nbytes)
        except ArgumentError as error:
            return error
        except OSError as error:
            return ArgumentError(f"status_dir: could not make a status page: {error}; set EPCY_STATUS_DIR")
        view = self.page
        self.h.page = <epcy_status *>&view[0]
        if self.meter is not None:
            self.meter.attach(self.page)
        memcpy(self.h.page, &start, 24)
        return None

    def remove_page(self):
        if self.page_path is not None:
            self.h.page = NULL
            if self.meter is not None:
                self.meter.attach(None)
            try:
                os.unlink(self.page_path)
            except FileNotFoundError:
                pass
            self.page = self.page_path = None

    cdef object view(self, int64_t offset, tuple shape, dtype, owner):
        return np.ndarray(shape, dtype, owner, offset)

    cdef int touch_rank(self, int64_t rank) except -1:
        """Look at every page of a rank's memory that calls use, so that this process has it."""
        cdef epcy_shape *s = &self.h.shape
        cdef epcy_low_latency_area low = epcy_low_latency_area_layout(s)
        cdef int64_t rows = min(s.num_rows, epcy_default_num_rows(s)), local = epcy_num_local_experts(s)
        cdef int64_t slots = s.num_ranks * s.num_low_latency_tokens, at, i, expert, row_bytes
        # Of each expert twice a balanced load: all of its slots would be far more memory than is ever used.
        cdef int64_t some = min(slots, 2 * (s.num_low_latency_tokens * s.num_topk // local) + 1)
        with nogil:
            epcy_host_touch(&self.h, rank, 0, self.h.heap.receive[0])
            for i in range(2 * EPCY_NUM_AREAS):
                at = self.h.heap.receive[i] if i < EPCY_NUM_AREAS else self.h.heap.combine[i - EPCY_NUM_AREAS]
                epcy_host_touch(&self.h, rank, at + self.h.area.payload, rows * s.row_bytes)
                epcy_host_touch(&self.h, rank, at + self.h.area.scales, rows * epcy_num_scales(s.hidden) * 4)
                epcy_host_touch(&self.h, rank, at + self.h.area.topk_idx, rows * s.num_topk * 8)
                epcy_host_touch(&self.h, rank, at + self.h.area.topk_weights, rows * s.num_topk * 4)
            for i in range(EPCY_NUM_AREAS if slots else 0):
                at = self.h.heap.low_latency_x[i]
                row_bytes = s.hidden
                while row_bytes <= s.row_bytes:     # where an expert's rows begin depends on the element's size
                    for expert in range(local):
                        epcy_host_touch(&self.h, rank, at + low.payload + expert * slots * row_bytes, some * row_bytes)
                        epcy_host_touch(&self.h, rank, self.h.heap.low_latency_y[i] + expert * slots * row_bytes,
                                        some * row_bytes)
                    row_bytes *= 2
                epcy_host_touch(&self.h, rank, at + low.scales, low.bytes - low.scales)
        return 0

    def touch(self):
        """Have the pages that calls use: this rank's own first, so that they lie near it, then everybody's."""
        cdef int64_t rank
        self.touch_rank(self.h.rank)
        self.barrier()
        for rank in range(self.h.shape.num_ranks):
            self.touch_rank(rank)

    # ---- one step of the epoch ----------------------------------------------------------------------------

    cdef epcy_record *begin(self, int op) except NULL:
        """Start a call: take the next epoch and its record."""
        cdef epcy_record *record
        self.reach(OPERATIONS[op], "arrival")
        # A rank that refused call n - 1 did not wait there: the record of n - 2 must not be needed any more.
        self.wait(op, EPCY_WORD_ARRIVED, self.h.epoch, self.h.epoch + 1)
        self.h.epoch += 1
        self.in_call = True
        record = epcy_host_record(&self.h, self.h.rank, self.h.epoch)
        memset(record, 0, sizeof(epcy_record) - EPCY_TEXT_BYTES)
        record.epoch, record.op = self.h.epoch, op
        if self.checks:
            record.thread = get_native_id()
        epcy_host_phase(&self.h, op, EPCY_PHASE_ARRIVAL)
        return record

    cdef int arrive(self, int op) except -1:
        self.tell(op, "arrival", EPCY_WORD_ARRIVED, self.h.epoch)
        self.wait(op, EPCY_WORD_ARRIVED, self.h.epoch, self.h.epoch)
        return self.reach(OPERATIONS[op], "data")

    cdef int finish(self, int op) except -1:
        self.reach(OPERATIONS[op], "completion")
        self.tell(op, "completion", EPCY_WORD_DONE, self.h.epoch)
        epcy_host_phase(&self.h, op, EPCY_PHASE_COMPLETION)
        self.wait(op, EPCY_WORD_DONE, self.h.epoch, self.h.epoch)
        epcy_host_phase(&self.h, op, EPCY_PHASE_IDLE)
        self.in_call = False
        if self.inspection is not None:
            self.inspect(OPERATIONS[op])
        return 0

    cdef int tell(self, int op, str phase, int word, uint64_t value) except -1:
        """Store a word, unless a fault loses it."""
        if self.faults is None or not self.faults.drops(OPERATIONS[op] if op else "reset", phase):
            epcy_host_store(&self.h, word, value)
        return 0

    def step_out(self, int op):
        """Leave a call in which this rank moves nothing, so that ranks that go through with it do not wait for it."""
        self.reach(OPERATIONS[op], "completion")
        self.tell(op, "completion", EPCY_WORD_DONE, self.h.epoch)
        epcy_host_phase(&self.h, op, EPCY_PHASE_IDLE)
        self.in_call = False

    cdef int leave(self) except -1:
        if self.in_call and not self.broken:
            self.break_off(self.h.epoch)
        return 0

    def refuse(self, int op, str text):
        """Take part in a call without data, so that the others learn why and stay in step."""
        self.begin(op)
        self.publish_refusal(op, text)

    def publish_refusal(self, int op, str text):
        cdef epcy_record *record = epcy_host_record(&self.h, self.h.rank, self.h.epoch)
        cdef bytes raw = text.encode()[:EPCY_TEXT_BYTES - 1]
        memcpy(record.text, <const char *>raw, len(raw))
        record.text[len(raw)] = 0
        record.refused = 1
        epcy_host_store(&self.h, EPCY_WORD_ARRIVED, self.h.epoch)
        epcy_host_store(&self.h, EPCY_WORD_DONE, self.h.epoch)
        epcy_host_phase(&self.h, op, EPCY_PHASE_IDLE)
        self.in_call = False

    cdef int wait(self, int op, int word, uint64_t value, uint64_t first) except -1:
        """Wait until `word` of every rank is at least `value`, or raise: then this rank leaves call `first`."""
        cdef int state
        with nogil:
            state = epcy_host_wait(&self.h, word, value, SLICE_NS)
        if state == EPCY_WAIT_DONE:
            return 0
        try:
            self.wait_longer(op, word, value, first, state)
        except BaseException:       # PeerTimeoutError; but a signal's handler may raise in any line of Python
            if op == EPCY_OP_DISPATCH and word == EPCY_WORD_ARRIVED:
                (<Area>self.areas[self.next_area]).generation += 1      # a late rank may still write there
            self.in_call = False
            if word == EPCY_WORD_RESET:     # whoever is through with reset() goes on waiting for this rank
                self.broken = True
            else:
                self.break_off(first)
            raise
        return 0

    cdef int wait_longer(self, int op, int word, uint64_t value, uint64_t first, int state) except -1:
        """Go on waiting, with an eye on signals, on dead ranks and on the clock."""
        cdef double start = time.monotonic() - SLICE_NS * 1e-9
        while True:
            PyErr_CheckSignals()
            missing = self.missing(word, value)
            dead = self.dead(missing)
            left = self.timeout - (time.monotonic() - start)
            late = state == EPCY_WAIT_BROKEN or missing and (
                dead or left <= 0 or word != EPCY_WORD_RESET and any([self.has_left(r) for r in missing]))
            if late and not self.goes_on(op, missing, dead, left):
                if dead:
                    self.mourn(op, word, first, dead)
                self.give_up(op, word, value, first, time.monotonic() - start)
            if missing and not late and self.inspection is not None:
                self.inspect_order(op, missing)
            limit = min(SLICE_NS, <int64_t>(max(left, 0.0) * 1e9) + 1)
            state = self.wait_slice(word, value, limit)
            if state == EPCY_WAIT_DONE:
                return 0

    def wait_slice(self, int word, uint64_t value, int64_t slice_ns):
        cdef int state
        with nogil:
            state = epcy_host_wait(&self.h, word, value, slice_ns)
        return state

    def missing(self, int word, uint64_t value):
        return [r for r in range(self.h.shape.num_ranks)
                if not self.h.masked[r] and epcy_host_word(&self.h, r, word) < value]

    def goes_on(self, int op, missing, dead, double left):
        """Whether this call can do without the ranks that are dead, gone, or too late: then they are masked."""
        return False

    def inspect_order(self, int op, missing):
        """Raise if a rank that is missing here waits for this one in another Buffer: neither would ever come."""
        for other in list(_inspected):
            for r in missing:
                there = None if other is self else (<HostBackend>other).waits_there(self, r)
                if there is not None:
                    time.sleep(0.15)        # it finds the same, unless this rank had left before
                    (<HostBackend>other).break_off((<HostBackend>other).h.epoch + 1)
                    raise verdicts.crossed(OPERATIONS[op], self.h.epoch, self.h.rank, r, *there)

    def waits_there(self, HostBackend first, int rank):
        """Whether the process of rank `rank` of `first` is in a call of this Buffer that this one has not entered."""
        cdef int64_t r
        cdef epcy_record *last
        cdef epcy_record *theirs
        if self.broken or self.h.base == NULL:
            return None
        for r in range(self.num_ranks):
            if self.identities[r] != first.identities[rank]:
                continue
            at = status_pages.parse((<const char *>epcy_host_status(&self.h, r))[:128])
            if at is None or at.phase == "idle" or at.epoch <= self.h.epoch:
                return None
            # Two threads with a Buffer each may be in both: then the other one still comes.
            theirs = epcy_host_record(&self.h, r, at.epoch)
            last = epcy_host_record(&first.h, rank, epcy_host_word(&first.h, rank, EPCY_WORD_ARRIVED))
            if theirs.thread and last.thread and theirs.thread != last.thread:
                return None
            return at.operation, at.epoch, self.h.epoch
        return None

    def has_left(self, int64_t rank):
        """Whether that rank gave up, or is in a reset() that this rank knows nothing of."""
        return (epcy_host_word(&self.h, rank, EPCY_WORD_BROKEN) != 0
                or epcy_host_word(&self.h, rank, EPCY_WORD_RESET) > self.num_resets)

    def break_off(self, uint64_t first):
        """Leave call `first` and what follows: there the others must not touch this rank's memory nor wait for it."""
        self.broken = True
        epcy_host_store(&self.h, EPCY_WORD_BROKEN, first or 1)
        epcy_host_phase(&self.h, 0, EPCY_PHASE_IDLE)

    def where(self, ranks):
        """Say where these ranks are."""
        cdef const uint8_t *at
        lines = []
        for r in ranks[:16]:
            at = <const uint8_t *>epcy_host_status(&self.h, r)
            state = status_pages.parse((<const char *>at)[:128])
            broken = ", gave up" if epcy_host_word(&self.h, r, EPCY_WORD_BROKEN) else ""
            lines.append(f"rank {r} (pid {self.identities[r].pid}) is {state}{broken}")
        return "; ".join(lines)

    def give_up(self, int op, int word, uint64_t value, uint64_t first, double waited):
        """Raise: a rank did not come in time, or gave up itself."""
        gone = [r for r in range(self.h.shape.num_ranks)
                if r != self.h.rank and not self.h.masked[r] and self.has_left(r)]
        missing = self.missing(word, value)
        # Who left without coming; else who keeps even those waiting that gave up; else who gave up.
        left = [r for r in missing if r in gone] if word != EPCY_WORD_RESET else []
        culprits = left or missing or gone
        dead = self.dead(culprits)
        if dead:        # somebody else found out first
            self.mourn(op, word, first, dead)
        seen = [epcy_host_word(&self.h, r, word) for r in culprits[:16]]
        name = "reset" if word == EPCY_WORD_RESET else OPERATIONS[op]
        raise verdicts.late(name, first, self.h.rank, culprits, WAITED_FOR[word], value, seen,
                            self.where(culprits), gone, waited, self.timeout)

    def mourn(self, int op, int word, uint64_t first, list dead):
        """Raise: ranks have ended."""
        bound_exit()
        name = "reset" if word == EPCY_WORD_RESET else OPERATIONS[op]
        raise verdicts.ended(name, first, self.h.rank, dead, self.identities[dead[0]].pid,
                             WAITED_FOR[word])

    cdef object disagreement(self):
        """Compare the records of all ranks: the error that every rank must raise, or None."""
        cdef epcy_record *first = epcy_host_record(&self.h, 0, self.h.epoch)
        cdef epcy_record *r
        cdef int64_t rank, size = self.h.shape.num_ranks
        cdef bint differs = False
        for rank in range(size):
            r = epcy_host_record(&self.h, rank, self.h.epoch)
            if r.epoch != self.h.epoch:         # a low-latency call has no record
                return self.mismatch()
            if r.refused and rank != self.h.rank:
                text = (<bytes>r.text).decode(errors="replace")
                return PeerError(f"rank {rank} refused {OPERATIONS[r.op]} (call {self.h.epoch}): {text}", [rank])
            differs |= (r.op != first.op or r.dtype != first.dtype or r.layout != first.layout
                        or r.cached != first.cached or r.has_weights != first.has_weights
                        or r.alignment != first.alignment or r.routing != first.routing)
        return self.mismatch() if differs else None

    def mismatch(self):
        cdef epcy_record *r
        records = []
        ops = [self.op_of(rank, self.h.epoch) for rank in range(self.h.shape.num_ranks)]
        if any([op in (0, EPCY_OP_LOW_LATENCY_DISPATCH, EPCY_OP_LOW_LATENCY_COMBINE) for op in ops]):
            return verdicts.low_latency_mismatch(self.h.epoch, [(op,) + (0,) * 8 for op in ops])
        for rank in range(self.h.shape.num_ranks):
            r = epcy_host_record(&self.h, rank, self.h.epoch)
            records.append((r.op, r.dtype, r.layout, r.cached, r.has_weights, r.alignment, r.routing))
        return verdicts.mismatch(self.h.epoch, records)

    # ---- dispatch -----------------------------------------------------------------------------------------

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
        with nogil:
            if uncached:
                epcy_host_place(&self.h, &d)
            epcy_host_send(&self.h, &d)
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

    cdef int count_sums(self, HostHandle handle, int64_t row_bytes) except -1:
        """Add a combine to the meter: what it sends to a rank is what came from there."""
        cdef int64_t r, size = self.h.shape.num_ranks
        for r in range(size):
            if r != self.h.rank:
                self.meter.m.gauges.bytes_moved += handle.tokens[size + r] * row_bytes
        if self.meter.flows is not None:
            self.meter.note(self.h.epoch, EPCY_OP_COMBINE, handle.tokens + size)
        return 0

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

    # ---- combine ------------------------------------------------------------------------------------------

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
        with nogil:
            epcy_host_combine_rows(&self.h, &c)
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

    # ---- what host_low_latency.pyx needs of C -----------------------------------------------------------------

    cdef void store(self, int word, uint64_t value) noexcept:
        epcy_host_store(&self.h, word, value)

    cdef void phase(self, int op, int phase) noexcept:
        epcy_host_phase(&self.h, op, phase)

    cdef void open_call(self, int op) noexcept:
        epcy_host_open_call(&self.h, op)

    cdef void receiving(self, int op, uint64_t epoch) noexcept:
        epcy_host_phase(&self.h, op, EPCY_PHASE_COMPLETION)
        if self.h.meter != NULL:
            self.h.meter.epoch = epoch

    cdef void span(self, int span) noexcept:
        epcy_host_span(&self.h, span)

    cdef epcy_low_latency_header *header(self, int64_t rank, int kind, int slot) noexcept:
        return epcy_low_latency_header_at(&self.h, rank, kind, slot)

    cdef const epcy_low_latency_header *find(self, int64_t rank, int kind, uint64_t epoch) noexcept:
        return epcy_low_latency_find(&self.h, rank, kind, epoch)

    cdef void send_rows(self, epcy_low_latency_send *call) noexcept nogil:
        epcy_host_low_latency_send(&self.h, call)

    cdef int64_t receive_rows(self, const epcy_low_latency_receive *call) noexcept nogil:
        return epcy_host_low_latency_receive(&self.h, call)

    cdef void stage_rows(self, char *to, const char *data, const int64_t *counts, int64_t row_bytes) noexcept nogil:
        epcy_host_low_latency_stage(&self.h, to, data, counts, row_bytes)

    cdef int64_t sum_rows(self, const epcy_low_latency_combine *call) noexcept nogil:
        return epcy_host_low_latency_combine(&self.h, call)

    cdef int32_t *bases_of(self, int64_t rank, int kind, int slot) noexcept:
        return epcy_low_latency_bases(&self.h, rank, kind, slot)

    cdef void publish(self, epcy_low_latency_header *header, uint64_t epoch) noexcept:
        epcy_low_latency_publish(header, epoch)

    cdef void invalidate(self, int kind, uint64_t epoch) noexcept:
        epcy_low_latency_invalidate(&self.h, kind, epoch)

    cdef bint is_masked_by(self, int64_t rank, uint64_t epoch) noexcept:
        """Whether that rank goes, or went, on without this one in this call."""
        return epcy_host_without(&self.h, rank)[self.h.rank] >= epoch

    cdef void mask(self, int64_t rank, bint masked) noexcept:
        epcy_host_mask(&self.h, rank, masked)

    cdef int mask_routes(self, const epcy_masked_routes *call) noexcept:
        return epcy_host_mask_routes(&self.h, call)

    cdef void renormalize(self, const epcy_route *routes, int64_t num_tokens, const float *weights,
                          float *out) noexcept:
        epcy_host_renormalize(&self.h, routes, num_tokens, weights, out)

    cdef int op_of(self, int64_t rank, uint64_t epoch) noexcept:
        """The operation of a rank that has arrived in this call; 0: it has gone on, and its records with it."""
        cdef epcy_record *record = epcy_host_record(&self.h, rank, epoch)
        cdef const epcy_low_latency_header *header
        cdef int kind
        if record.epoch == epoch:
            return record.op
        for kind in range(2 if self.h.shape.num_low_latency_tokens else 0):
            header = epcy_low_latency_find(&self.h, rank, kind, epoch)
            if header != NULL:
                return header.op
        return 0

    # ---- life ---------------------------------------------------------------------------------------------

    def barrier(self, int op=EPCY_OP_BARRIER):
        """Wait for every rank to come here."""
        self.begin(op)
        self.arrive(op)
        error = self.disagreement()
        self.step_out(op)
        if error is not None:
            raise error

    def reset(self):
        """Bring every rank to one epoch again, over words in shared memory alone.

        Two rounds: all have come and left their calls; all have the new epoch. After a timeout the next reset() goes on
        in the round that was not over, and then takes part in one that others have begun since.
        """
        cdef bint again = self.reset_round != 0
        if again and self.reset_round == 2:
            self.second_round()
            if self.furthest_reset() <= self.num_resets:
                return
        if self.reset_round == 0:
            self.reach("reset", "arrival")
            epcy_host_store(&self.h, EPCY_WORD_EPOCH, self.h.epoch)
            self.num_resets = max(self.num_resets, self.furthest_reset()) | 1   # who went on without this rank is ahead
            self.reset_round = 1
        self.tell(0, "arrival", EPCY_WORD_RESET, self.num_resets)
        self.wait(0, EPCY_WORD_RESET, self.num_resets, self.h.epoch)
        self.reach("reset", "data")
        self.h.epoch = 2 + max([epcy_host_word(&self.h, r, EPCY_WORD_EPOCH) for r in range(self.h.shape.num_ranks)
                                if not self.h.masked[r]])
        epcy_host_store(&self.h, EPCY_WORD_ARRIVED, self.h.epoch)
        epcy_host_store(&self.h, EPCY_WORD_DONE, self.h.epoch)
        epcy_host_store(&self.h, EPCY_WORD_RECEIVED_DISPATCH, self.h.epoch)
        epcy_host_store(&self.h, EPCY_WORD_RECEIVED_COMBINE, self.h.epoch)
        epcy_host_store(&self.h, EPCY_WORD_BROKEN, 0)
        self.num_resets += 1
        self.reset_round = 2
        self.second_round()
        if again and self.furthest_reset() > self.num_resets:
            self.reset()

    cdef uint64_t furthest_reset(self):
        """The furthest round that a rank is in, this one and masked ones left out."""
        return max([0] + [epcy_host_word(&self.h, r, EPCY_WORD_RESET) for r in range(self.h.shape.num_ranks)
                          if r != self.h.rank and not self.h.masked[r]])

    def second_round(self):
        self.reach("reset", "completion")
        self.tell(0, "completion", EPCY_WORD_RESET, self.num_resets)
        self.wait(0, EPCY_WORD_RESET, self.num_resets, self.h.epoch)
        self.reset_round = 0
        self.forget_areas()
        self.broken, self.deferred, self.in_call = False, None, False

    def close(self, bint together):
        """Give the memory back; `together` frees the window, which is collective."""
        from mpi4py import MPI

        cdef bint agreed = False
        try:
            if together:
                self.barrier(EPCY_OP_FREE)
                agreed = True
        finally:
            if not agreed and not self.broken and not MPI.Is_finalized():
                self.break_off(self.h.epoch + 1)        # the others shall not wait for this rank
            self.close_areas()
            self.remove_page()
            if agreed and not MPI.Is_finalized():
                self.heap.close()
                self.comm.Free()


cdef bint _exit_is_bound = False


cdef void end_of_interpreter() noexcept nogil:
    epcy_host_bound_exit()


def bound_exit():
    """See to it that the interpreter's end cannot hang: MPI_Finalize might wait for a rank that is dead.

    mpi4py reads `rc.finalize` only when it is imported. Functions of Py_AtExit run last first, so this one runs before
    mpi4py's.
    """
    global _exit_is_bound
    if not _exit_is_bound and Py_AtExit(&end_of_interpreter) == 0:
        _exit_is_bound = True
