"""One call that the ranks may come to too early or too late, and what they must be told then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from emulator import draws
from emulator.high_throughput import OP_BARRIER, OP_DISPATCH, Ranks
from emulator.high_throughput_cases import check_combine, check_dispatch, outputs
from emulator.structs import C
from emulator.world import FOREVER
from epcy import reference

OPS = ("dispatch", "dispatch_expert", "combine", "combine_expert", "barrier")
TIMEOUT_NS = 2_000_000
BLOCKS = (2, 2, 1)


@dataclass
class Inputs:
    layout: str
    xs: list[Any]
    idxs: list[Any]
    ws: list[Any]
    want: Any
    routing: Any


def inputs(rng: Any, world: Ranks, layout: str, Ts: list[int] | None = None, **options: Any) -> Inputs:
    R, K, H = world.R, world.K, world.H
    Ts = Ts or [int(rng.integers(1, world.M + 1)) for _ in range(R)]
    xs = [draws.floats(rng, (T, H), np.float32) for T in Ts]
    idxs = [draws.lanes(rng, T, K, world.E) for T in Ts]
    ws = [draws.weights(rng, i) for i in idxs]
    want, routing = reference.dispatch(xs, idxs, ws, num_experts=world.E, layout=layout, **options)
    return Inputs(layout, xs, idxs, ws, want, routing)


def queue_dispatch(world: Ranks, rank: int, given: Inputs, **options: Any) -> Any:
    options.setdefault("blocks", BLOCKS)
    return world.dispatch(
        rank, given.xs[rank], given.idxs[rank], given.ws[rank], layout=given.layout, **options
    )


def check_good_call(world: Ranks, rng: Any, seed: int, layout: str = "rank") -> None:
    """A dispatch of all ranks works."""
    given = inputs(rng, world, layout)
    got = [queue_dispatch(world, r, given) for r in range(world.R)]
    world.run(seed)
    for r in range(world.R):
        check_dispatch(world, r, got[r], given.want[r], given.routing)
        assert not world.report(r).expired, f"rank {r}"


def clear(world: Ranks) -> None:
    """Forget what was reported, as the host does when it has raised it."""
    for raw in world.reports:
        report = C.epcy_report.from_buffer(raw)
        report.expired = report.late_verdict = report.late_rows = 0
        for bad in report.bad:
            bad.epoch = 0


def failed_ranks(
    world: Ranks, seed: int, op: str, delays: list[int], leaves: dict[int, int] | None = None
) -> list[bool]:
    """Run one call that rank r begins after delays[r]; ranks that were not told of a failure must have their result.

    `leaves`: ranks that do not call but leave their calls, and when.
    """
    rng = np.random.default_rng(seed)
    layout = "expert" if op.endswith("_expert") else "rank"
    given, R = inputs(rng, world, layout), world.R
    ys = outputs(rng, given.routing, world.H, np.float32, False)
    told: list[Any] = [None] * R
    checks = []
    if op.startswith("combine"):
        timeout_ns, world.timeout_ns = world.timeout_ns, FOREVER
        got = [queue_dispatch(world, r, given) for r in range(R)]
        world.run(seed)
        world.timeout_ns = timeout_ns
        sums = reference.combine(
            ys, given.routing, None if layout == "rank" else given.ws,
            ranks_per_node=getattr(world, "per_node", None), path=getattr(world, "path", "direct"),
        )  # fmt: skip
    for r in range(R):
        if leaves and r in leaves:
            world.wait(r, leaves[r])
            one = np.ones(1, np.uint32)
            for peer in range(R):
                world.copy(r, world.control_words(peer, world.control.left + 4 * r, 1, np.uint32), one)
            continue
        world.wait(r, delays[r])
        if op.startswith("dispatch"):
            result = queue_dispatch(world, r, given)
            told[r] = (result.report, result.ticket)
            checks.append((r, check_dispatch, (world, r, result, given.want[r], given.routing)))
        elif op.startswith("combine"):
            w = None if layout == "rank" else given.ws[r]
            out = world.combine(r, got[r].handle, ys[r], w)
            checks.append((r, check_combine, (r, out, sums[r])))
            area = world.rows(
                r, world.heap.combine[0], "payload", (given.routing.num_rows(r), world.H), np.float32
            )
            world.copy(r, area, np.full_like(area, np.nan))  # whoever has been told, however, goes on
        else:
            told[r] = world.step(r, OP_BARRIER)
    world.run(seed + 1, 50_000_000)
    failed = []
    for r in range(R):
        verdicts = world.verdicts(r, *told[r]) if told[r] else []
        if op == "barrier" and told[r]:
            verdicts = [verdicts[r]]
        verdicts.append(world.report(r).late_verdict)
        failed.append(bool(world.report(r).expired) or C.EPCY_VERDICT_BROKEN in verdicts)
        assert failed[r] or -1 not in verdicts, f"rank {r} was told nothing"
    for r, check, args in checks:
        if not failed[r]:
            check(*args)
    return failed


def reset(world: Ranks, seed: int, round: int) -> None:
    clear(world)
    told = [world.reset(r, round) for r in range(world.R)]
    world.run(seed)
    for r in range(world.R):
        assert world.verdicts(r, *told[r])[r] == C.EPCY_VERDICT_OK, f"rank {r}"
        assert not world.report(r).expired, f"rank {r}"


def check_refusal(world: Ranks, rng: Any, layout: str, waits: bool) -> None:
    """Rank 1 refuses a dispatch: the others are told, nothing moves, and the next calls work."""
    given = inputs(rng, world, layout)
    others = [r for r in range(world.R) if r != 1]
    got = [queue_dispatch(world, r, given, worst=0 if waits else 20) for r in others]
    world.refuse(1, OP_DISPATCH, "rank 1 refused dispatch: no")
    world.run(1)
    for r, one in zip(others, got, strict=True):
        report = world.report(r)
        if waits:
            assert world.verdicts(r, one.report, one.ticket) == [C.EPCY_VERDICT_REFUSED] * world.R
        else:
            assert (report.late_verdict, report.late_rank) == (C.EPCY_VERDICT_REFUSED, 1)
            assert report.late_text == b"rank 1 refused dispatch: no"
        assert (one.payload.view(np.uint8) == 0x77).all(), "nothing moves"
    assert not world.report(1).late_verdict
    clear(world)
    check_good_call(world, rng, 2, layout)
