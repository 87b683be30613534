"""`python -m epcy calibrate`: measure the constants of epcy/model.py on this machine, all ranks together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from epcy import measured
from epcy.model import OPERATIONS, Constants, load_of

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["calibrate", "time_calls"]

HIDDEN, NUM_TOPK, EXPERTS_A_RANK = 2048, 8, 16
SMALL_TOKENS, LARGE_TOKENS = 64, 2048
SMALL_HIDDEN = 64


def time_calls(buf: Any, num_tokens: int, num_topk: int, seconds: float, warmup: int = 3) -> dict[str, float]:
    """Return the median microseconds of a dispatch and of a combine of random routing, the slowest rank's.

    Collective, blocking, for about `seconds`; the number of rounds is the same on all ranks.
    """
    xp, rng = buf.xp, np.random.default_rng([7, buf.rank])
    num_experts, hidden = buf.options["num_experts"], buf.options["hidden"]
    x = xp.zeros((num_tokens, hidden), np.float16)
    idx = xp.asarray(np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :num_topk].astype(np.int64))
    weights = xp.ones((num_tokens, num_topk), np.float32)
    times: dict[str, list[float]] = {operation: [] for operation in OPERATIONS}

    def timed(operation: str, call: Callable[[], Any]) -> Any:
        buf.barrier()
        start = time.perf_counter()
        result = call()
        result.event.synchronize()
        times[operation].append((time.perf_counter() - start) * 1e6)
        return result

    def one() -> None:
        r = timed("dispatch", lambda: buf.dispatch(x, idx, weights))
        timed("combine", lambda: buf.combine(r.recv_x, r.handle))

    for _ in range(warmup):
        one()
    start = time.perf_counter()
    for _ in range(3):
        one()
    each = buf.comm.allreduce(time.perf_counter() - start) / buf.size / 3
    for _ in range(max(5, min(300, int(seconds / max(each, 1e-6))))):
        one()
    gathered = buf.comm.allgather([times[operation][warmup:] for operation in OPERATIONS])
    slowest = np.array(gathered).max(axis=0)  # a round is as long as on its slowest rank
    return {operation: float(np.median(slowest[at])) for at, operation in enumerate(OPERATIONS)}


def calibrate(comm: MPI.Intracomm, backend: str | None = None, seconds: float = 10.0) -> dict[str, Constants]:
    """Measure, and keep what was measured in the user's cache folder (rank 0 writes).

    Collective, blocking, for about `seconds`.

    Raises
    ------
    ArgumentError
        A file in the cache folder that is none of epcy's.
    """
    import epcy

    points = (("fixed", HIDDEN, 0), ("lanes", SMALL_HIDDEN, LARGE_TOKENS), ("small", HIDDEN, SMALL_TOKENS),
              ("large", HIDDEN, LARGE_TOKENS))  # fmt: skip
    us: dict[str, dict[str, float]] = {}
    num_experts = EXPERTS_A_RANK * comm.size
    for name, hidden, num_tokens in points:
        with epcy.Buffer(
            comm, num_max_tokens_per_rank=LARGE_TOKENS, hidden=hidden, num_experts=num_experts, num_topk=NUM_TOPK,
            dtype="float16", backend=backend, preinitialize=True,
        ) as buf:  # fmt: skip
            us[name] = time_calls(buf, num_tokens, NUM_TOPK, seconds / len(points))
            backend, num_nodes = buf.backend, buf.topology.num_nodes
    found: dict[str, Constants] = {}
    for operation in OPERATIONS:
        found[operation] = constants_of({name: us[name][operation] for name in us}, comm.size, num_experts)
    if comm.rank == 0:
        for operation, constants in found.items():
            key = measured.key_of(str(backend), comm.size, num_nodes, operation)
            measured.put("calibration", key, asdict(constants))
    return found


def constants_of(us: dict[str, float], num_ranks: int, num_experts: int) -> Constants:
    """Solve for the constants: each point has one that the others leave open. Local."""
    fixed = us["fixed"]

    def load(hidden: int, num_tokens: int) -> Any:
        return load_of(num_tokens, num_ranks, num_experts, NUM_TOPK, hidden * 2)

    thin, small, large = (
        load(SMALL_HIDDEN, LARGE_TOKENS),
        load(HIDDEN, SMALL_TOKENS),
        load(HIDDEN, LARGE_TOKENS),
    )
    # The thin rows' own bytes are taken off at the rate of the large ones, which in turn needs the lanes.
    lane_ns, large_gbps = 0.0, 1.0
    for _ in range(4):
        moving_us = max(us["large"] - fixed - large.num_lanes * lane_ns / 1e3, 0.01 * us["large"])
        large_gbps = large.num_bytes / moving_us / 1e3
        rest_us = us["lanes"] - fixed - thin.num_bytes / large_gbps / 1e3
        lane_ns = max(0.0, rest_us * 1e3 / thin.num_lanes)
    moving_us = max(us["small"] - fixed - small.num_lanes * lane_ns / 1e3, 0.05 * us["small"])
    small_gbps = small.num_bytes / moving_us / 1e3
    return Constants(fixed, lane_ns, small_gbps, large_gbps, float(small.num_bytes), float(large.num_bytes))
