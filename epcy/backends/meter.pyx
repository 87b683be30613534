# cython: boundscheck=False, wraparound=False
"""The numbers that a Buffer keeps of itself: read, set back, and all those of this process."""

import time
import weakref

from libc.stdint cimport int64_t, uint8_t, uint64_t

from epcy.stats import SPANS, Distribution, Region, Stats
from epcy.status import OPERATIONS

NUM_EVENTS = 4096               # of the ring, unless a trace asks for more

_meters = weakref.WeakSet()
_numbers = {}                   # by group: Buffers made so far
_traces = []                    # lists of traces in progress: each keeps the meters made meanwhile


def meters():
    """The meters of this process's live Buffers, oldest first."""
    return sorted(_meters, key=lambda meter: (meter.group, meter.number))


def keep_meters(list kept, int num_events):
    """Begin a trace: `kept` gets all meters, those made from now on too, each with a ring of num_events."""
    _traces.append((kept, num_events))
    for meter in meters():
        kept.append(meter)
        (<Meter>meter).follow(num_events)


def leave_meters(list kept):
    """End a trace."""
    _traces[:] = [pair for pair in _traces if pair[0] is not kept]
    if not _traces:
        for meter in kept:
            (<Meter>meter).follow(0)


cdef class Meter:
    def __init__(self, comm, str backend, int64_t num_experts):
        """Local: `comm` is the Buffer's, its experts are num_experts on each rank."""
        self.rank, self.num_ranks, self.backend = comm.rank, comm.size, backend
        self.m = epcy_meter_open(comm.size, comm.rank * num_experts, num_experts, NUM_EVENTS)
        if self.m == NULL:
            raise MemoryError
        self.group = world_ranks(comm)
        self.number = _numbers[self.group] = _numbers.get(self.group, -1) + 1
        self.set_back()
        _meters.add(self)
        for kept, num_events in _traces:
            kept.append(self)
            self.follow(num_events)

    def __dealloc__(self):
        epcy_meter_close(self.m)

    def take_back(self):
        """Its Buffer was never finished: the next one has its number, on every rank."""
        if self in _meters:
            _meters.discard(self)
            _numbers[self.group] -= 1
            for kept, _ in _traces:
                kept[:] = [meter for meter in kept if meter is not self]

    cdef int attach(self, page) except -1:
        """Let the running sums lie in a status page, or (None) no more."""
        cdef uint8_t[::1] view
        if page is None:
            epcy_meter_attach(self.m, NULL)
        else:
            view = page
            epcy_meter_attach(self.m, <char *>&view[0])
        self.page = page
        return 0

    cdef int note(self, uint64_t epoch, int op, const int64_t *to) except -1:
        """Keep for a trace how many tokens a call moved from this rank to each."""
        cdef int r
        self.flows.append((epoch, op, tuple([to[r] for r in range(self.num_ranks)])))
        return 0

    def follow(self, int num_events):
        """Keep flows, and a ring of num_events; 0: no more."""
        if self.refresh is not None:
            self.refresh()              # what was before belongs to no trace
        self.flows = [] if num_events else None
        if epcy_meter_resize(self.m, num_events or NUM_EVENTS):
            raise MemoryError

    def set_back(self):
        """Begin to count anew."""
        cdef epcy_gauges *g = self.m.gauges
        cdef int64_t *experts = epcy_gauge_experts(g)
        cdef int i
        if self.forget is not None:
            self.forget()
        epcy_meter_reset(self.m)
        self.zero = (g.num_calls, g.busy_ns, g.wait_ns, g.bytes_moved, [experts[i] for i in range(g.num_experts)])
        self.since = time.monotonic()

    def read(self):
        """The `Stats` since the last set_back()."""
        cdef epcy_gauges *g = self.m.gauges
        cdef int64_t *experts = epcy_gauge_experts(g)
        cdef int i, r
        if self.refresh is not None:
            self.refresh()
        calls, busy, wait, moved, before = self.zero
        return Stats(
            rank=self.rank, num_ranks=self.num_ranks, backend=self.backend,
            seconds=time.monotonic() - self.since, heap=self.heap(),
            num_calls=g.num_calls - calls,
            tokens_to_rank=tuple([self.m.tokens_to[r] for r in range(self.num_ranks)]),
            tokens_from_rank=tuple([self.m.tokens_from[r] for r in range(self.num_ranks)]),
            tokens_per_expert=tuple([experts[i] - before[i] for i in range(g.num_experts)]),
            bytes_moved=g.bytes_moved - moved,
            busy_us=(g.busy_ns - busy) / 1e3, wait_us=(g.wait_ns - wait) / 1e3,
            wait_us_per_peer=tuple([self.m.wait_ns[r] / 1e3 for r in range(self.num_ranks)]),
            kernels=self.kernels(), bytes_between_nodes=self.m.node_bytes[0],
            metadata_bytes_between_nodes=self.m.node_bytes[1],
        )

    def kernels(self):
        """Distributions by name."""
        cdef const epcy_histogram *h
        cdef int op, span
        found = {}
        for op in range(1, len(OPERATIONS)):
            for span in range(EPCY_NUM_SPANS):
                h = &self.m.times[op][span]
                if h.count:
                    found[kernel_name(op, span)] = Distribution(
                        h.count, h.sum_ns / 1e3 / h.count, h.min_ns / 1e3, epcy_histogram_quantile(h, 0.5) / 1e3,
                        epcy_histogram_quantile(h, 0.95) / 1e3, epcy_histogram_quantile(h, 0.99) / 1e3, h.max_ns / 1e3)
        return found

    def heap(self):
        """The heap's regions, and how much of each was ever in use: the most rows of each area."""
        cdef int64_t used[3]
        cdef int i
        if self.sizes is None:
            return {}
        for i in range(3):
            used[i] = self.m.most_rows[i][0] + self.m.most_rows[i][1]
        most = {"control": self.sizes["control"], "receive": used[RECEIVE_ROWS] * self.row_bytes,
                "combine": used[COMBINE_ROWS] * self.row_bytes,
                "low_latency": used[LOW_LATENCY_ROWS] * self.low_latency_row_bytes}
        return {name: Region(self.sizes[name], min(most[name], self.sizes[name])) for name in self.sizes}

    cdef int know_heap(self, int64_t control, int64_t receive, int64_t combine, int64_t low_latency, int64_t row_bytes,
                       int64_t low_latency_row_bytes) except -1:
        """Learn how large the regions are, and what a row of them takes."""
        self.sizes = {"control": control, "receive": receive, "combine": combine, "low_latency": low_latency}
        self.row_bytes, self.low_latency_row_bytes = row_bytes, low_latency_row_bytes
        return 0

    @property
    def num_events(self):
        """Spans recorded so far; the ring has the last of them."""
        return self.m.num_events

    def events(self, uint64_t first=0):
        """The spans from the first-th on that the ring still has, as (start_ns, end_ns, epoch, name), oldest first."""
        cdef uint64_t at = first, end
        cdef const epcy_event *e
        if self.refresh is not None:
            self.refresh(True)
        end = self.m.num_events
        if end > self.m.capacity and at < end - self.m.capacity:
            at = end - self.m.capacity
        found = []
        while at < end:
            e = &self.m.ring[at & (self.m.capacity - 1)]
            found.append((e.start_ns, e.end_ns, e.epoch, kernel_name(e.op, e.span)))
            at += 1
        return found


def kernel_name(int op, int span):
    """"dispatch" of a whole call, "dispatch.send" of a phase."""
    return OPERATIONS[op] if span == EPCY_SPAN_CALL else f"{OPERATIONS[op]}.{SPANS[span]}"


def world_ranks(comm):
    """The ranks of COMM_WORLD that a communicator's ranks are; -1: of another job."""
    from mpi4py import MPI

    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    try:
        return tuple([r if r != MPI.UNDEFINED else -1 for r in group.Translate_ranks(None, world)])
    finally:
        group.Free()
        world.Free()


def bucket_of(int64_t ns):
    """The bucket of a histogram that a time falls into, and its bounds in ns."""
    cdef int bucket = epcy_bucket_of(ns)
    return bucket, epcy_bucket_start(bucket), epcy_bucket_start(bucket + 1)
