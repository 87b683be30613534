"""Whole low-latency cases: calls of all ranks, run, and compared with the reference bit by bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from emulator import draws
from emulator.low_latency import BOTH, RECEIVE, SEND, LowLatencyRanks
from emulator.structs import C
from emulator.world import FLOATS
from epcy import reference


def check_received(world: Any, got: list[Any], xs: list[Any], idxs: list[Any], **casts: Any) -> Any:
    want, routing = reference.low_latency_dispatch(
        xs, idxs, num_experts=world.E, num_max_tokens_per_rank=world.M, **casts
    )
    for r in range(world.R):
        assert got[r].count.tolist() == want[r].recv_count.tolist(), f"rank {r}"
        parts = want[r].recv_x if isinstance(want[r].recv_x, tuple) else (want[r].recv_x,)
        for i, (mine, part) in enumerate(zip((got[r].recv_x, got[r].scales), parts, strict=False)):
            for e, n in enumerate(want[r].recv_count.tolist()):
                bad = [j for j in range(n) if not draws.same_bits(mine[e, j], part[e, j])]
                assert not bad, f"rank {r}, part {i}, expert {e}: rows {bad} of {n}"
    return routing


def outputs(rng: Any, world: Any, routing: Any, dtype: Any, special: bool = False) -> list[Any]:
    """The experts' rows of each rank; NaN where none came."""
    ys = []
    for r in range(world.R):
        y = np.full((world.L, world.R * world.M, world.H), np.nan, dtype)
        for e, n in enumerate(routing.num_tokens_per_expert[r].tolist()):
            y[e, :n] = draws.floats(rng, (n, world.H), dtype, special)
        ys.append(y)
    return ys


def check_quiet(world: Any, verdict: int = 0, but: int | None = None) -> None:
    for r in range(world.R):
        report = world.report(r)
        assert not report.expired and not report.bad[0].epoch, f"rank {r}"
        assert report.late_verdict == (0 if r == but else verdict), f"rank {r}"


def random_case(seed: int, by_puts: bool = False) -> None:
    """A few dispatches with combines, of random sizes and options, ranks at different paces; `by_puts`: some far."""
    rng = np.random.default_rng(seed)
    R, L = int(rng.choice([1, 2, 2, 3, 4])), int(rng.choice([1, 3, 8]))
    K, M = int(rng.choice([1, 2, 4, 8, 9, 12, 32])), int(rng.choice([4, 9]))
    H = int(rng.choice([128, 256, 512, 1024] if rng.random() < 0.8 else [8, 56, 120, 1000]))
    if rng.random() < 0.07:
        H, K, M, R = 7680, min(K, 4), 4, min(R, 2)  # two parts of a row
    far = {"ranks_per_node": int(rng.integers(1, R))} if by_puts and R > 1 else {}
    world = LowLatencyRanks(R, L, K, M, H, row_bytes=H * 4, **far)
    x_dtype = FLOATS[int(rng.integers(3))]
    blocks = [int(rng.integers(1, 5)) for _ in range(R)]
    received, summed = [], []

    def pause(r: int) -> None:
        world.wait(r, int(rng.integers(0, 3)) * 30_000)

    def in_halves(r: int, queue: Any, result: str) -> Any:
        """Queue a call whole, or in two halves of different grids; `result` names where it goes."""
        pause(r)
        if rng.random() < 0.3:
            into = queue(phases=SEND, blocks=blocks[r])
            return queue(phases=RECEIVE, blocks=int(rng.integers(1, 5)), **{result: into})
        return queue(phases=BOTH, blocks=blocks[r])

    for _ in range(int(rng.integers(1, 3))):
        Ts = [int(rng.integers(0, M + 1)) for _ in range(R)]
        special = rng.random() < 0.3
        xs = [draws.floats(rng, (T, H), x_dtype, special) for T in Ts]
        idxs = [draws.lanes(rng, T, K, R * L, rng.choice([np.int32, np.int64])) for T in Ts]
        ws = [draws.weights(rng, i) for i in idxs] if rng.random() < 0.5 else [None] * R
        casts = {"use_fp8": H % 128 == 0 and rng.random() < 0.6}
        casts["round_scale"] = casts["use_fp8"] and rng.random() < 0.5
        casts["use_ue8m0"] = casts["round_scale"] and H % 512 == 0 and rng.random() < 0.5
        handles = [world.make_handle(r) for r in range(R)]
        stats = [world.array(r, L, rng.choice([np.int32, np.int64])) for r in range(R)]
        got = []
        for r in range(R):
            stats[r][:] = 5

            queue = partial(world.dispatch, r, handles[r], xs[r], idxs[r], ws[r], stats=stats[r], **casts)
            got.append(in_halves(r, queue, "into"))
        received.append((got, xs, idxs, casts, stats))
        _, routing = reference.low_latency_dispatch(
            xs, idxs, num_experts=R * L, num_max_tokens_per_rank=M, **casts
        )
        for _ in range(int(rng.integers(0, 3))):
            given = (
                [rng.standard_normal((T, K)).astype(np.float32) for T in Ts] if rng.random() < 0.4 else None
            )
            how = {"by_source": rng.random() < 0.5, "use_logfmt": H % 128 == 0 and rng.random() < 0.4}
            ys = outputs(rng, world, routing, FLOATS[int(rng.integers(3))], rng.random() < 0.3)
            outs = []
            for r in range(R):
                w = given[r] if given else None
                outs.append(
                    in_halves(r, partial(world.combine, r, handles[r], ys[r], Ts[r], w, **how), "out")
                )
            applied = given or (None if ws[0] is None else ws)
            summed.append((outs, ys, routing, applied, how))
    world.run(seed)
    check_quiet(world)
    for got, xs, idxs, casts, stats in received:
        check_received(world, got, xs, idxs, **casts)
        for r in range(R):
            assert stats[r].tolist() == (5 + got[r].count).tolist(), f"rank {r}"
    for outs, ys, routing, applied, how in summed:
        check_sums(outs, ys, routing, applied, how)


