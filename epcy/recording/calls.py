"""What a recording holds: Buffers, calls, and the routings that they share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from epcy._version import __version__

__all__ = ["Array", "Call", "Recorded", "Recording", "smallest_type"]

Array = NDArray[Any]


@dataclass
class Recorded:
    """A Buffer whose calls were recorded.

    Attributes
    ----------
    ranks : tuple of int
        Its ranks, as COMM_WORLD of the recorded job numbers them.
    options : dict
        Every option's value, without those that name places of that machine.
    """

    ranks: tuple[int, ...]
    options: dict[str, Any]

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)


@dataclass
class Call:
    """One call, on all ranks of its Buffer. Lists have an entry for each of them.

    Attributes
    ----------
    buffer : int
        Which Buffer of the recording.
    at : int
        Which call of that Buffer it was, since the recording began.
    op : str
        A name of `OPERATIONS`.
    args : list of dict
        Arguments that are no arrays, and about those that are: "dtype", "has_weights", "num_biases".
    refers : int or None
        Which call of the recording made the handle, or is received by this hook.
    num_tokens : list of int
        T; -1 on a rank that never came to this call.
    routing : list of int
        Which routing of the recording; -1 where it has none of its own.
    times_ns : (R, 2) int64
        When it began, since the recording began, and how long it took; -1: it did not end.
    errors : dict of int to str
        What it raised, by rank.
    payload : dict of str to list of int
        Which payloads of the recording were "x", "scales", "topk_weights"; -1: none.
    """

    buffer: int
    at: int
    op: str
    args: list[dict[str, Any]]
    refers: int | None
    num_tokens: list[int]
    routing: list[int]
    times_ns: Array
    errors: dict[int, str] = field(default_factory=dict)
    payload: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Recording:
    """Calls in their order, and what they were made with.

    Attributes
    ----------
    num_ranks : int
        Of the job.
    backend : str
    buffers : list of Recorded
    calls : list of Call
    routings : list of (T, K) int64
    payloads : list of arrays
        As bytes that they were: bfloat16 is uint16 here.
    num_dropped : int
        Calls that are not here: older than what was kept, or with a handle from before.
    epcy, date : str
    """

    num_ranks: int
    backend: str
    buffers: list[Recorded]
    calls: list[Call]
    routings: list[Array]
    payloads: list[Array] = field(default_factory=list)
    num_dropped: int = 0
    epcy: str = __version__
    date: str = ""

    def routing_of(self, call: Call, rank: int) -> Array:
        """Return topk_idx (T, K) of a dispatch on a rank. Local."""
        place, num_topk = call.routing[rank], self.buffers[call.buffer].options["num_topk"]
        if place < 0:
            return np.full((max(call.num_tokens[rank], 0), num_topk), -1, np.int64)
        return self.routings[place].astype(np.int64)


def smallest_type(values: Array) -> Any:
    """Return the smallest of int16, int32 and int64 that holds all values. Local."""
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    return next(
        t for t in (np.int16, np.int32, np.int64) if np.iinfo(t).min <= low and high <= np.iinfo(t).max
    )
