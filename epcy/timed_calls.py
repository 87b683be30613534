"""Calls of random routing, timed as the bench times its own: by the host's timer, or between CUDA events on a GPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from epcy.bench.clocks import EventClock, HostClock, Run
from epcy.bench.measure import summarize

if TYPE_CHECKING:
    from mpi4py import MPI

    from epcy.topology import Topology

__all__ = ["Kind", "Times", "take_device", "time_calls"]

ONE = 0x3F80  # in bfloat16
LOW_LATENCY_CALLS = 20  # back to back: one alone is too short for a clock
LEAST_ROUNDS, LEAST_KEPT = 7, 3
SPIN_US = 1500  # hides the launch of so many calls

# By subject (model.SUBJECTS): microseconds, and whether they are of rounds in which no rank lost its core.
Times = dict[str, tuple[float, bool]]


@dataclass(frozen=True)
class Kind:
    """Calls that are timed together: a way to the experts and the way back.

    `waits`: as eager calls on a GPU do, the host's part included; else launches are hidden and no count is waited for.
    `from_array`: the experts' output lies in an array of the caller's.
    """

    there: str  # subjects
    back: str
    layout: str = "rank"
    is_low_latency: bool = False
    use_fp8: bool = False
    waits: bool = False
    from_array: bool = False


@dataclass
class Timed:
    """Calls as the bench's clocks take them: `prepare` before the clock starts, then `run` so many times."""

    prepare: Callable[[], object]
    run: Callable[[], object]
    num_calls: int = 1

    def issue(self) -> None:
        for _ in range(self.num_calls):
            self.run()

    def collect(self) -> None:
        """Results are not looked at."""


def take_device(
    comm: MPI.Intracomm, backend: str | None, stack: contextlib.ExitStack
) -> tuple[str, Topology]:
    """Find backend and nodes; on nvshmem make this rank's GPU current, with a stream of ours, until `stack` closes.

    Collective, blocking.
    """
    import epcy

    with epcy.Buffer(
        comm, num_max_tokens_per_rank=1, hidden=512, num_experts=comm.size, num_topk=1, backend=backend
    ) as first:
        if first.xp is not np:
            stack.enter_context(first.xp.cuda.Device(first.options["device"]))
            stack.enter_context(first.xp.cuda.Stream(non_blocking=True))
        return first.backend, first.topology


class Inputs:
    """Tokens of this rank with random routing, where the backend's calls read them."""

    def __init__(self, buf: Any, num_tokens: int, num_topk: int) -> None:
        xp, rng = buf.xp, np.random.default_rng([7, buf.rank])
        drawn = rng.random((num_tokens, buf.options["hidden"]), np.float32).astype(ml_dtypes.bfloat16)
        # Bits: not every CuPy computes with bfloat16.
        self.x = xp.asarray(drawn.view(np.uint16)).view(ml_dtypes.bfloat16)
        scores = rng.random((num_tokens, buf.options["num_experts"]))
        self.idx = xp.asarray(np.argsort(scores, axis=1)[:, :num_topk].astype(np.int64))
        self.weights = xp.ones((num_tokens, num_topk), np.float32)
        self.out = xp.empty(self.x.shape, ml_dtypes.bfloat16)  # kept: memory that is new would be timed too


def calls_of(buf: Any, kind: Kind, num_tokens: int, num_topk: int) -> dict[str, Timed]:
    """Return what to time of a kind of calls, by subject: output lies as experts leave it. Collective."""
    sent = Inputs(buf, num_tokens, num_topk)
    return _low_latency(buf, kind, sent) if kind.is_low_latency else _high_throughput(buf, kind, sent)


def _high_throughput(buf: Any, kind: Kind, sent: Inputs) -> dict[str, Timed]:
    xp = buf.xp
    # On a GPU a dispatch that does not wait for its count: what the host does meanwhile is told apart.
    worst = 0 if xp is np or kind.waits else int(buf.options["num_max_recv_tokens"])
    first = buf.dispatch(sent.x, sent.idx, sent.weights, layout=kind.layout)
    handle, scale = first.handle, sent.weights if kind.layout == "expert" else None
    rows = xp.full(first.recv_x.shape, ONE, np.uint16)
    area: list[Any] = [rows.view(ml_dtypes.bfloat16)]

    def fill() -> None:
        if not kind.from_array:
            area[:] = [buf.combine_input(handle)]
            area[0].view(np.uint16)[...] = rows

    def dispatch() -> Any:
        return buf.dispatch(sent.x, sent.idx, sent.weights, layout=kind.layout, num_worst_tokens=worst)

    return {
        kind.there: Timed(lambda: None, dispatch),
        kind.back: Timed(fill, lambda: buf.combine(area[0], handle, scale, out=sent.out)),
    }


def _low_latency(buf: Any, kind: Kind, sent: Inputs) -> dict[str, Timed]:
    def dispatch() -> Any:
        return buf.low_latency_dispatch(sent.x, sent.idx, sent.weights, use_fp8=kind.use_fp8)

    _, recv_count, handle, _, _ = dispatch()
    counts = recv_count.tolist()

    def take() -> Any:
        return buf.low_latency_combine_input(handle)

    def combine(y: Any) -> None:
        buf.low_latency_combine(y, None, None, handle, zero_copy=True, out=sent.out)

    for _ in range(2):  # both areas that calls take in turn
        y = take()
        for expert, count in enumerate(counts):
            y.view(np.uint16)[expert, :count] = ONE
        combine(y)
    return {
        kind.there: Timed(lambda: None, dispatch, LOW_LATENCY_CALLS),
        kind.back: Timed(lambda: None, lambda: combine(take()), LOW_LATENCY_CALLS),
    }


def clock_of(buf: Any, kind: Kind) -> HostClock | EventClock:
    """Return the clock that the bench takes for such calls."""
    if buf.xp is np:
        return HostClock(buf)
    if not kind.is_low_latency:
        return EventClock(buf, flush=True, spin=True, hidden=False)
    return EventClock(buf, flush=False, spin=not kind.waits, hidden=False, spin_us=SPIN_US)


def time_calls(
    buf: Any, kind: Kind, num_tokens: int, num_topk: int, seconds: float, warmup: int = 3
) -> Times:
    """Return the microseconds of a dispatch and of a combine of random routing, the slowest rank's.

    The median of the rounds in which no rank lost its core to other work; where they are few, the fastest. Collective,
    blocking, for about `seconds`, up to four times as long where rounds are lost; as many on all ranks.
    """
    clock: Any = clock_of(buf, kind)

    def rounds(timed: Timed, num_rounds: int) -> list[Run]:
        found = []
        for _ in range(num_rounds):
            clock.settle()
            timed.prepare()
            found.append(clock.run(timed))
        return found

    found: Times = {}
    for subject, timed in calls_of(buf, kind, num_tokens, num_topk).items():
        rounds(timed, warmup)
        start = time.perf_counter()
        rounds(timed, 3)
        each = buf.comm.allreduce(time.perf_counter() - start) / buf.size / 3
        num_rounds = max(LEAST_ROUNDS, min(300, int(seconds / 2 / max(each, 1e-6))))
        runs: list[Run] = []
        for _ in range(4):
            runs += rounds(timed, num_rounds)
            gathered = np.array(buf.comm.allgather([(run.us, run.num_core_losses or 0) for run in runs]))
            times = summarize(gathered[:, :, 0], gathered[:, :, 1])
            if is_enough := len(runs) - (times.num_disturbed or 0) >= LEAST_KEPT:
                break
        us = times.us_undisturbed_p50
        found[subject] = (us, True) if is_enough and us is not None else (times.us_min, False)
    return found
