"""One timeline of all ranks, as Perfetto and chrome://tracing read it (the trace-event format)."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from epcy import ranges
from epcy.backends import bootstrap
from epcy.backends.meter import Meter, keep_meters, leave_meters
from epcy.clocks import Aligned, ClockOffset, compare
from epcy.errors import ArgumentError, PeerTimeoutError, StateError
from epcy.private_file import write_of_all, write_text
from epcy.status import OPERATIONS

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["assemble", "spans_as_events", "trace", "write"]

# By operation: the phase at whose beginning a token leaves, and that, or the call, before whose end it is used. A GPU's
# times are those of one of its blocks, so of two ranks' phases only these two ends come in this order for certain.
FLOWS = {
    "dispatch": ("dispatch.send", "dispatch.wait"),
    "combine": ("combine.send", "combine"),
    "low_latency_dispatch": ("low_latency_dispatch.send", "low_latency_dispatch.fan_out"),
    "low_latency_combine": ("low_latency_combine.send", "low_latency_combine.reduce"),
}

Span = tuple[int, int, int, str]  # start_ns, end_ns, epoch, name
Part = dict[str, Any]  # what one rank gives


class trace:  # noqa: N801 - used as a function
    """Write a timeline of what all Buffers do inside a `with` block, all ranks together.

    Collective over `comm` at both ends of the block, blocking. Slices are calls and their phases, arrows lead from who
    sent tokens to who got them; the clocks of the ranks are compared by ping-pong at both ends, and the metadata says
    how far off they may be. An exception that leaves the block makes its rank write a part of its own, `path` with
    `.rankN` behind it, and wait for nobody; so does a rank that the others keep waiting at the end. With the nvtx
    extra calls are NVTX ranges meanwhile.

    Parameters
    ----------
    path : path
        Of the file, which rank 0 writes; open it at https://ui.perfetto.dev.
    comm : mpi4py.MPI.Intracomm
        Whose ranks are shown; default COMM_WORLD.
    num_events : int
        Slices that a Buffer keeps on each rank: 32 bytes each. Of more the last ones; the metadata says how many are
        missing.
    timeout : float
        Seconds that a rank waits for the others at either end.

    Raises
    ------
    ArgumentError
        num_events is below 1; rank 0 cannot write the file.
    PeerTimeoutError
        A rank did not come to the end of the block; this one has written its part.
    StateError
        The same trace is entered again.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        comm: MPI.Intracomm | None = None,
        *,
        num_events: int = 1 << 18,
        timeout: float = 60.0,
    ) -> None:
        if num_events < 1:
            raise ArgumentError(f"num_events: expected a positive whole number, got {num_events!r}")
        self.path, self.num_events, self.timeout = Path(path), num_events, timeout
        self._given, self._meters, self._first = comm, [], []  # type: ignore[var-annotated]
        self._comm: MPI.Intracomm | None = None
        self._start_ns = 0

    def __enter__(self) -> trace:
        from mpi4py import MPI

        comm = self._given if self._given is not None else MPI.COMM_WORLD
        if self._comm is not None:
            raise StateError(f"trace: this trace was entered before (rank {comm.rank}); make a new one")
        # A copy: in it stays an end that a rank never comes to.
        self._comm = bootstrap.duplicate(comm, self.timeout, "epcy.trace")
        self._first = compare(self._comm)
        ranges.follow(True)
        keep_meters(self._meters, self.num_events)
        self._start_ns = time.monotonic_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        comm = self._comm
        if comm is None:
            return
        part: Part = {"rank": comm.rank, "start_ns": self._start_ns, "buffers": []}
        error: Exception | None = None
        try:
            part["buffers"] += map(_buffer_part, self._meters)
        except Exception as caught:
            error = caught
        leave_meters(self._meters)
        ranges.follow(False)
        if kind is not None:
            self._write_alone(part)
            return
        try:
            bootstrap.exchange(comm, None, error, self.timeout, "the end of epcy.trace")
        except PeerTimeoutError:
            self._write_alone(part)
            raise
        except Exception:  # on every rank
            comm.Free()
            raise
        last = compare(comm)
        refused = write_of_all(
            comm, self.path, part, lambda parts: write(self.path, assemble(parts, self._first, last))
        )
        comm.Free()
        if refused is not None:
            raise refused

    def _write_alone(self, part: Part) -> None:
        alone = [ClockOffset(0, 0, 0)]
        with contextlib.suppress(OSError):  # the exception that ends the block is the one to see
            write(self.path.with_name(f"{self.path.name}.rank{part['rank']}"), assemble([part], alone, alone))


def _buffer_part(meter: Meter) -> dict[str, Any]:
    events = meter.events()
    return {
        "group": meter.group,
        "number": meter.number,
        "rank": meter.rank,
        "backend": meter.backend,
        "events": events,
        "clock_error_ns": meter.clock_error_ns,
        "dropped": meter.num_events - len(events),
        "flows": list(meter.flows or ()),
    }


