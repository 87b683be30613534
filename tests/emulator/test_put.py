"""Low-latency calls to far ranks: what the put kernels bring is what stores would have, whatever the network does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emulator import draws
from emulator.low_latency import LowLatencyRanks
from emulator.low_latency_cases import calls_in_flight, check_quiet, check_received, random_case
from emulator.structs import C
from emulator.world import FLOATS


@pytest.mark.parametrize("seed", range(16))
def test_random(seed: int) -> None:
    random_case(seed, by_puts=True)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("refuse", [False, True], ids=["", "refused"])
@pytest.mark.parametrize("wrap", [False, True], ids=["", "wrapped"])
@pytest.mark.parametrize("seed", range(1, 3))
def test_calls_in_flight(seed: int, wrap: bool, refuse: bool, ranks_per_node: int) -> None:
    calls_in_flight(seed, wrap, refuse, ranks_per_node)


def far_world(R: int, **options: Any) -> tuple[LowLatencyRanks, list[Any], list[Any], list[Any]]:
    rng = np.random.default_rng(R)
    world = LowLatencyRanks(R, 3, 2, 6, 256, row_bytes=1024, ranks_per_node=1, **options)
    xs = [draws.floats(rng, (4 + r % 3, 256), FLOATS[0]) for r in range(R)]
    idxs = [draws.lanes(rng, len(x), 2, world.E) for x in xs]
    return world, xs, idxs, [world.make_handle(r) for r in range(R)]


def forget_verdicts(world: LowLatencyRanks) -> None:
    for r in range(world.R):
        C.epcy_report.from_buffer(world.reports[r]).late_verdict = 0


def test_a_mismatch_is_told_by_all_and_over() -> None:
    world, xs, idxs, handles = far_world(3)
    got = [world.dispatch(r, handles[r], xs[r], idxs[r], use_fp8=r == 0) for r in range(3)]
    world.run(1)
    assert not any(one.count.any() for one in got)
    assert [world.report(r).late_verdict for r in range(3)] == [C.EPCY_VERDICT_MISMATCH] * 3
    forget_verdicts(world)
    y = np.ones((3, 18, 256), FLOATS[0])
    w = np.ones((6, 2), np.float32)
    for r in range(3):  # of those who give weights all wait for everybody's
        world.combine(r, handles[r], y, len(xs[r]), w[: len(xs[r])] if r else None)
    world.run(2)
    assert [world.report(r).late_verdict for r in range(3)] == [C.EPCY_VERDICT_MISMATCH] * 3
    forget_verdicts(world)
    got = [world.dispatch(r, handles[r], xs[r], idxs[r]) for r in range(3)]
    world.run(3)
    check_quiet(world)
    check_received(world, got, xs, idxs, use_fp8=True)


def test_a_refusal_brings_its_text() -> None:
    world, xs, idxs, handles = far_world(3)
    for r in range(3):
        world.dispatch(r, handles[r], xs[r], idxs[r])
    world.run(1)
    check_quiet(world)
    y, w = np.ones((3, 18, 256), FLOATS[0]), np.ones((6, 2), np.float32)
    world.refuse(0, C.EPCY_LOW_LATENCY_COMBINE, b"rank 0 refused: no")
    for r in (1, 2):
        world.combine(r, handles[r], y, len(xs[r]), w[: len(xs[r])])
    world.run(2)
    for r in (1, 2):
        report = world.report(r)
        assert (report.late_verdict, report.late_rank) == (C.EPCY_VERDICT_REFUSED, 0)
        assert report.late_text == b"rank 0 refused: no"
    forget_verdicts(world)
    got = [world.dispatch(r, handles[r], xs[r], idxs[r]) for r in range(3)]
    world.run(3)
    check_quiet(world)
    check_received(world, got, xs, idxs, use_fp8=True)


@pytest.mark.parametrize("weights", [False, True], ids=["", "weights"])
def test_who_gives_up_says_so_to_far_ranks(weights: bool) -> None:
    """Rank 1 never comes: rank 0 waits in vain and tells rank 2, which then need not wait for rank 0."""
    world, xs, idxs, handles = far_world(3, timeout_ns=4_000_000)
    for r in range(3):
        world.dispatch(r, handles[r], xs[r], idxs[r])
    world.run(1)
    check_quiet(world)
    y, w = np.ones((3, 18, 256), FLOATS[0]), np.ones((6, 2), np.float32)
    world.combine(0, handles[0], y, len(xs[0]), w[: len(xs[0])] if weights else None)
    world.run(2)
    report = world.report(0)
    assert report.expired and report.peer in (1, 2) and not report.gone
    left = world.control_words(2, world.control.left, 2).view(np.uint32)
    assert left[:3].tolist() == [1, 0, 0]
    assert world.local(0).broken
