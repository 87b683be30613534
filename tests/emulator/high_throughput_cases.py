"""Whole high-throughput cases: calls of all ranks, run, and compared with the reference bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from emulator import draws
from emulator.high_throughput import Ranks, Result
from emulator.structs import C
from emulator.world import FLOATS
from epcy import reference


def check_dispatch(
    world: Ranks, rank: int, got: Result, want: Any, routing: Any, *, cached: bool = False
) -> None:
    """Compare all that a dispatch leaves: rows, lanes, and what the host and the handle are told."""
    limit, came = routing.num_worst_tokens[rank], routing.num_recv_tokens[rank]
    rows = came if limit is None else min(came, limit)
    parts = want.recv_x if isinstance(want.recv_x, tuple) else (want.recv_x,)
    for name, mine, part in zip(("payload", "scales"), (got.payload, got.scales), parts, strict=False):
        bad = [i for i in range(rows) if not draws.same_bits(mine[i], part[i])]
        assert not bad, f"rank {rank}: {name} of rows {bad} of {rows}"
    all_rows = routing.num_rows(rank)
    assert got.topk_idx[:all_rows].tolist() == want.recv_topk_idx.tolist(), f"rank {rank}: ids"
    if want.recv_topk_weights is not None:
        assert draws.same_bits(got.topk_weights[:all_rows], want.recv_topk_weights), f"rank {rank}: weights"
    if cached:
        return
    arrays = got.handle.arrays
    assert arrays["num_recv"][0] == came, f"rank {rank}"
    assert arrays["experts"].tolist() == routing.num_tokens_per_expert[rank].tolist(), f"rank {rank}"
    if routing.expert_offsets is not None:
        assert arrays["offsets"].tolist() == routing.expert_offsets[rank].tolist(), f"rank {rank}"
        assert arrays["lane_row"].tolist() == routing.lane_row[rank].tolist(), f"rank {rank}"
    if limit is None:
        report = world.report(rank, got.report)
        assert world.verdicts(rank, got.report, got.ticket) == [C.EPCY_VERDICT_OK] * world.R, f"rank {rank}"
        assert report.num_rows == got.ticket << 32 | came, f"rank {rank}"
        words = got.report[-8 * world.L :].view(np.uint64) & 0xFFFFFFFF
        assert words.tolist() == routing.num_tokens_per_expert[rank].tolist(), f"rank {rank}"
        if routing.layout == "rank":
            assert (report.own_base, report.own_count) == own_rows(routing, rank), f"rank {rank}"


def own_rows(routing: Any, rank: int) -> tuple[int, int]:
    """Where a rank's own rows are among those that come to it, before clipping."""
    return int(routing.counts[:rank, rank].sum()), int(routing.counts[rank, rank])


def check_reports(world: Ranks, routings: list[Any]) -> None:
    """No wait expired; rows that found no room are told, and nothing else."""
    for r in range(world.R):
        report = world.report(r)
        assert not report.expired, f"rank {r}: a wait of phase {report.phase} for rank {report.peer} expired"
        assert report.late_verdict == C.EPCY_VERDICT_OK, f"rank {r}"
        over = [x.num_recv_tokens[r] for x in routings if x.overflow(r)]
        assert bool(report.late_rows) == bool(over) and report.late_rows in (over or [0]), f"rank {r}"


def outputs(rng: Any, routing: Any, H: int, dtype: Any, special: bool) -> list[Any]:
    """What experts make of the rows; NaN where none came."""
    ys = []
    for r in range(routing.num_ranks):
        rows = routing.num_rows(r)
        y = np.full((rows, H), np.nan, dtype)
        n = min(rows, routing.num_recv_tokens[r])
        y[:n] = draws.floats(rng, (n, H), dtype, special)
        ys.append(y)
    return ys


