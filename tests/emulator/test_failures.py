"""What goes wrong, and what ranks are told: refusals, mismatches, bad ids, no room, ranks that are late or leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emulator import draws
from emulator.failure_cases import (
    OPS,
    TIMEOUT_NS,
    check_good_call,
    check_refusal,
    clear,
    failed_ranks,
    inputs,
    queue_dispatch,
    reset,
)
from emulator.high_throughput import OP_BARRIER, Ranks
from emulator.high_throughput_cases import check_dispatch
from emulator.structs import C

LAYOUTS = ["rank", "expert"]


def make(R: int = 3, **options: Any) -> tuple[Ranks, Any]:
    return Ranks(R, 2, 3, 5, 128, **options), np.random.default_rng(R)


@pytest.mark.parametrize("seed", range(3))
def test_barrier(seed: int) -> None:
    world, _ = make(4)
    told = []
    for r in range(4):
        world.wait(r, r * 20_000)
        told += [(r, *world.step(r, OP_BARRIER)) for _ in range(3)]
    world.run(seed)
    assert [world.verdicts(*one)[one[0]] for one in told] == [C.EPCY_VERDICT_OK] * 12


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("waits", [True, False])
def test_refusal(layout: str, waits: bool) -> None:
    world, rng = make()
    check_refusal(world, rng, layout, waits)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("waits", [True, False])
def test_mismatch(layout: str, waits: bool) -> None:
    world, rng = make()
    given = inputs(rng, world, layout)
    worst = 0 if waits else 20
    got = [queue_dispatch(world, r, given, worst=worst, header_xor=(r == 2) << 8) for r in range(3)]
    world.run(1)
    for r in range(3):
        if waits:
            assert world.verdicts(r, got[r].report, got[r].ticket) == [C.EPCY_VERDICT_MISMATCH] * 3
        else:
            report = world.report(r)
            assert report.late_verdict == C.EPCY_VERDICT_MISMATCH
            raw = world.reports[r][C.epcy_report.late_text.offset :][:16].view(np.uint32).tolist()
            assert [h >> 8 & 1 for h in raw[:3]] == [1, 1, 0] and raw[3] == 1
    clear(world)
    check_good_call(world, rng, 2, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(4))
def test_bad_id_that_is_waited_for(seed: int, layout: str) -> None:
    world, rng = make()
    given = inputs(rng, world, layout, Ts=[4, 5, 5])
    given.idxs[1][2, 1], given.idxs[1][4, 0] = world.E, -2
    got = [queue_dispatch(world, r, given) for r in range(3)]
    world.run(seed)
    for r in range(3):
        assert world.verdicts(r, got[r].report, got[r].ticket) == [C.EPCY_VERDICT_BAD_ID] * 3
        assert got[r].handle.arrays["num_recv"][0] == 0
        counts = world.control_words(r, world.control.counts + 3 * 32 * 3 * 8, 3 * 32 * 3).reshape(3, 32, 3)
        chunks = np.nonzero(counts[1, :, 0] & C.EPCY_COUNT_BAD)[0]
        slot = world.control_words(r, world.control.bad + ((3 + 1) * 32 + int(chunks[0])) * 32, 3, np.int64)
        assert slot.tolist() == [2, 1, world.E]
    check_good_call(world, rng, 2, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_room_on_a_rank_that_waits(layout: str) -> None:
    """Its rows move nowhere, and all ranks are told; the others get theirs."""
    world, rng = make(num_rows=7)
    xs = [draws.floats(rng, (5, 128), np.float32) for _ in range(3)]
    idxs = [np.full((5, 3), -1) for _ in range(3)]
    for r in range(3):
        idxs[r][:, 0] = 2  # 15 rows of rank 1
        idxs[r][0, 1] = 5  # 3 rows of rank 2
    given = inputs(rng, world, layout, Ts=[5, 5, 5])
    given.xs, given.idxs = xs, idxs
    got = [queue_dispatch(world, r, given, worst=6 if r == 2 else 0) for r in range(3)]
    world.run(1)
    for r in (0, 1):
        over = [C.EPCY_VERDICT_OK, C.EPCY_VERDICT_OVERFLOW, C.EPCY_VERDICT_OK]
        assert world.verdicts(r, got[r].report, got[r].ticket) == over
    report = world.report(2)
    assert (report.late_verdict, report.late_rank) == (C.EPCY_VERDICT_OVERFLOW, 1)
    assert (report.late_rows, report.late_limit) == (15, 7)
    assert (got[1].payload.view(np.uint8) == 0x77).all()
    assert [got[2].payload[r].tobytes() for r in range(3)] == [xs[r][0].tobytes() for r in range(3)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("seed", range(2))
def test_a_rank_that_comes_too_late(op: str, seed: int) -> None:
    """All give up, the late one too; reset brings all together again."""
    R = 2 + seed
    world, rng = make(R, timeout_ns=TIMEOUT_NS)
    delays = [3 * TIMEOUT_NS if r == seed else 0 for r in range(R)]
    assert failed_ranks(world, seed, op, delays) == [True] * R
    first = world.report(1 - seed)
    assert first.peer == seed and not first.gone and first.phase == C.EPCY_CUDA_HEADERS
    assert world.report(seed).gone
    reset(world, seed, 1)
    check_good_call(world, rng, seed)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("seed", range(6))
def test_a_rank_that_comes_just_when_others_give_up(op: str, seed: int) -> None:
    """Whoever is not told of a failure has the right result."""
    rng = np.random.default_rng(seed)
    world, _ = make(3, timeout_ns=TIMEOUT_NS)
    failed = failed_ranks(world, seed, op, [0, 0, int(rng.integers(TIMEOUT_NS, TIMEOUT_NS * 7 // 4))])
    if any(failed):
        world.timeout_ns = 10 * TIMEOUT_NS
        reset(world, seed, 1)
    check_good_call(world, rng, seed)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("seed", range(2))
def test_a_rank_that_leaves_is_not_waited_for(op: str, seed: int) -> None:
    """No time-out would end these waits."""
    world, rng = make(3)
    failed = failed_ranks(world, seed, op, [0, 0, 0], leaves={seed: int(rng.integers(0, 500_000))})
    assert all(failed[r] for r in range(3) if r != seed)
    assert all(world.report(r).gone for r in range(3) if r != seed)
    reset(world, seed, 1)
    check_good_call(world, rng, seed)


def test_calls_of_a_broken_buffer_do_nothing() -> None:
    world, rng = make(2, timeout_ns=TIMEOUT_NS)
    _, _ = world.step(0), world.run(1)
    assert world.report(0).expired and world.report(0).operation == OP_BARRIER
    given = inputs(rng, world, "rank")
    got = queue_dispatch(world, 0, given)
    world.run(2)
    assert world.verdicts(0, got.report, got.ticket) == [C.EPCY_VERDICT_BROKEN] * 2
    assert (got.payload.view(np.uint8) == 0x77).all()


@pytest.mark.parametrize("seed", [7, 12, 56])
def test_after_two_to_the_32_calls(seed: int) -> None:
    """A step's small grid and a dispatch's large one in turn: the words of one are not those of the next."""
    rng = np.random.default_rng(seed)
    world = Ranks(2, 2, 2, 3, 128, timeout_ns=50_000_000)
    for r in range(2):
        world.local(r).epoch[:] = [0xFFFFFFFE] * C.EPCY_MAX_BLOCKS
    got = []
    for i in range(4):
        given = inputs(rng, world, "rank")
        for r in range(2):
            world.step(r, OP_BARRIER)
            one = queue_dispatch(world, r, given, which=i % 2, blocks=(3, 3, 0))
            got.append((world, r, one, given.want[r], given.routing))
        world.calls += 1
    world.run(seed)
    for one in got:
        check_dispatch(*one)
    assert not any(world.report(r).expired for r in range(2))


@pytest.mark.parametrize("name", ["barrier", "rank", "expert"])
def test_a_host_that_wants_waits_to_end(name: str) -> None:
    world, rng = make(2)  # whose waits last for ever
    C.epcy_report.from_buffer(world.reports[0]).stop = 1
    if name == "barrier":
        world.step(0, OP_BARRIER)
    else:
        got = queue_dispatch(world, 0, inputs(rng, world, name))
    world.run(1)
    assert world.local(0).broken == 1 and not world.report(0).expired
    assert world.control_words(1, world.control.left, 2, np.uint32).tolist() == [1, 0]
    if name != "barrier":
        assert world.verdicts(0, got.report, got.ticket) == [C.EPCY_VERDICT_BROKEN] * 2
