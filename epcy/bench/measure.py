"""Runs and what is made of them: times over all ranks, the memcpy beside them, bytes."""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from epcy.bench.workload import Shape

Array = NDArray[Any]

MEMCPY_BYTES = 64 * 2**20
MEMCPY_RUNS = 30


@dataclass(frozen=True)
class Timed:
    """What one run does: ``prepare`` before the clock starts, ``run`` while it runs."""

    prepare: Callable[[], object]
    run: Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Microseconds of a set of runs, each the maximum over ranks.

    A run is disturbed where the system took a rank's core away for other work. On the host backend that is counted.
    """

    us_min: float
    us_p50: float
    us_p99: float
    us_undisturbed_p50: float | None = None  # None where all were, or nobody counted
    num_disturbed: int | None = None


def count_core_losses() -> int:
    """Count how often the system has taken a core from this process. Local."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def summarize(us: Array, lost: Array | None = None) -> Times:
    """Reduce (R, runs) microseconds: the slowest rank of each run, then the percentiles over runs.

    Local. The p99 is a time that occurred (no interpolation), so with fewer than 100 runs it is the maximum. `lost`:
    (R, runs), how often each rank lost its core.
    """
    slowest = us.max(axis=0)
    p99 = np.percentile(slowest, 99, method="higher")
    times = Times(float(slowest.min()), float(np.median(slowest)), float(p99))
    if lost is None:
        return times
    kept = slowest[~(lost > 0).any(axis=0)]
    median = float(np.median(kept)) if kept.size else None
    return replace(times, us_undisturbed_p50=median, num_disturbed=len(slowest) - len(kept))


def time_runs(
    comm: MPI.Intracomm, align: Callable[[], object], timed: Timed, runs: int, warmup: int
) -> Times:
    """Run ``timed`` on every rank and time the Python call.

    Collective, blocking. ``align`` is a barrier before each run; the garbage collector rests meanwhile.
    """
    us, lost = np.empty(runs), np.zeros(runs, np.int64)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for index in range(-warmup, runs):
            timed.prepare()
            losses = count_core_losses()  # before the others go: one that is late holds them up
            align()
            start = perf_counter()
            timed.run()
            elapsed = perf_counter() - start
            if index >= 0:
                us[index], lost[index] = elapsed * 1e6, count_core_losses() - losses
    finally:
        if collecting:
            gc.enable()
    return summarize(np.array(comm.allgather(us)), np.array(comm.allgather(lost)))


def measure_memcpy(comm: MPI.Intracomm, num_bytes: int = MEMCPY_BYTES, runs: int = MEMCPY_RUNS) -> float:
    """Return the GB/s at which each rank copies memory while all do, bytes read and bytes written counted.

    Collective, blocking. libc's memcpy between warm buffers; the best of ``runs``, each as slow as its slowest rank.
    """
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.restype = ctypes.c_void_p
    memcpy.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)

    def copy() -> None:
        memcpy(target.ctypes.data, source.ctypes.data, num_bytes)

    best = time_runs(comm, comm.Barrier, Timed(lambda: None, copy), runs, warmup=3)
    return 2 * num_bytes / best.us_min / 1e3


@dataclass(frozen=True)
class Bytes:
    """Bytes that one operation moves, a rank (the mean over ranks).

    ``wire``: rows that leave for another rank, payload and scales, one for each (token, distinct other rank).
    ``moved``: every row, those that stay included, once read and once written.
    """

    wire: float
    moved: float


def count_bytes(case: str, shape: Shape, topk_idx: Array, comm: MPI.Intracomm, layout: str = "rank") -> Bytes:
    """Count the bytes of ``case`` with this rank's expert ids (T, K). Collective, blocking."""
    rows, rows_away = count_rows(topk_idx, shape.num_experts // comm.size, comm.rank, comm.size, layout)
    total, total_away = np.array(comm.allgather((rows, rows_away))).mean(axis=0)
    row_bytes = {
        "dispatch": shape.row_bytes,
        "combine": shape.returned_row_bytes,
        "roundtrip": shape.row_bytes + shape.returned_row_bytes,
    }[case]
    return Bytes(wire=float(total_away * row_bytes), moved=float(2 * total * row_bytes))


def count_rows(topk_idx: Array, num_local_experts: int, rank: int, size: int, layout: str) -> tuple[int, int]:
    """Return how many rows (T, K) ids make, and how many of them cross to another rank.

    In the expert layout each lane is a row, but a token still crosses once for each rank.
    """
    owner = np.where(topk_idx >= 0, topk_idx // num_local_experts, size)
    hit = np.zeros((len(topk_idx), size + 1), np.bool_)
    hit[np.arange(len(topk_idx))[:, None], owner] = True
    hit = hit[:, :size]
    away = int(hit.sum()) - int(hit[:, rank].sum())
    return int((topk_idx >= 0).sum()) if layout == "expert" else int(hit.sum()), away