def check_sums(outs: list[Any], ys: list[Any], routing: Any, applied: Any, how: dict[str, bool]) -> None:
    reduction = "source" if how["by_source"] else "rank"
    want = reference.low_latency_combine(
        ys, routing, applied, reduction=reduction, use_logfmt=how["use_logfmt"]
    )
    for r, (mine, theirs) in enumerate(zip(outs, want, strict=True)):
        bad = [t for t in range(len(theirs)) if not draws.same_bits(mine[t], theirs[t])]
        assert not bad, f"rank {r}, {how}, {mine.dtype}: tokens {bad} of {len(theirs)}"


def calls_in_flight(
    seed: int, wrap: bool = False, refuse: bool = False, ranks_per_node: int | None = None
) -> None:
    """Two calls of a kind in flight on each rank; `wrap`: epochs pass 2^32; `refuse`: a rank refuses one."""
    rng = np.random.default_rng(seed)
    R, L, K, M = int(rng.choice([2, 3])), int(rng.choice([2, 5])), int(rng.choice([2, 8])), 6
    H, num_calls = int(rng.choice([256, 512])), 4
    world = LowLatencyRanks(R, L, K, M, H, row_bytes=H * 4, ranks_per_node=ranks_per_node)
    if wrap:
        world.set_epoch(0xFFFFFFFF - int(rng.integers(0, 4)))
    blocks = [int(rng.integers(1, 5)) for _ in range(R)]
    refuser, refused = int(rng.integers(R)), int(rng.integers(1, num_calls)) if refuse else -1
    inputs = []
    for _ in range(num_calls):
        Ts = [int(rng.integers(0, M + 1)) for _ in range(R)]
        idxs = [draws.lanes(rng, T, K, R * L) for T in Ts]
        xs = [draws.floats(rng, (T, H), FLOATS[0]) for T in Ts]
        inputs.append((Ts, xs, idxs, [draws.weights(rng, i) for i in idxs]))
    handles = [[world.make_handle(r) for r in range(R)] for _ in range(num_calls)]
    got: list[list[Any]] = [[None] * R for _ in range(num_calls)]

    def pause(r: int) -> None:
        world.wait(r, int(rng.integers(0, 3)) * 30_000)

    def dispatch(n: int, r: int, phases: int) -> None:
        _, xs, idxs, ws = inputs[n]
        pause(r)
        grid = int(rng.integers(1, 5)) if phases == RECEIVE else blocks[r]
        got[n][r] = world.dispatch(r, handles[n][r], xs[r], idxs[r], ws[r], phases=phases, blocks=grid,
                                   into=got[n][r])  # fmt: skip

    overlapped = [
        (SEND, 0),
        (SEND, 1),
        (RECEIVE, 0),
        (SEND, 2),
        (RECEIVE, 1),
        (SEND, 3),
        (RECEIVE, 2),
        (RECEIVE, 3),
    ]
    halves = [(phase, n) for n in range(num_calls) for phase in (SEND, RECEIVE)]
    whole = [(BOTH, n) for n in range(num_calls)]
    for r in range(R):
        orders = [halves, whole] if refuse else [overlapped, overlapped, whole]
        for phases, n in orders[int(rng.integers(len(orders)))]:
            if n == refused and r == refuser:
                if phases != RECEIVE:
                    world.refuse(r, C.EPCY_LOW_LATENCY_DISPATCH)
            else:
                dispatch(n, r, phases)
    world.run(seed)
    check_quiet(world, C.EPCY_VERDICT_REFUSED if refuse else 0, refuser)
    for r in range(R):
        C.epcy_report.from_buffer(world.reports[r]).late_verdict = 0
    live = [n for n in range(num_calls) if n != refused]
    routings = {n: check_received(world, got[n], *inputs[n][1:3], use_fp8=True) for n in live}
    assert all(not got[refused][r].count.any() for r in range(R) if refuse and r != refuser)

    # combines in flight on the same handles
    calls = []
    for n in live:
        how = {"by_source": bool(rng.integers(2)), "use_logfmt": bool(rng.integers(2))}
        calls.append((n, outputs(rng, world, routings[n], FLOATS[0]), how))
    outs: list[list[Any]] = [[None] * R for _ in calls]
    order = [step for step in overlapped if step[1] < len(calls)]
    for r in range(R):
        for phases, i in order:
            n, ys, how = calls[i]
            pause(r)
            grid = int(rng.integers(1, 5)) if phases == RECEIVE else blocks[r]
            outs[i][r] = world.combine(r, handles[n][r], ys[r], inputs[n][0][r], phases=phases, slot=1 + (i & 1),
                                       blocks=grid, out=outs[i][r], **how)  # fmt: skip
    world.run(seed + 1)
    check_quiet(world)
    for (n, ys, how), mine in zip(calls, outs, strict=True):
        check_sums(mine, ys, routings[n], inputs[n][3], how)
