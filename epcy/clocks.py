"""How the clocks of a job's ranks differ: CLOCK_MONOTONIC compared by ping-pong, for one timeline of them all."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["ClockOffset", "compare"]

NUM_ROUNDS = 100


@dataclass(frozen=True)
class ClockOffset:
    """How far a rank's clock was ahead of rank 0's at a moment of rank 0's, and how far off that may be; in ns."""

    at_ns: int
    ahead_ns: int
    error_ns: int


def compare(comm: MPI.Intracomm, num_rounds: int = NUM_ROUNDS) -> list[ClockOffset]:
    """Compare every rank's clock with rank 0's.

    Collective, blocking: rank 0 exchanges num_rounds small messages with each rank in turn. A round tells that the
    other's clock was read between two readings of rank 0's; the shortest round is believed, half of it is the error.

    Returns
    -------
    list of ClockOffset
        By rank, equal on all of them.
    """
    offsets = [ClockOffset(time.monotonic_ns(), 0, 0)]
    theirs = np.zeros(1, np.int64)
    for other in range(1, comm.size):
        comm.Barrier()
        if comm.rank == other:
            for _ in range(num_rounds):
                comm.Recv(theirs, 0)
                theirs[0] = time.monotonic_ns()
                comm.Send(theirs, 0)
        elif comm.rank == 0:
            best = ClockOffset(0, 0, 2**62)
            for _ in range(num_rounds):
                before = time.monotonic_ns()
                comm.Send(theirs, other)
                comm.Recv(theirs, other)
                after = time.monotonic_ns()
                middle, half = (before + after) // 2, (after - before + 1) // 2
                if half < best.error_ns:
                    best = ClockOffset(middle, int(theirs[0]) - middle, half)
            offsets.append(best)
    found: list[ClockOffset] = comm.bcast(offsets if comm.rank == 0 else None)
    return found


class Aligned:
    """A rank's clock brought to rank 0's: by the offset at the beginning and at the end, and between them by a line."""

    def __init__(self, first: ClockOffset, last: ClockOffset) -> None:
        self.first, self.last = first, last
        span = last.at_ns - first.at_ns
        self.drift = (last.ahead_ns - first.ahead_ns) / span if span > 0 else 0.0
        # Two readings on one clock differ by their errors alone: that is no drift.
        if abs(last.ahead_ns - first.ahead_ns) <= first.error_ns + last.error_ns:
            self.drift = 0.0
            if last.error_ns < first.error_ns:
                self.first = last
        self.error_ns = max(first.error_ns, last.error_ns)

    def __call__(self, ns: int) -> int:
        """Return what rank 0's clock read at `ns` of this rank's."""
        since = ns - self.first.ahead_ns - self.first.at_ns
        return ns - self.first.ahead_ns - round(self.drift * since)
