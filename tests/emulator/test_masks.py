"""Low latency without some ranks: whatever each rank has masked, rows, sums and lost lanes are the reference's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emulator import draws
from emulator.low_latency import BOTH, RECEIVE, SEND, LowLatencyRanks, ranks_of
from emulator.low_latency_cases import check_received, outputs
from emulator.structs import C
from emulator.world import FLOATS
from epcy import reference

Masked = list[tuple[int, ...]]


def lanes_to(idx: Any, rank: int, num_local: int) -> int:
    return int(((idx >= 0) & (idx // num_local == rank)).sum())


class Pair:
    """A dispatch and a combine of all ranks, queued; `check` after the run. `masked` at both of them."""

    def __init__(
        self,
        world: LowLatencyRanks,
        rng: Any,
        masked: Masked,
        *,
        hooks: bool = False,
        pauses: int = 0,
        renormalize: bool = False,
        by_source: bool = False,
        use_logfmt: bool = False,
        weights: bool = True,
        given: bool = False,
        use_fp8: bool = True,
    ) -> None:
        R, K, E, H = world.R, world.K, world.E, world.H
        self.world, self.masked = world, masked
        Ts = [int(rng.integers(0, world.M + 1)) for _ in range(R)]
        self.xs = [draws.floats(rng, (T, H), FLOATS[0]) for T in Ts]
        self.idxs = [draws.lanes(rng, T, K, E) for T in Ts]
        ws = [draws.weights(rng, i) for i in self.idxs] if weights else [None] * R
        given_ws = [draws.weights(rng, i) for i in self.idxs] if given else None
        self.handles = [world.make_handle(r) for r in range(R)]
        self.casts = {"use_fp8": use_fp8}
        _, self.routing = reference.low_latency_dispatch(
            self.xs, self.idxs, num_experts=E, num_max_tokens_per_rank=world.M, masked=masked, **self.casts
        )
        self.ys = outputs(rng, world, self.routing, FLOATS[0])
        self.how = {"by_source": by_source, "use_logfmt": use_logfmt}
        self.renormalize, self.applied = renormalize, given_ws or (ws if weights else None)
        self.got, self.outs = [], []
        blocks = [int(rng.integers(1, 4)) for _ in range(R)]
        phases = (SEND, RECEIVE) if hooks else (BOTH,)
        for r in range(R):
            into = out = None
            for phase in phases:
                self.pause(r, rng, pauses)
                into = world.dispatch(r, self.handles[r], self.xs[r], self.idxs[r], ws[r], phases=phase,
                                      blocks=blocks[r], into=into, **self.casts)  # fmt: skip
            for phase in phases:
                self.pause(r, rng, pauses)
                out = world.combine(r, self.handles[r], self.ys[r], Ts[r], given_ws[r] if given_ws else None,
                                    phases=phase, blocks=blocks[r], out=out, renormalize=renormalize,
                                    **self.how)  # fmt: skip
            self.got.append(into)
            self.outs.append(out)

    def pause(self, rank: int, rng: Any, most: int) -> None:
        if most:
            self.world.wait(rank, int(rng.integers(0, most)))

    def check(self) -> None:
        world, masked = self.world, self.masked
        check_received(world, self.got, self.xs, self.idxs, masked=masked, **self.casts)
        reduction = "source" if self.how["by_source"] else "rank"
        want = reference.low_latency_combine(
            self.ys, self.routing, self.applied, reduction=reduction, use_logfmt=self.how["use_logfmt"],
            renormalize=self.renormalize,
        )  # fmt: skip
        for r in range(world.R):
            bad = [t for t in range(len(want[r])) if not draws.same_bits(self.outs[r][t], want[r][t])]
            assert not bad, f"rank {r}, masked {masked}, {self.how}: tokens {bad} of {len(want[r])}"
            to = [lanes_to(self.idxs[r], q, world.L) for q in range(world.R)]
            by = [q for q in range(world.R) if r in masked[q] and q not in masked[r]]
            not_sent = [to[q] if q in masked[r] else 0 for q in range(world.R)]
            lost = [to[q] if q in by else 0 for q in range(world.R)]
            assert world.dropped(self.handles[r]) == (not_sent, lost), f"rank {r}"
            found = world.found(self.handles[r])
            assert ranks_of(found.missing) == tuple(sorted({*masked[r], *by})), f"rank {r}"
            assert ranks_of(found.left_by) == tuple(by)
            assert not world.report(r).expired and not world.report(r).late_verdict


def lanes_lost(world: LowLatencyRanks, rank: int) -> list[list[int]]:
    counters = C.epcy_counters.from_buffer(world.memory[rank], world.control.counters)
    return [list(counters.lanes_lost[i][: world.R]) for i in range(2)]


def change(world: LowLatencyRanks, before: Masked, after: Masked) -> None:
    for r in range(world.R):
        world.mask(r, set(after[r]) - set(before[r]), set(before[r]) - set(after[r]))


@pytest.mark.parametrize("seed", range(12))
def test_any_masks(seed: int) -> None:
    """Any rank without any others, changing, at different paces."""
    rng = np.random.default_rng(seed)
    R, L = int(rng.choice([2, 2, 3, 4])), int(rng.choice([1, 3]))
    K, H = int(rng.choice([1, 3, 8, 8])), 128
    world = LowLatencyRanks(R, L, K, 3, H, row_bytes=H * 4, goes_on=seed % 3 == 2)
    masked: Masked = [()] * R
    for _ in range(2):
        before = masked
        masked = [tuple(q for q in range(R) if q != r and rng.random() < 0.35) for r in range(R)]
        change(world, before, masked)
        world.run(seed)  # all have made the same calls before a mask goes
        pairs = [
            Pair(world, rng, masked, hooks=rng.random() < 0.3, pauses=60_000, renormalize=rng.random() < 0.4,
                 by_source=rng.random() < 0.5, use_logfmt=rng.random() < 0.3, weights=rng.random() < 0.7,
                 use_fp8=rng.random() < 0.5, given=rng.random() < 0.3)
            for _ in range(2)
        ]  # fmt: skip
        world.run(seed + 1)
        for pair in pairs:
            pair.check()
    change(world, masked, [()] * R)
    world.run(seed)
    last = Pair(world, rng, [()] * R)
    world.run(seed + 2)
    last.check()


@pytest.mark.parametrize("by_source", [False, True], ids=["rank", "source"])
@pytest.mark.parametrize("R", [2, 3])
def test_a_masked_rank_that_is_far_behind(R: int, by_source: bool) -> None:
    """The others make four pairs before it makes its first: it finds that each of them went on without it."""
    rng = np.random.default_rng(R)
    world = LowLatencyRanks(R, 2, 8, 5, 256, row_bytes=512)
    out = R - 1
    masked: Masked = [(out,) if r != out else () for r in range(R)]
    change(world, [()] * R, masked)
    world.wait(out, 3_000_000)
    pairs = [Pair(world, rng, masked, by_source=by_source, hooks=i % 2 == 1) for i in range(4)]
    world.run(1)
    for pair in pairs:
        pair.check()
    report = world.report(out)
    assert ranks_of(report.without) == tuple(range(out)) and report.without_operation
    totals = [
        np.sum([world.dropped(p.handles[r])[i] for p in pairs], 0).tolist()
        for r in range(R)
        for i in range(2)
    ]
    assert totals == [lost for r in range(R) for lost in lanes_lost(world, r)]
    change(world, masked, [()] * R)
    world.run(2)
    last = Pair(world, rng, [()] * R, by_source=by_source)
    world.run(3)
    last.check()


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("by_source", [False, True], ids=["rank", "source"])
@pytest.mark.parametrize("R, K", [(2, 8), (3, 3)])
def test_masked_between_dispatch_and_combine(R: int, K: int, by_source: bool, renormalize: bool) -> None:
    """The rows of that rank are missing, nothing moves; and the masked rank misses what it sent."""
    rng = np.random.default_rng(K)
    world = LowLatencyRanks(R, 2, K, 6, 256, row_bytes=512)
    xs = [draws.floats(rng, (6, 256), FLOATS[0]) for _ in range(R)]
    idxs = [draws.lanes(rng, 6, K, world.E) for _ in range(R)]
    ws = [draws.weights(rng, i) for i in idxs]
    handles = [world.make_handle(r) for r in range(R)]
    for r in range(R):
        world.dispatch(r, handles[r], xs[r], idxs[r], ws[r])
    world.run(1)
    _, routing = reference.low_latency_dispatch(
        xs, idxs, num_experts=world.E, num_max_tokens_per_rank=world.M
    )
    ys = outputs(rng, world, routing, FLOATS[0])
    out = R - 1
    for r in range(out):
        world.mask(r, [out])
    outs = [
        world.combine(r, handles[r], ys[r], 6, by_source=by_source, renormalize=renormalize) for r in range(R)
    ]
    world.run(2)
    lost = [[q == out or r == out and q != r for q in range(R)] for r in range(R)]
    for r in range(R):
        lost[r][r] = False
    rows = [
        np.where((idx >= 0) & np.array(lost[r])[idx // world.L], -1, routing.lane_row[r])
        for r, idx in enumerate(idxs)
    ]
    without = reference.Routing(**{**vars(routing), "lane_row": tuple(rows)})
    want = reference.low_latency_combine(
        ys, without, ws, reduction="source" if by_source else "rank", renormalize=renormalize
    )
    for r in range(R):
        assert draws.same_bits(outs[r], want[r]), f"rank {r}"
        told = [lanes_to(idxs[r], q, world.L) if lost[r][q] else 0 for q in range(R)]
        assert world.dropped(handles[r]) == ([0] * R, told), f"rank {r}"
    assert ranks_of(world.report(out).without) == tuple(range(out))


@pytest.mark.parametrize("seed", range(6))
def test_a_late_rank_is_masked(seed: int) -> None:
    """With goes_on: sent to by all, received from by none of those that waited; then without it, until it is back."""
    rng = np.random.default_rng(seed)
    R = 2 + seed % 3
    world = LowLatencyRanks(
        R, 2, int(rng.choice([2, 8])), 5, 256, row_bytes=512, goes_on=True, timeout_ns=4_000_000
    )
    first = Pair(world, rng, [()] * R)
    world.run(seed)
    first.check()
    out = R - 1
    world.wait(out, 40_000_000)
    late = Pair(world, rng, [()] * R, by_source=seed % 2 == 1)
    masked: Masked = [(out,) if r != out else () for r in range(R)]
    pairs = [Pair(world, rng, masked, by_source=seed % 2 == 0, hooks=i == 1) for i in range(3)]
    world.run(seed + 1)
    for r in range(out):
        assert world.masked(r) == (out,) and ranks_of(world.report(r).masked) == (out,)
        assert ranks_of(world.found(late.handles[r]).missing) == (out,)
        lost = [lanes_to(late.idxs[r], q, world.L) if q == out else 0 for q in range(R)]
        assert world.dropped(late.handles[r]) == ([0] * R, lost)
    # what they had sent it before they gave it up has come, its own rows went to nobody
    assert world.found(late.handles[out]).missing == 0
    lost = [lanes_to(late.idxs[out], q, world.L) if q != out else 0 for q in range(R)]
    assert world.dropped(late.handles[out]) == ([0] * R, lost)
    for pair in pairs:
        pair.check()
    change(world, masked, [()] * R)
    world.run(seed + 2)
    last = Pair(world, rng, [()] * R)
    world.run(seed + 3)
    last.check()


def test_a_rank_that_comes_in_the_very_moment() -> None:
    """Either all of a call's blocks have it or none: never a part of a row, and both sides count the same lanes."""
    masked = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        world = LowLatencyRanks(2, 2, 3, 5, 256, row_bytes=512, goes_on=True, timeout_ns=3_000_000)
        world.wait(1, int(rng.integers(1_000_000, 4_400_000)))
        pair = Pair(world, rng, [()] * 2, by_source=seed % 2 == 1)
        world.run(seed)
        missing = world.found(pair.handles[0]).missing
        masked += missing != 0
        after: Masked = [(1,), ()] if missing else [(), ()]
        # Rank 1 had been sent everything; what it sent counts only where it was waited for.
        want, _ = reference.low_latency_dispatch(
            pair.xs, pair.idxs, num_experts=4, num_max_tokens_per_rank=5, use_fp8=True, masked=after
        )
        counts = pair.got[0].count.tolist()
        assert counts == want[0].recv_count.tolist(), f"seed {seed}"
        for e, n in enumerate(counts):
            assert draws.same_bits(pair.got[0].recv_x[e, :n], want[0].recv_x[0][e, :n])
        for r in range(2):
            assert not world.report(r).expired and not world.report(r).late_verdict, f"seed {seed}"
    assert 0 < masked < 10


@pytest.mark.parametrize("seed", range(3))
def test_refusals_and_masks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    world = LowLatencyRanks(3, 2, 3, 5, 256, row_bytes=512)
    masked: Masked = [(2,), (2,), ()]
    change(world, [()] * 3, masked)
    kind = C.EPCY_LOW_LATENCY_DISPATCH
    world.refuse(0, kind, b"rank 0 refused: no")
    xs = [draws.floats(rng, (5, 256), FLOATS[0]) for _ in range(3)]
    handles = [world.make_handle(r) for r in range(3)]
    got = [world.dispatch(r, handles[r], xs[r], draws.lanes(rng, 5, 3, 6)) for r in (1, 2)]
    world.run(seed)
    report = world.report(1)
    assert (report.late_verdict, report.late_rank) == (C.EPCY_VERDICT_REFUSED, 0)
    assert not world.report(2).late_verdict and ranks_of(world.report(2).without) == (0, 1)
    assert not got[0].count.any()
    for r in range(3):
        C.epcy_report.from_buffer(world.reports[r]).late_verdict = 0
    pair = Pair(world, rng, masked)
    world.run(seed + 1)
    pair.check()
