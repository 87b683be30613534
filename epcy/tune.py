"""`python -m epcy tune`: find the values of the knobs with which calls of a shape are fastest, all ranks together."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from epcy import measured
from epcy.errors import ArgumentError
from epcy.options import BY_NAME

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["KNOBS", "Found", "key_of", "lookup", "tune"]

KNOBS: dict[str, type[int]] = {"num_sms": int, "stream_bytes": int, "chunk_tokens": int}  # options
SLACK = 1.02  # what is no better than that does not count as better
PASSES = 3  # over a knob's values; the best counts: other work on the machine comes and goes
PARTS = ("dispatch", "experts", "combine")

Found = dict[str, dict[int, dict[str, float]]]  # microseconds by knob, value and part of a step


def key_of(backend: str, num_ranks: int, values: Mapping[str, Any]) -> str:
    """Name the machine and the shape that a result is good for. Local."""
    shape = (f"{name} {values[name]}" for name in ("hidden", "num_experts", "num_topk"))
    return measured.key_of(backend, num_ranks, 1, *shape)


def lookup(backend: str, num_ranks: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were found best for a shape, of those that have no value. Local.

    A Buffer asks once, when it is made.

    Raises
    ------
    ArgumentError
        The file is not what `tune` writes, or says what num_sms cannot be.
    """
    open_ = [name for name in KNOBS if values[name] is None]
    if not open_ or not (measured.folder() / "tuning.json").exists():
        return {}
    known, key = knobs_of(backend), key_of(backend, num_ranks, values)
    entry = measured.get("tuning", key, {}, {name: KNOBS[name] for name in known}) or {}
    found = {name: KNOBS[name](entry[name]) for name in known if name in open_ and name in entry}
    for name, value in found.items():
        limits = BY_NAME[name]
        if not limits.minimum <= value <= limits.maximum:  # type: ignore[operator]
            raise ArgumentError(
                f"EPCY_CACHE_DIR: {os.fspath(measured.folder() / 'tuning.json')!r}, entry {key!r}: expected {name} of "
                f"{limits.minimum} to {limits.maximum}, got {value}; remove the file, or measure again"
            )
    return found


def knobs_of(backend: str) -> tuple[str, ...]:
    """Return the knobs that a backend has at run time. Local."""
    return ("num_sms",) if backend == "nvshmem" else tuple(KNOBS)


def candidates(knob: str, backend: str, cores_a_rank: int, usual: int) -> list[int]:
    """Return the values to try; what is used now comes first, but for num_sms. Local."""
    if knob == "num_sms":
        if backend == "nvshmem":
            return [4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128]
        return sorted({n for n in (1, 2, 3, 4, 6, 8, 12, 16) if n <= max(1, cores_a_rank)})
    others: dict[str, tuple[int, ...]] = {
        "stream_bytes": (0, 1 << 19, 1 << 20, 1 << 21, 1 << 22, 1 << 23, 1 << 25, 1 << 40),  # the last: never
        "chunk_tokens": (2, 4, 8, 16, 32, 64, 128),
    }
    return [usual, *(value for value in others[knob] if value != usual)]


class HostMarks:
    """Points of a step by the host's timer."""

    def __init__(self, buf: Any) -> None:
        self.buf = buf
        self.at: list[float] = []

    def begin(self) -> None:
        """Begin a step on all ranks at once. Collective, blocking."""
        self.buf.barrier()
        self.at = [time.perf_counter()]

    def mark(self) -> None:
        self.at.append(time.perf_counter())

    def read(self) -> tuple[float, ...]:
        """Return the microseconds between points."""
        return tuple(1e6 * (end - start) for start, end in pairwise(self.at))


class EventMarks:
    """Points of a step by events on the current stream: the host looks at them when the step is over."""

    def __init__(self, buf: Any) -> None:
        self.buf, self.cuda = buf, buf.xp.cuda
        self.stream = self.cuda.get_current_stream()
        self.events = [self.cuda.Event() for _ in range(len(PARTS) + 1)]
        self.num_marks = 0

    def begin(self) -> None:
        """Begin a step on all ranks at once. Collective, stream-ordered."""
        self.buf._align(self.stream)
        self.num_marks = 0
        self.mark()

    def mark(self) -> None:
        self.events[self.num_marks].record(self.stream)
        self.num_marks += 1

    def read(self) -> tuple[float, ...]:
        """Return the microseconds between points. Blocking."""
        self.stream.synchronize()
        elapsed = self.cuda.get_elapsed_time
        return tuple(1e3 * elapsed(start, end) for start, end in pairwise(self.events))


@dataclass
class Step:
    """A dispatch, experts that read every row and write as many, and a combine, with random routing."""

    buf: Any
    num_tokens: int

    def __post_init__(self) -> None:
        xp, options, rng = self.buf.xp, self.buf.options, np.random.default_rng([7, self.buf.rank])
        scores = rng.random((self.num_tokens, options["num_experts"]))
        self.idx = xp.asarray(np.argsort(scores, axis=1)[:, : options["num_topk"]].astype(np.int64))
        x = rng.random((self.num_tokens, options["hidden"]), np.float32)
        self.x = xp.asarray(x.astype(np.float16))
        self.weights = xp.ones((self.num_tokens, options["num_topk"]), np.float32)
        self.marks = HostMarks(self.buf) if xp is np else EventMarks(self.buf)

    def run(self) -> tuple[float, ...]:
        """Return the microseconds of each part. Collective, blocking."""
        buf, marks = self.buf, self.marks
        marks.begin()
        r = buf.dispatch(self.x, self.idx, self.weights)
        marks.mark()
        y = buf.combine_input(r.handle, np.float16)
        y[...] = r.recv_x
        marks.mark()
        buf.combine(y, r.handle)
        marks.mark()
        return marks.read()

    def measure(self, seconds: float) -> dict[str, float]:
        """Return the median of each part, each the slowest rank's. Collective, blocking, for about `seconds`."""
        for _ in range(2):
            self.run()
        start = time.perf_counter()
        self.run()
        each = self.buf.comm.allreduce(time.perf_counter() - start) / self.buf.size
        us = [self.run() for _ in range(max(5, min(300, int(seconds / max(each, 1e-6)))))]
        slowest = np.array(self.buf.comm.allgather(us)).max(axis=0)  # (runs, parts)
        return dict(zip(PARTS, np.median(slowest, axis=0).tolist(), strict=True))