def random_case(seed: int, arch: int = 90, **given: Any) -> None:
    """A few dispatches, again with their handles, and combines; `given` options are not drawn."""
    rng = np.random.default_rng(seed)

    def pick(name: str, *choices: Any) -> Any:
        drawn = choices[int(rng.integers(len(choices)))]  # drawn in any case, so that the rest stays the same
        return given.get(name, drawn)

    R, L, K = pick("R", 1, 2, 2, 3, 4), pick("L", 1, 3, 6), pick("K", 1, 2, 4, 4, 8, 9, 33)
    # rings are filled more than once by many rows of one block, or by rows in pieces
    M, H = pick("shape", (1, 8), (6, 128), (6, 1000), (17, 128), (17, 512), (80, 128), (20, 3584))
    if M > 17:
        given, K = {"blocks": (1, 1, int(rng.integers(2))), "Ts": [M] * R, **given}, min(K, 4)
    layout, dtype = pick("layout", "rank", "expert"), pick("dtype", *FLOATS, "fp8")
    alignment = pick("alignment", 1, 4, 8) if layout == "expert" else 1
    if dtype == "fp8":
        H = -(-H // 16) * 16
    rows = R * M * (K if layout == "expert" else 1) + 8 * L
    world = (
        given["world"](R, L, K, M, H, num_rows=rows)
        if "world" in given
        else Ranks(R, L, K, M, H, num_rows=rows, arch=arch)
    )
    routings, checks = [], []

    def blocks() -> tuple[int, int, int]:
        return given.get("blocks") or tuple(
            int(v) for v in (rng.integers(1, 4), rng.integers(1, 4), rng.integers(3))
        )

    def pause(r: int) -> None:
        world.wait(r, int(rng.integers(0, 3)) * 50_000)

    for call in range(int(rng.integers(1, 3))):
        Ts = [int(rng.integers(0, M + 1)) if rng.random() < 0.9 else 0 for _ in range(R)]
        Ts = given.get("Ts", Ts)
        idxs = [draws.lanes(rng, T, K, R * L, rng.choice([np.int32, np.int64])) for T in Ts]
        worst: list[Any] = [None] * R
        if pick("worst", False, True):
            worst = [None if rng.random() < 0.3 else int(rng.integers(1, rows)) for _ in range(R)]
            worst = [w if w is None or rng.random() < 0.5 else rows for w in worst]
        if all(worst) and rng.random() < 0.5 and max(Ts):  # nobody waits, so nobody minds
            r = int(np.argmax(Ts))
            idxs[r][int(rng.integers(Ts[r])), 0] = R * L + 3
        handles: list[Any] = [None] * R
        routing = None
        for again in range(1 + int(rng.integers(0, 2))):
            special = rng.random() < 0.3
            scales = [None] * R
            if dtype == "fp8":
                xs = [rng.integers(0, 256, (T, H)).astype(np.uint8) for T in Ts]
                scales = [rng.standard_normal((T, -(-H // 128))).astype(np.float32) for T in Ts]
            else:
                xs = [draws.floats(rng, (T, H), dtype, special) for T in Ts]
            ws = [draws.weights(rng, i) for i in idxs] if pick("weights", False, True) else [None] * R
            full = [x if s is None else (x, s) for x, s in zip(xs, scales, strict=True)]
            want, routing = reference.dispatch(
                full, None if again else idxs, None if ws[0] is None else ws, num_experts=R * L, layout=layout,
                expert_alignment=alignment, num_worst_tokens=None if again else worst, routing=routing,
            )  # fmt: skip
            for r in range(R):
                pause(r)
                got = world.dispatch(
                    r, xs[r], None if again else idxs[r], ws[r], scales[r], layout=layout, handle=handles[r],
                    worst=worst[r] or 0, alignment=alignment, blocks=blocks(), which=(call + again) % 2,
                )  # fmt: skip
                handles[r] = got.handle
                checks.append((check_dispatch, (world, r, got, want[r], routing), {"cached": bool(again)}))
            world.calls += 1
        routings.append(routing)
        for _ in range(int(rng.integers(0, 3))):
            queue_combine(world, rng, routing, handles, Ts, worst, pause, checks)
    world.run(seed, 20_000_000)
    for check, args, options in checks:
        check(*args, **options)
    for r in range(R):
        bad = world.report(r).bad
        assert all(bad[c].epoch == 0 or bad[c].value == R * L + 3 for c in range(32)), f"rank {r}"
    check_reports(world, routings)


def queue_combine(
    world: Ranks,
    rng: Any,
    routing: Any,
    handles: list[Any],
    Ts: list[int],
    worst: list[Any],
    pause: Any,
    checks: list[Any],
) -> None:
    R, K, H = world.R, world.K, world.H
    dtype, by_rank = FLOATS[int(rng.integers(3))], routing.layout == "rank"
    if H * dtype.itemsize % 16:
        dtype = FLOATS[2]
    ys = outputs(rng, routing, H, dtype, rng.random() < 0.3)
    ws = None
    if rng.random() < 0.5:
        shapes = [(routing.num_rows(r), K) if by_rank else (Ts[r], K) for r in range(R)]
        ws = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    num_bias = [int(rng.integers(0, 3)) for _ in range(R)]
    biases = [tuple(draws.floats(rng, (Ts[r], H), dtype) for _ in range(num_bias[r])) for r in range(R)]
    as_reference = [None if not b else b[0] if len(b) == 1 else b for b in biases]
    want = reference.combine(
        ys, routing, ws, bias=as_reference,
        ranks_per_node=getattr(world, "per_node", None), path=getattr(world, "path", "direct"),
    )  # fmt: skip
    which = int(rng.integers(2))
    for r in range(R):
        pause(r)
        apart = "kernel" if worst[r] else "engine"
        staging = str(rng.choice(["area", apart] if by_rank else ["area", "over"]))
        out = world.combine(
            r, handles[r], ys[r], None if ws is None else ws[r], biases[r], which=which, blocks=int(rng.integers(1, 4)),
            staging=staging, own=own_rows(routing, r),
        )  # fmt: skip
        checks.append((check_combine, (r, out, want[r]), {}))
    world.calls += 1


def check_combine(rank: int, got: tuple[Any, Any], want: tuple[Any, Any]) -> None:
    bad = [t for t in range(len(want[0])) if not draws.same_bits(got[0][t], want[0][t])]
    assert not bad, f"rank {rank}: tokens {bad} of {len(want[0])}"
    if got[1] is not None:
        assert draws.same_bits(got[1], want[1]), f"rank {rank}: weights that come back"
