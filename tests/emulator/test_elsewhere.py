"""Ranks that wait for each other in different operations: each is told who is where, long before any time-out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emulator import draws
from emulator.high_throughput import OP_BARRIER, Ranks
from emulator.low_latency import OP_COMBINE, OP_DISPATCH, RECEIVE, SEND, LowLatencyRanks
from emulator.low_latency_cases import check_quiet, check_received
from emulator.structs import C
from emulator.world import FLOATS

DISPATCH = 1


class Both(LowLatencyRanks, Ranks):
    """Ranks with both modes; what both classes have is the low-latency mode's."""

    low_latency = LowLatencyRanks.dispatch

    def make_handle(self, rank: int, *args: Any) -> Any:
        return Ranks.make_handle(self, rank, *args) if args else LowLatencyRanks.make_handle(self, rank)


def make(R: int) -> tuple[Both, Any]:
    return Both(R, 2, 3, 5, 128, row_bytes=512, num_rows=R * 5 * 2 + 256), np.random.default_rng(R)


def inputs(world: Both, rng: Any) -> tuple[list[Any], list[Any]]:
    xs = [draws.floats(rng, (4, world.H), FLOATS[0]) for _ in range(world.R)]
    return xs, [draws.lanes(rng, 4, world.K, world.E) for _ in range(world.R)]


def queue(world: Both, rank: int, op: int, handle: Any, x: Any, idx: Any) -> None:
    if op == OP_DISPATCH:
        world.low_latency(rank, world.make_handle(rank), x, idx)
    elif op == OP_COMBINE:
        world.combine(rank, handle, np.zeros((world.L, world.R * world.M, world.H), FLOATS[0]), len(x))
    elif op == DISPATCH:
        Ranks.dispatch(world, rank, x, idx, None, layout="rank", blocks=(2, 2, 1))
    else:
        world.step(rank, op)


@pytest.mark.parametrize(
    "ops",
    [
        (OP_DISPATCH, DISPATCH),
        (OP_DISPATCH, OP_COMBINE),
        (OP_COMBINE, OP_BARRIER),
        (OP_BARRIER, OP_DISPATCH, OP_DISPATCH),
        (DISPATCH, OP_COMBINE, OP_DISPATCH),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(2))
def test_operations_differ(seed: int, ops: tuple[int, ...]) -> None:
    R = len(ops)
    world, rng = make(R)
    xs, idxs = inputs(world, rng)
    handles = [world.make_handle(r) for r in range(R)]
    got = [world.low_latency(r, handles[r], xs[r], idxs[r]) for r in range(R)]
    world.run(seed)
    check_received(world, got, xs, idxs, use_fp8=True)
    for r in range(R):
        world.wait(r, int(rng.integers(0, 2)) * 100_000)
        queue(world, r, ops[r], handles[r], xs[r], idxs[r])
    world.run(seed + 1)
    for r in range(R):
        report = world.report(r)
        assert (report.expired, report.phase) == (1, C.EPCY_CUDA_ELSEWHERE), f"rank {r}"
        raw = world.reports[r][C.epcy_report.late_text.offset :][: 4 * R].view(np.uint32)
        assert tuple(h & 7 for h in raw.tolist()) == ops, f"rank {r}"


@pytest.mark.parametrize("seed", range(3))
def test_who_is_only_late_is_not_elsewhere(seed: int) -> None:
    """The same order on all ranks, far apart, with calls sent ahead of their receipt: nobody is told anything."""
    rng = np.random.default_rng(seed)
    world, _ = make(2)
    xs, idxs = inputs(world, rng)
    given = []
    for r in range(2):
        handle = [world.make_handle(r) for _ in range(3)]
        world.wait(r, r * 9_000_000)
        first = world.low_latency(r, handle[0], xs[r], idxs[r], phases=SEND)
        second = world.low_latency(r, handle[1], xs[r], idxs[r], phases=SEND)
        world.low_latency(r, handle[0], xs[r], idxs[r], phases=RECEIVE, into=first)
        world.combine(r, handle[0], np.zeros((2, 10, 128), FLOATS[0]), 4, phases=SEND)
        world.step(r, OP_BARRIER)
        world.low_latency(r, handle[1], xs[r], idxs[r], phases=RECEIVE, into=second)
        world.combine(r, handle[0], np.zeros((2, 10, 128), FLOATS[0]), 4, phases=RECEIVE)
        world.wait(r, (1 - r) * 9_000_000)
        world.low_latency(r, handle[2], xs[r], idxs[r])
        given.append((first, second))
    world.run(seed)
    check_quiet(world)
    for calls in zip(*given, strict=True):
        check_received(world, list(calls), xs, idxs, use_fp8=True)
