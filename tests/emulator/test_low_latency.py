"""Low-latency dispatch and combine, with hooks and two calls in flight, against the reference bit by bit."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from emulator import draws
from emulator.low_latency import BOTH, OP_COMBINE, OP_DISPATCH, RECEIVE, SEND, LowLatencyRanks
from emulator.low_latency_cases import (
    calls_in_flight,
    check_quiet,
    check_received,
    check_sums,
    outputs,
    random_case,
)
from emulator.structs import C
from emulator.world import FLOATS
from epcy import reference


@pytest.mark.parametrize("seed", range(30))
def test_random(seed: int) -> None:
    random_case(seed)


@pytest.mark.parametrize("refuse", [False, True], ids=["", "refused"])
@pytest.mark.parametrize("wrap", [False, True], ids=["", "wrapped"])
@pytest.mark.parametrize("seed", range(1, 5))
def test_calls_in_flight(seed: int, wrap: bool, refuse: bool) -> None:
    calls_in_flight(seed, wrap, refuse)


def good_call(world: LowLatencyRanks, seed: int, xs: list, idxs: list, blocks: list[int]) -> None:
    handles = [world.make_handle(r) for r in range(world.R)]
    ws = [draws.weights(np.random.default_rng(seed), i) for i in idxs]
    got = [world.dispatch(r, handles[r], xs[r], idxs[r], ws[r], blocks=blocks[r]) for r in range(world.R)]
    good = [np.where((i < -1) | (i >= world.E), -1, i) for i in idxs]
    _, routing = reference.low_latency_dispatch(
        xs, good, num_experts=world.E, num_max_tokens_per_rank=world.M, use_fp8=True
    )
    ys = outputs(np.random.default_rng(seed), world, routing, FLOATS[0])
    how = {"by_source": bool(seed % 2), "use_logfmt": bool(seed // 2 % 2)}
    outs = [world.combine(r, handles[r], ys[r], len(xs[r]), blocks=blocks[r], **how) for r in range(world.R)]
    world.run(seed)
    check_received(world, got, xs, good, use_fp8=True)
    check_sums(outs, ys, routing, ws, how)


@pytest.mark.parametrize("blocks", [[3, 3], [7, 40], [40, 40], [9, 2]], ids=str)
@pytest.mark.parametrize("H", [512, 7680])
@pytest.mark.parametrize("seed", range(2))
def test_usual_sizes(seed: int, H: int, blocks: list[int]) -> None:
    """Two ranks and eight lanes have kernels of their own: for few tokens, and for more than there are blocks."""
    rng = np.random.default_rng(seed)
    world = LowLatencyRanks(2, 6, 8, 9, H, row_bytes=H * 2, num_rows=40)
    xs = [draws.floats(rng, (int(rng.integers(1, 9)), H), FLOATS[0]) for _ in range(2)]
    good_call(world, seed, xs, [draws.lanes(rng, len(x), 8, world.E, unused=0.1) for x in xs], blocks)
    check_quiet(world)


@pytest.mark.parametrize("R, K", [(2, 8), (3, 2)])
@pytest.mark.parametrize("halves", [False, True], ids=["", "hooks"])
def test_statistics(R: int, K: int, halves: bool) -> None:
    """What kernels count and stamp: lanes to and from each rank, of each expert, rows, and the ends of phases."""
    rng = np.random.default_rng(R)
    world = LowLatencyRanks(R, 3, K, 7, 256, row_bytes=512)
    xs = [draws.floats(rng, (3 + r, 256), FLOATS[0]) for r in range(R)]
    idxs = [draws.lanes(rng, len(x), K, world.E, unused=0.2) for x in xs]
    handles = [world.make_handle(r) for r in range(R)]
    phases = (SEND, RECEIVE) if halves else (BOTH,)
    for phase in phases:
        got = [world.dispatch(r, handles[r], xs[r], idxs[r], phases=phase, blocks=4) for r in range(R)]
    _, routing = reference.low_latency_dispatch(
        xs, idxs, num_experts=world.E, num_max_tokens_per_rank=world.M
    )
    ys = outputs(rng, world, routing, FLOATS[0])
    for phase in phases:
        for r in range(R):
            world.combine(r, handles[r], ys[r], len(xs[r]), phases=phase, blocks=4)
    world.run(R)
    lanes = np.zeros((R, R), np.int64)  # by source and expert's rank; an expert counts once a token
    for r, idx in enumerate(idxs):
        for ids in idx:
            for e in {int(e) for e in ids if e >= 0}:
                lanes[r, e // world.L] += 1
    for r in range(R):
        counters = C.epcy_counters.from_buffer(world.memory[r], world.control.counters)
        assert list(counters.tokens_to[:R]) == lanes[r].tolist()
        assert list(counters.tokens_from[:R]) == lanes[:, r].tolist()
        at = world.control.counters + ctypes.sizeof(C.epcy_counters)
        assert (
            world.memory[r][at : at + 8 * world.L].view(np.int64).tolist()
            == routing.num_tokens_per_expert[r].tolist()
        )
        assert max(counters.most_rows[1]) == lanes[:, r].sum()
        flows = (ctypes.c_int32 * (2 * R)).from_address(handles[r].flows)
        assert list(flows) == lanes[r].tolist() + lanes[:, r].tolist()
        for kind, op in ((1, OP_DISPATCH), (2, OP_COMBINE)):
            stamps = [counters.stamps[k][1] for k in ((kind, kind + 2) if halves else (kind,))]
            ends = [[s.start_ns, *(t for t in s.end_ns[1:] if t), s.end_ns[0]] for s in stamps]
            assert all(s.epoch_op == s.again == 1 << 32 | op for s in stamps)
            assert all(e == sorted(e) and e[0] for e in ends)
            assert [len(e) for e in ends] == ([3, 4] if halves else [5])  # send; wait, and fan out or reduce
    del got


@pytest.mark.parametrize("K, M, Ts, blocks", [(32, 36, [35, 3], [3, 2]), (9, 40, [0, 37], [1, 2])])
@pytest.mark.parametrize("seed", range(2))
def test_many_tokens(seed: int, K: int, M: int, Ts: list[int], blocks: list[int]) -> None:
    """More tokens than a warp counts at once."""
    rng = np.random.default_rng(seed)
    world = LowLatencyRanks(2, 16, K, M, 128, row_bytes=512)
    xs = [draws.floats(rng, (T, 128), FLOATS[0]) for T in Ts]
    good_call(world, seed, xs, [draws.lanes(rng, T, K, world.E, unused=0.05) for T in Ts], blocks)
    check_quiet(world)


def test_mismatch_then_refusal_then_a_good_call() -> None:
    rng = np.random.default_rng(1)
    world = LowLatencyRanks(2, 3, 2, 6, 256, row_bytes=1024)
    xs = [draws.floats(rng, (T, 256), FLOATS[0]) for T in (5, 6)]
    idxs = [draws.lanes(rng, len(x), 2, world.E) for x in xs]
    handles = [world.make_handle(r) for r in range(2)]
    got = [world.dispatch(r, handles[r], xs[r], idxs[r], use_fp8=r == 0) for r in range(2)]
    world.run(1)
    for r in range(2):
        assert not got[r].count.any()
        report = world.report(r)
        assert report.late_verdict == C.EPCY_VERDICT_MISMATCH
        raw = world.reports[r][C.epcy_report.late_text.offset :][:8].view(np.uint32)
        assert [h & 7 for h in raw.tolist()] == [OP_DISPATCH] * 2
        C.epcy_report.from_buffer(world.reports[r]).late_verdict = 0
    world.refuse(0, C.EPCY_LOW_LATENCY_COMBINE, b"rank 0 refused: no")
    y = np.zeros((3, 12, 256), FLOATS[0])
    world.combine(1, handles[1], y, 6)
    world.run(2)
    report = world.report(1)
    assert (report.late_verdict, report.late_rank) == (C.EPCY_VERDICT_REFUSED, 0)
    assert report.late_text == b"rank 0 refused: no"
    assert not world.report(0).late_verdict
    for r in range(2):
        C.epcy_report.from_buffer(world.reports[r]).late_verdict = 0
    good_call(world, 3, xs, idxs, [3, 2])
    check_quiet(world)


def test_bad_ids_count_as_unused_and_are_told() -> None:
    rng = np.random.default_rng(1)
    world = LowLatencyRanks(2, 3, 2, 6, 256, row_bytes=1024)
    xs = [draws.floats(rng, (T, 256), FLOATS[0]) for T in (5, 6)]
    idxs = [draws.lanes(rng, len(x), 2, world.E) for x in xs]
    idxs[1][3, 0], idxs[1][5, 1] = 10**6, -5
    good_call(world, 2, xs, idxs, [3, 2])
    bad = world.report(1).bad[0]
    assert bad.epoch and (bad.token, bad.lane, bad.value) == (3, 0, 10**6)
    assert not world.report(0).bad[0].epoch


def test_a_late_rank_breaks_the_buffer() -> None:
    rng = np.random.default_rng(1)
    world = LowLatencyRanks(2, 3, 2, 6, 256, row_bytes=1024, timeout_ns=1_000_000)
    xs = [draws.floats(rng, (T, 256), FLOATS[0]) for T in (5, 6)]
    idxs = [draws.lanes(rng, len(x), 2, world.E) for x in xs]
    got = world.dispatch(0, world.make_handle(0), xs[0], idxs[0])
    world.run(1)
    assert world.report(0).expired and world.report(0).peer == 1 and not got.count.any()


def test_a_host_that_wants_waits_to_end() -> None:
    rng = np.random.default_rng(1)
    world = LowLatencyRanks(2, 3, 2, 6, 256, row_bytes=1024)  # whose waits last for ever
    C.epcy_report.from_buffer(world.reports[0]).stop = 1
    x, idx = draws.floats(rng, (5, 256), FLOATS[0]), draws.lanes(rng, 5, 2, world.E)
    got = world.dispatch(0, world.make_handle(0), x, idx)
    world.run(1)
    assert world.local(0).broken == 1 and not world.report(0).expired and not got.count.any()
    assert world.control_words(1, world.control.left, 2, np.uint32).tolist() == [1, 0]


@pytest.mark.parametrize("by_source", [False, True], ids=["rank", "source"])
@pytest.mark.parametrize("comes", ["late", "refuses"])
@pytest.mark.parametrize("missing", [1, 2])
def test_a_combine_without_one_of_three(missing: int, comes: str, by_source: bool) -> None:
    """Lines of several ranks are waited for together: who is late is named, and nobody waits for one who refuses."""
    rng = np.random.default_rng(missing)
    limit = {"timeout_ns": 2_000_000} if comes == "late" else {}
    world = LowLatencyRanks(3, 2, 4, 6, 256, row_bytes=1024, **limit)
    xs = [draws.floats(rng, (5, 256), FLOATS[0]) for _ in range(3)]
    idxs = [np.stack([rng.permutation(world.E)[:4] for _ in range(5)]).astype(np.int64) for _ in range(3)]
    handles = [world.make_handle(r) for r in range(3)]
    for r in range(3):
        world.dispatch(r, handles[r], xs[r], idxs[r])
    world.run(1)
    check_quiet(world)
    y = np.zeros((2, 18, 256), FLOATS[0])
    others = [r for r in range(3) if r != missing]
    for r in others:
        world.combine(r, handles[r], y, 5, by_source=by_source)
    if comes == "refuses":
        world.refuse(missing, C.EPCY_LOW_LATENCY_COMBINE, b"no")
    world.run(2)
    for r in others:
        report = world.report(r)
        if comes == "late":
            assert report.expired and report.peer == missing
        else:
            assert (report.late_verdict, report.late_rank) == (C.EPCY_VERDICT_REFUSED, missing)


@pytest.mark.parametrize("by_source", [False, True], ids=["rank", "source"])
def test_after_a_mismatch_nothing_is_waited_for(by_source: bool) -> None:
    """The handle of a dispatch that failed names no rows: a combine with it ends, and gives zeros."""
    rng = np.random.default_rng(4)
    world = LowLatencyRanks(2, 3, 8, 6, 256, row_bytes=1024)
    xs = [draws.floats(rng, (5, 256), FLOATS[0]) for _ in range(2)]
    idxs = [draws.lanes(rng, 5, 8, world.E) for _ in range(2)]
    handles = [world.make_handle(r) for r in range(2)]
    for r in range(2):
        world.dispatch(r, handles[r], xs[r], idxs[r], use_fp8=r == 0)
    world.run(1)
    for r in range(2):
        assert world.report(r).late_verdict == C.EPCY_VERDICT_MISMATCH
        C.epcy_report.from_buffer(world.reports[r]).late_verdict = 0
    y = np.ones((3, 12, 256), FLOATS[0])
    outs = [world.combine(r, handles[r], y, 5, by_source=by_source) for r in range(2)]
    world.run(2)
    check_quiet(world)
    assert not any(out.view(np.uint16).any() for out in outs)


@pytest.mark.parametrize("seed", range(4))
def test_of_two_missing_ranks_the_one_that_left_is_named(seed: int) -> None:
    rng = np.random.default_rng(seed)
    world = LowLatencyRanks(3, 2, 2, 6, 256, row_bytes=1024, timeout_ns=10**12)
    gone = 1 + seed % 2
    world.control_words(0, world.control.left, 2).view(np.uint32)[gone] = 1
    world.dispatch(
        0, world.make_handle(0), draws.floats(rng, (5, 256), FLOATS[0]), draws.lanes(rng, 5, 2, world.E)
    )
    world.run(seed)
    report = world.report(0)
    assert (report.expired, report.peer, report.gone) == (1, gone, 1)
