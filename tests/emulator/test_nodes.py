"""Dispatch and combine between nodes: the rows and bits of the reference, whatever the network does."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

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
from emulator.high_throughput_cases import check_dispatch, random_case
from emulator.nodes import NodesRanks
from emulator.structs import C

NODES = [(2, 1), (4, 2), (4, 1), (3, 1)]
SMALLEST: dict[str, Any] = {"num_slots": 1, "chunk_tokens": 1, "num_blocks": 1}


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("path", ["direct", "hierarchical"])
@pytest.mark.parametrize("ranks", NODES, ids=lambda n: f"{n[0]} ranks, {n[1]} a node")
@pytest.mark.parametrize("smallest", [{}, SMALLEST], ids=["usual", "smallest"])
def test_random(smallest: Any, ranks: tuple[int, int], path: str, layout: str) -> None:
    world = partial(NodesRanks, ranks_per_node=ranks[1], path=path, **smallest)
    random_case(10 * ranks[0] + ranks[1], R=ranks[0], layout=layout, world=world, shape=(17, 128), K=4)


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_nodes_of_different_sizes(layout: str) -> None:
    world = partial(NodesRanks, ranks_per_node=2, path="direct")
    random_case(5, R=3, layout=layout, world=world, shape=(17, 128), K=4)


@pytest.mark.parametrize("path", ["direct", "hierarchical"])
def test_bytes_that_are_counted(path: str) -> None:
    """Rows between ranks: of a dispatch those sent, of a combine those sent to other nodes and read in the own one."""
    R, row_bytes = 4, 128 * 4
    world = NodesRanks(R, 2, 3, 5, 128, ranks_per_node=2, path=path)
    given = inputs(np.random.default_rng(1), world, "rank", Ts=[5, 4, 3, 5])
    counts, owners = given.routing.counts, [idx // 2 for idx in given.idxs]

    def moved(r: int) -> int:
        return int(C.epcy_counters.from_buffer(world.memory[r], world.control.counters).bytes_moved)

    def reach(tokens_of: int, ranks: list[int]) -> int:
        held = (given.idxs[tokens_of] >= 0) & np.isin(owners[tokens_of], ranks)
        return int(held.any(1).sum())

    got = [queue_dispatch(world, r, given) for r in range(R)]
    world.run(1)
    dispatched = [moved(r) for r in range(R)]
    ys = [np.ones((given.routing.num_rows(r), 128), np.float32) for r in range(R)]
    for r in range(R):
        world.combine(r, got[r].handle, ys[r])
    world.run(2)
    for r in range(R):
        mate, far = r ^ 1, [q for q in range(R) if q // 2 != r // 2]
        near = [r, mate]
        sent = int(counts[r][mate]) + (
            sum(int(counts[r][q]) for q in far) if path == "direct" else reach(r, far)
        )
        partner = r ^ 2  # whose tokens this rank sums, and it alone of its node
        back = (
            sum(int(counts[q][r]) for q in far)
            if path == "direct"
            else reach(partner, near) + int(counts[partner][mate])
        )
        assert dispatched[r] == sent * row_bytes, f"rank {r}"
        assert moved(r) - dispatched[r] == (back + int(counts[r][mate])) * row_bytes, f"rank {r}"


# ---- calls that fail


def make(R: int = 4, path: str = "hierarchical", **options: Any) -> tuple[NodesRanks, Any]:
    world = NodesRanks(R, 2, 3, 5, 128, ranks_per_node=2 if R == 4 else 1, path=path, **options)
    return world, np.random.default_rng(R)


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("waits", [True, False])
def test_refusal(layout: str, waits: bool) -> None:
    world, rng = make()
    check_refusal(world, rng, layout, waits)


@pytest.mark.parametrize("waits", [True, False])
def test_mismatch(waits: bool) -> None:
    world, rng = make()
    given = inputs(rng, world, "rank")
    got = [
        queue_dispatch(world, r, given, worst=0 if waits else 20, header_xor=(r == 2) << 8) for r in range(4)
    ]
    world.run(1)
    for r in range(4):
        if waits:
            assert world.verdicts(r, got[r].report, got[r].ticket) == [C.EPCY_VERDICT_MISMATCH] * 4
        else:
            assert world.report(r).late_verdict == C.EPCY_VERDICT_MISMATCH
    clear(world)
    check_good_call(world, rng, 2)


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_bad_id_that_is_waited_for(layout: str) -> None:
    world, rng = make()
    given = inputs(rng, world, layout, Ts=[4, 5, 5, 0])
    given.idxs[1][2, 1], given.idxs[1][4, 0] = world.E, -2
    got = [queue_dispatch(world, r, given) for r in range(4)]
    world.run(3)
    at = world.nodes_wire.records + (4 + 1) * world.nodes_wire.record_bytes
    for r in range(4):
        assert world.verdicts(r, got[r].report, got[r].ticket) == [C.EPCY_VERDICT_BAD_ID] * 4
        assert got[r].handle.arrays["num_recv"][0] == 0
        record = C.epcy_nodes_record.from_buffer(world.memory[r], at)
        assert min(tuple(bad) for bad in record.bad if bad[0] >= 0) == (2 * 3 + 1, world.E)
    check_good_call(world, rng, 2, layout)


@pytest.mark.parametrize("path", ["direct", "hierarchical"])
def test_no_room_on_a_rank_that_waits(path: str) -> None:
    """Its rows move nowhere, and all ranks are told; the others get theirs."""
    world, rng = make(path=path, num_rows=7)
    given = inputs(rng, world, "rank", Ts=[5] * 4)
    for idx in given.idxs:
        idx[:] = -1
        idx[:, 0] = 2  # 20 rows of rank 1
        idx[0, 1] = 5  # 4 rows of rank 2
    got = [queue_dispatch(world, r, given, worst=6 if r == 2 else 0) for r in range(4)]
    world.run(1)
    over = [C.EPCY_VERDICT_OK, C.EPCY_VERDICT_OVERFLOW, C.EPCY_VERDICT_OK, C.EPCY_VERDICT_OK]
    for r in (0, 1, 3):
        assert world.verdicts(r, got[r].report, got[r].ticket) == over
    report = world.report(2)
    assert (report.late_verdict, report.late_rank) == (C.EPCY_VERDICT_OVERFLOW, 1)
    assert (report.late_rows, report.late_limit) == (20, 7)
    assert (got[1].payload.view(np.uint8) == 0x77).all()
    assert [got[2].payload[r].tobytes() for r in range(4)] == [given.xs[r][0].tobytes() for r in range(4)]


@pytest.mark.parametrize("op", OPS)
def test_a_rank_that_comes_too_late(op: str) -> None:
    """All give up, the late one too; reset brings all together again."""
    world, rng = make(timeout_ns=TIMEOUT_NS)
    assert failed_ranks(world, 1, op, [0, 3 * TIMEOUT_NS, 0, 0]) == [True] * 4
    assert world.report(2).peer == 1 and world.report(2).phase == C.EPCY_CUDA_HEADERS
    reset(world, 1, 1)
    check_good_call(world, rng, 1)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("path", ["direct", "hierarchical"])
@pytest.mark.parametrize("seed", range(2))
def test_a_rank_that_comes_just_when_others_give_up(op: str, path: str, seed: int) -> None:
    """Whoever is not told of a failure has the right result."""
    rng = np.random.default_rng(seed)
    world, _ = make(path=path, timeout_ns=TIMEOUT_NS)
    failed = failed_ranks(world, seed, op, [0, 0, int(rng.integers(TIMEOUT_NS, TIMEOUT_NS * 7 // 4)), 0])
    if any(failed):
        world.timeout_ns = 10 * TIMEOUT_NS
        reset(world, seed, 1)
    check_good_call(world, rng, seed)


def test_who_gives_up_says_so_to_ranks_of_other_nodes() -> None:
    """Rank 3 never comes: who waits in vain tells the others, and whoever leaves does."""
    world, rng = make(timeout_ns=TIMEOUT_NS)
    for r in range(3):
        world.step(r)
    world.run(1)
    assert all(world.report(r).expired for r in range(3))
    left = world.control_words(3, world.control.left, 2).view(np.uint32)
    assert left.tolist() == [1, 1, 1, 0]
    world.leave(3)
    world.run(2)
    assert world.control_words(0, world.control.left, 2).view(np.uint32)[3] == 1
    reset(world, 3, 1)
    check_good_call(world, rng, 4)


@pytest.mark.parametrize("path", ["direct", "hierarchical"])
def test_after_two_to_the_32_calls(path: str) -> None:
    rng = np.random.default_rng(7)
    world = NodesRanks(2, 2, 2, 3, 128, ranks_per_node=1, path=path, timeout_ns=50_000_000, chunk_tokens=1)
    for r in range(2):
        world.local(r).epoch[:] = [0xFFFFFFFE] * C.EPCY_MAX_BLOCKS
    got = []
    for i in range(4):
        given = inputs(rng, world, "rank")
        for r in range(2):
            world.step(r)
            one = queue_dispatch(world, r, given, which=i % 2)
            got.append((world, r, one, given.want[r], given.routing))
        world.calls += 1
    world.run(7)
    for one in got:
        check_dispatch(*one)
    assert not any(world.report(r).expired for r in range(2))