def assemble(parts: list[Part], first: list[ClockOffset], last: list[ClockOffset]) -> dict[str, Any]:
    """Make one trace of what the ranks gathered. Local.

    Parameters
    ----------
    parts : list of dict
        Of each rank: "rank", "start_ns", and "buffers", each with "group", "number", "rank", "backend", "events" and
        "flows".
    first, last : list of ClockOffset
        By rank, at the beginning and at the end.

    Returns
    -------
    dict
        What json.dump takes.
    """
    events: list[dict[str, Any]] = []
    places: dict[tuple[Any, ...], tuple[int, int]] = {}  # a flow's end -> (process, thread)
    spans: dict[tuple[Any, ...], tuple[int, int]] = {}  # of this process and phase -> its times
    start = min(part["start_ns"] for part in parts)
    dropped = errors = 0
    clocks = [Aligned(one, other) for one, other in zip(first, last, strict=True)]
    for at, part in enumerate(parts):
        process, aligned = part["rank"], clocks[at]
        events.append(_named("process_name", process, 0, f"rank {process}"))
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
        )
        errors = max(errors, aligned.error_ns)
        for thread, buffer in enumerate(part["buffers"], 1):
            key = (buffer["group"], buffer["number"])
            label = f"Buffer {buffer['number']} ({buffer['backend']}, {len(buffer['group'])} ranks)"
            events.append(_named("thread_name", process, thread, label))
            dropped += buffer["dropped"]
            errors = max(errors, aligned.error_ns + buffer.get("clock_error_ns", 0))
            mine = [
                (aligned(begin), aligned(end), epoch, name) for begin, end, epoch, name in buffer["events"]
            ]
            start = min([start, *(begin for begin, _, _, _ in mine)])
            for begin, end, epoch, name in mine:
                spans[(key, buffer["rank"], epoch, name)] = begin, end
            places[(key, buffer["rank"])] = process, thread
            events += spans_as_events(mine, process, thread)
    events += _flows(parts, places, spans)
    for event in events:
        if "ts" in event:
            event["ts"] = (event["ts"] - start) / 1e3
    events.sort(key=lambda event: (event.get("ts", -1.0), -event.get("dur", 0.0)))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "tool": "epcy",
            "num_ranks": len(parts),
            "clock_error_us": errors / 1e3,
            "clock_ahead_us": [clock.first.ahead_ns / 1e3 for clock in clocks],
            "num_dropped_slices": dropped,
        },
    }


def spans_as_events(spans: Iterable[Span], process: int, thread: int) -> list[dict[str, Any]]:
    """Turn spans into complete events whose `ts` still is in ns; a phase is cut to its call. Local."""
    spans = list(spans)
    calls: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for begin, end, epoch, name in spans:
        if "." not in name:
            calls.setdefault((epoch, name), []).append((begin, end))
    found = []
    for begin, end, epoch, name in spans:
        operation, _, phase = name.partition(".")
        if phase:  # times read on a GPU are a little coarse, and slices must nest
            around = [e for b, e in calls.get((epoch, operation), ()) if b <= begin <= e]
            end = min([end, *around])
        found.append(
            {
                "ph": "X", "name": phase or operation, "cat": "phase" if phase else "call", "pid": process,
                "tid": thread, "ts": begin, "dur": (end - begin) / 1e3, "args": {"call": epoch},
            }
        )  # fmt: skip
    return found


def _flows(
    parts: list[Part], places: dict[tuple[Any, ...], Any], spans: dict[tuple[Any, ...], tuple[int, int]]
) -> list[dict[str, Any]]:
    """Arrows between ranks; one whose other end no ring has any more is left out."""
    events: list[dict[str, Any]] = []
    for part in parts:
        for buffer in part["buffers"]:
            key = (buffer["group"], buffer["number"])
            for epoch, op, tokens in buffer["flows"]:
                leaves, comes = FLOWS[OPERATIONS[op]]
                sent = spans.get((key, buffer["rank"], epoch, leaves))
                for to, num_tokens in enumerate(tokens):
                    came = spans.get((key, to, epoch, comes))
                    if to == buffer["rank"] or not num_tokens or sent is None or came is None:
                        continue
                    which = {"id": len(events) // 2, "name": "tokens", "cat": "flow"}
                    # an arrow belongs to the slice that is open at its time: the very end is outside
                    ends = (("s", sent[0], buffer["rank"]), ("f", max(came[0], came[1] - 1), to))
                    for kind, ts, rank in ends:
                        process, thread = places[(key, rank)]
                        event = {"ph": kind, **which, "pid": process, "tid": thread, "ts": ts}
                        events.append({**event, "args": {"tokens": num_tokens}})
                    events[-1]["bp"] = "e"
    return events


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a trace whole or not at all; only its user may read it. Local."""
    write_text(path, json.dumps(content, separators=(",", ":")) + "\n")
