"""Making one recording of what several ranks kept."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from epcy.recording.calls import Array, Call, Recorded, Recording, smallest_type

__all__ = ["Entry", "Key", "join", "part_of"]

Key = tuple[tuple[int, ...], int]  # of a Buffer: its ranks in COMM_WORLD, and which of those of them


@dataclass
class Entry:
    """One call on this rank."""

    at: int  # which call of its Buffer, from 0
    op: str
    args: dict[str, Any] | None  # None: nothing that could be made again
    refers: int | None  # the `at` of another
    num_tokens: int
    arrays: dict[str, Any]  # "topk_idx" and payload, wherever they lie
    start_ns: int = 0
    duration_ns: int = -1
    error: str | None = None


class _Shared:
    """Arrays that are kept once, however often they come."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self._places: dict[bytes, int] = {}

    def place(self, array: Array | None) -> int:
        if array is None:
            return -1
        array = np.ascontiguousarray(array)
        digest = hashlib.blake2b(array.tobytes(), digest_size=16, person=repr(array.shape).encode()[:16])
        key = digest.digest() + array.dtype.str.encode()
        if key not in self._places:
            self._places[key] = len(self.arrays)
            self.arrays.append(array)
        return self._places[key]


def join(parts: list[dict[str, Any]], num_ranks: int) -> Recording:
    """Make a recording of what ranks kept; ranks that are missing, and calls they did not come to, have none. Local."""
    of_buffer: dict[Key, dict[int, Any]] = {}
    for part in parts:
        for key, *rest in part["buffers"]:
            of_buffer.setdefault(key, {})[part["rank"]] = rest
    routings, payloads = _Shared(), _Shared()
    buffers, found, dropped, backend = [], [], 0, "host"
    for number, (key, ranks) in enumerate(sorted(of_buffer.items())):
        group = key[0]
        options, backend, _, _ = next(iter(ranks.values()))
        buffers.append(Recorded(group, options))
        by_rank = [{e.at: e for e in ranks[r][3]} if r in ranks else {} for r in group]
        num_calls = max(rest[2] for rest in ranks.values())
        known = set()
        for at in range(num_calls):
            entries = [mine.get(at) for mine in by_rank]
            here = [e for e in entries if e is not None]
            fits = bool(here) and all(e.args is not None and e.op == here[0].op for e in here)
            fits = fits and all(e.refers == here[0].refers for e in here)
            if not fits or here[0].refers is not None and here[0].refers not in known:
                dropped += 1
                continue
            known.add(at)
            found.append((min(e.start_ns for e in here), number, at, entries, here[0]))
    found.sort(key=lambda one: one[:3])
    places = {(number, at): place for place, (_, number, at, _, _) in enumerate(found)}
    calls = [
        _call(number, entries, first, places, routings, payloads) for _, number, _, entries, first in found
    ]
    return Recording(num_ranks, backend, buffers, calls, routings.arrays, payloads.arrays, dropped)


def _call(
    number: int,
    entries: list[Entry | None],
    first: Entry,
    places: dict[tuple[int, int], int],
    routings: _Shared,
    payloads: _Shared,
) -> Call:
    names = sorted({name for e in entries if e is not None for name in e.arrays} - {"topk_idx"})
    idx = [None if e is None else e.arrays.get("topk_idx") for e in entries]
    return Call(
        buffer=number,
        at=first.at,
        op=first.op,
        args=[first.args or {} if e is None else e.args or {} for e in entries],
        refers=None if first.refers is None else places[number, first.refers],
        num_tokens=[-1 if e is None else e.num_tokens for e in entries],
        routing=[routings.place(None if a is None else a.astype(smallest_type(a))) for a in idx],
        times_ns=np.array(
            [(0, -1) if e is None else (e.start_ns, e.duration_ns) for e in entries], np.int64
        ).reshape(-1, 2),
        errors={rank: e.error for rank, e in enumerate(entries) if e is not None and e.error is not None},
        payload={
            name: [payloads.place(None if e is None else e.arrays.get(name)) for e in entries]
            for name in names
        },
    )


def part_of(recording: Recording, rank: int) -> dict[str, Any]:
    """Return what a rank kept, of the recording that it wrote alone. Local."""
    buffers = []
    for number, buffer in enumerate(recording.buffers):
        same = sum(other.ranks == buffer.ranks for other in recording.buffers[:number])
        entries = []
        for call in recording.calls if rank in buffer.ranks else ():
            here = buffer.ranks.index(rank)
            if call.buffer != number or call.num_tokens[here] < 0:
                continue
            arrays = {
                name: recording.payloads[places[here]]
                for name, places in call.payload.items()
                if places[here] >= 0
            }
            if call.routing[here] >= 0:
                arrays["topk_idx"] = recording.routings[call.routing[here]]
            refers = None if call.refers is None else recording.calls[call.refers].at
            start, took = call.times_ns[here].tolist()
            entries.append(Entry(call.at, call.op, call.args[here], refers, call.num_tokens[here], arrays, start, took,
                                 call.errors.get(here)))  # fmt: skip
        num_calls = max((entry.at + 1 for entry in entries), default=0)
        buffers.append(((buffer.ranks, same), buffer.options, recording.backend, num_calls, entries))
    return {"rank": rank, "buffers": buffers}
