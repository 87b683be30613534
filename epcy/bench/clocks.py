"""Clocks: how long the calls of a work take, by events on a GPU's stream or by the host's timer.

A run on a GPU, all on the current stream:

    barrier | load data | write 256 MB (L2 is full of dirty lines) | barrier | spin 100 us | event | calls | event

A barrier is a kernel, so ranks begin within a few microseconds of each other whatever their hosts do, and the spin
hides the launch of the calls; where products are launched too (overlap), it is as long as that takes. Low latency
leaves the flush out, and eager low latency the spin too: there the host's part of a call counts.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

import epcy
from epcy.bench import draws
from epcy.bench.measure import Array, Times, count_core_losses, summarize

FLUSH_BYTES = 256 * 2**20
SPIN_US = 100

SPIN = """
extern "C" __global__ void spin(unsigned long long ns) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  while (now - start < ns);
}
"""


@dataclass(frozen=True)
class Run:
    """One run on one rank: microseconds a call on the device and on the host; `late`: begun before it was launched.

    `num_core_losses`: how often other work had the rank's core; None where the host's time is not what counts.
    """

    us: float
    host_us: float
    late: bool = False
    num_core_losses: int | None = None


@dataclass(frozen=True)
class Measured:
    """All runs, over all ranks."""

    times: Times
    host_us_p50: float
    num_late: int | None
    wrong: int | None


class HostClock:
    """The host's timer, for backends whose calls are over when they return."""

    def __init__(self, buf: epcy.Buffer) -> None:
        self.buf = buf

    def open(self, work: Any) -> None:
        """Get a work ready. Collective, blocking."""
        work.open(None)
        prime(self, work)

    def settle(self) -> None:
        """Let every rank's earlier calls end before data are loaded: others may read this rank's memory. Collective."""
        self.buf.barrier()

    def run(self, work: Any) -> Run:
        """Time a work's calls once. Collective, blocking."""
        losses = count_core_losses()  # before the others go: one that is late holds them up
        self.buf.barrier()
        start = perf_counter()
        work.issue()
        us = (perf_counter() - start) * 1e6 / work.num_calls
        losses = count_core_losses() - losses
        work.collect()
        return Run(us, us, num_core_losses=losses)


class EventClock:
    """CUDA events on the current stream."""

    def __init__(
        self,
        buf: epcy.Buffer,
        *,
        flush: bool,
        spin: bool,
        hidden: bool,
        spin_us: float = SPIN_US,
        grows: bool = False,
    ) -> None:
        """`hidden`: the launch is meant to be hidden by the spin, so a run that it was not is counted as late. `grows`:
        the spin takes as long as the slowest rank's launches did before, as warm-up runs find out."""
        self.cupy, self.buf, self.hidden = buf.xp, buf, hidden
        self.stream = self.cupy.cuda.get_current_stream()
        self.dirt = self.cupy.empty(FLUSH_BYTES if flush else 0, np.uint8)
        self.spin = self.cupy.RawKernel(SPIN, "spin") if spin else None
        self.spin_us, self.grows = float(spin_us), grows
        self.start, self.stop = self.cupy.cuda.Event(), self.cupy.cuda.Event()

    def open(self, work: Any) -> None:
        """Get a work ready. Collective, blocking."""
        work.open(None)
        prime(self, work)
        self.stream.synchronize()

    def settle(self) -> None:
        """Let every rank's earlier calls end before data are loaded. Collective, stream-ordered."""
        self.buf._align(self.stream)

    def launch(self, work: Any) -> None:
        work.issue()

    def run(self, work: Any) -> Run:
        """Time a work's calls once. Collective, blocking."""
        if self.dirt.nbytes:
            self.cupy.cuda.runtime.memsetAsync(
                draws.address_of(self.dirt), 0x5A, self.dirt.nbytes, self.stream.ptr
            )
        self.buf._align(self.stream)
        if self.spin is not None:
            self.spin((1,), (1,), (np.uint64(self.spin_us * 1e3),))
        self.start.record(self.stream)
        begin = perf_counter()
        self.launch(work)
        host_us = (perf_counter() - begin) * 1e6
        late = self.hidden and self.start.done
        self.stop.record(self.stream)
        self.collect(work)
        self.stream.synchronize()
        us = self.cupy.cuda.get_elapsed_time(self.start, self.stop) * 1e3
        if self.grows:  # as long on every rank: who is held longer keeps the others waiting
            self.spin_us = self.buf.comm.allreduce(max(self.spin_us, SPIN_US + 1.5 * host_us), MPI.MAX)
        return Run(us / work.num_calls, host_us / work.num_calls, late)

    def collect(self, work: Any) -> None:
        work.collect()

    def capture(self, issue: Any) -> Any:
        """Record what `issue` launches on the current stream; return the graph."""
        self.stream.begin_capture()
        try:
            issue()
        except BaseException:
            try:
                self.stream.end_capture()
            except Exception:  # noqa: S110  # what went wrong first is what counts
                pass
            raise
        graph = self.stream.end_capture()
        graph.upload(self.stream)
        return graph


class GraphClock(EventClock):
    """CUDA events around replays of a graph of all the work's calls."""

    def open(self, work: Any) -> None:
        work.open(self.capture)
        prime(self, work)  # eagerly: memory pools are warm then
        self.stream.synchronize()

        def issue() -> None:
            work.issue()
            work.collect()

        self.graph = self.capture(issue)
        self.stream.synchronize()

    def launch(self, work: Any) -> None:
        self.graph.launch(self.stream)

    def collect(self, work: Any) -> None:
        """Results stay where the capture put them."""


def prime(clock: HostClock | EventClock, work: Any) -> None:
    """Make the calls twice, untimed: both areas that they take in turn are known then."""
    for _ in range(2):
        clock.settle()
        work.load(0)
        work.issue()
        work.collect()


def time_work(
    comm: MPI.Intracomm, clock: HostClock | EventClock, work: Any, runs: int, warmup: int, check: bool
) -> Measured:
    """Time a work's calls on every rank, and check every run, the warm-up included. Collective, blocking."""
    us: Array = np.empty((2, runs))
    lost: Array = np.zeros(runs, np.int64)
    wrong = num_late = 0
    clock.open(work)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for index in range(-warmup, runs):
            clock.settle()
            work.load(index % work.num_generations)
            run = clock.run(work)
            if check:
                wrong += work.wrong()
            if index >= 0:
                us[:, index] = run.us, run.host_us
                num_late += run.late
                lost[index] = run.num_core_losses or 0
    finally:
        if collecting:
            gc.enable()
    gathered = np.array(comm.allgather(us))
    hidden = isinstance(clock, EventClock) and clock.hidden
    return Measured(
        summarize(gathered[:, 0], np.array(comm.allgather(lost)) if isinstance(clock, HostClock) else None),
        summarize(gathered[:, 1]).us_p50,
        comm.allreduce(num_late) if hidden else None,
        comm.allreduce(wrong) if check else None,
    )