def tune(
    comm: MPI.Intracomm,
    num_tokens: int,
    *,
    seconds: float = 30.0,
    say: Callable[[str], object] = lambda text: None,
    step: Callable[[str], object] = lambda text: None,
    **options: Any,
) -> Found:
    """Time a step for each value of each knob, and keep the best in the user's cache folder.

    Collective, blocking, for about `seconds` at most: values that the time does not suffice for are left out. A step is
    a dispatch, experts that read and write every row, and a combine; what counts is the slowest rank of each. Knobs are
    tried one after another, each with the best of those before it. Another value must be more than 2 % better than the
    one in use; of num_sms the smallest within 2 % of the best wins, so that what is left over stays with the experts.
    What is kept of a shape is what this run tried, in place of what an earlier one kept.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    num_tokens : int
        Of each call and rank.
    seconds : float
    say : callable
        Gets a line of text for each value tried, on rank 0.
    step : callable
        Is told, on every rank, what is tried next.
    **options
        Of the Buffer: hidden, num_experts and num_topk at least. A knob that is given to a rank, here or by
        its EPCY_* variable, is neither tried nor kept.

    Returns
    -------
    dict
        Microseconds by knob, value and part: "dispatch", "experts", "combine".
    """
    import epcy
    from epcy.timed_calls import take_device  # here: every Buffer imports this module

    start = time.monotonic()
    found: Found = {}
    environ = os.environ
    mine = {n for n in KNOBS if options.get(n) is not None or environ.get(str(BY_NAME[n].env))}
    options = {"num_max_tokens_per_rank": num_tokens, "dtype": "float16", **options, "preinitialize": True}
    with contextlib.ExitStack() as stack:
        take_device(comm, options.get("backend"), stack)
        buf = stack.enter_context(epcy.Buffer(comm, **options))
        cores = max(1, min(buf.topology.cpus_per_node) // max(buf.topology.ranks_per_node))
        best = {name: buf.options[name] for name in knobs_of(buf.backend)}
        given = set().union(*buf.comm.allgather(mine))
        names = [name for name in knobs_of(buf.backend) if name not in given]
        work = Step(buf, num_tokens)
        for at, name in enumerate(names):
            values = candidates(name, buf.backend, cores, best[name])
            if name == "chunk_tokens" and best["num_sms"] == 1:
                values = values[:1]  # one thread takes them all
            if len(values) > 1:
                left = comm.bcast((seconds - (time.monotonic() - start)) / (len(names) - at))
                found[name] = sweep(work, name, values, max(left, 0.1), step)
                best[name] = choose(found[name], None if name == "num_sms" else best[name])
                buf._use_knobs(**{name: best[name]})
                if comm.rank == 0:
                    say_all(name, found[name], best[name], say)
        if comm.rank == 0 and not found:
            say("no knob to try: nothing is kept")
        elif comm.rank == 0:
            key = key_of(buf.backend, comm.size, buf.options)
            best = {name: best[name] for name in found}
            us = {name: {str(value): us for value, us in tried.items()} for name, tried in found.items()}
            path = measured.put("tuning", key, {**best, "num_tokens": num_tokens, "us": us})
            kept = ", ".join(f"{name} {value}" for name, value in best.items())
            say(f"{kept}: kept in {path} for {key}")
    return found


def sweep(
    work: Step, name: str, values: list[int], seconds: float, step: Callable[[str], object]
) -> dict[int, dict[str, float]]:
    """Time a step with each value, a few times over. Collective, blocking, for about `seconds`."""
    comm, start = work.buf.comm, time.monotonic()
    found: dict[int, dict[str, float]] = {}
    for _ in range(PASSES):
        for value in values:
            if comm.bcast(time.monotonic() - start > seconds) and found:
                return found
            step(f"{name} {value}")
            work.buf._use_knobs(**{name: value})
            us = work.measure(seconds / len(values) / PASSES)
            if value not in found or sum(us.values()) < sum(found[value].values()):
                found[value] = us
    return found


def choose(found: Mapping[int, Mapping[str, float]], usual: int | None) -> int:
    """Return the best value: the usual one where none is 2 % better; where there is none the smallest. Local."""
    whole = {value: sum(us.values()) for value, us in found.items()}
    least = min(whole.values())
    if usual is None:
        return min(value for value, us in whole.items() if us <= SLACK * least)
    if usual in whole and whole[usual] <= SLACK * least:
        return usual
    return min(whole, key=lambda value: whole[value])


def say_all(
    name: str, found: Mapping[int, Mapping[str, float]], best: int, say: Callable[[str], object]
) -> None:
    """Tell what was found of a knob, a line for each value. Local."""
    for value in sorted(found):
        parts = ", ".join(f"{part} {us:.1f}" for part, us in found[value].items())
        mark = "  <- best" if value == best else ""
        say(f"{name} {value}: {sum(found[value].values()):.1f} us a step: {parts}{mark}")
