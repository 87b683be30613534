"""What the counting behind `buf.stats()` costs: the same calls on a Buffer with it and on one without it, in turns.

    mpiexec -n 2 python -m mpi4py benchmarks/stats_cost.py [--json FILE] [--backend host]

Blocks of calls on the two Buffers follow one another, which of them first by turns, so that what else the machine does
meets both. A block's time is the slowest rank's; the difference is the median over pairs of blocks, with the quartiles
beside it. The last line is each rank alone, without tokens: nothing of the call is left but its fixed cost.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time

import ml_dtypes
import numpy as np
from mpi4py import MPI

import epcy


def pair_of_buffers(comm, backend, num_tokens):
    sizes = {"num_max_tokens_per_rank": max(num_tokens, 1), "hidden": 2048, "num_experts": 64, "num_topk": 8}
    return [epcy.Buffer(comm, **sizes, backend=backend, stats=on, preinitialize=True) for on in (True, False)]


def block_us(comm, run, num_calls):
    """Microseconds a call of one block, the slowest rank's."""
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(num_calls):
        run()
    return comm.allreduce((time.perf_counter() - start) * 1e6 / num_calls, MPI.MAX)


def compare(comm, backend, num_tokens, num_calls, num_blocks):
    """Time both; return a row of figures."""
    buffers = pair_of_buffers(comm, backend, num_tokens)
    xp, rng = buffers[0].xp, np.random.default_rng(comm.rank)
    x = xp.asarray(rng.standard_normal((num_tokens, 2048), np.float32).astype(ml_dtypes.bfloat16))
    idx = xp.asarray(np.argsort(rng.random((num_tokens, 64)), axis=1)[:, :8])

    def roundtrip(buf):
        r = buf.dispatch(x, idx)
        buf.combine(r.recv_x, r.handle)

    runs = [lambda buf=buf: roundtrip(buf) for buf in buffers]
    us = np.empty((2, num_blocks))
    gc.disable()
    for block in range(-2, num_blocks):
        for which in (0, 1) if block % 2 else (1, 0):
            us[which, block] = (
                block_us(comm, runs[which], num_calls) / 2
            )  # of a call: there are two in a round
    gc.enable()
    for buf in buffers:
        buf.free()
    low, middle, high = np.percentile(us[0] - us[1], (25, 50, 75))
    without = float(np.median(us[1]))
    return {
        "ranks": comm.size, "tokens": num_tokens, "us_without": without, "us_more": float(middle),
        "us_more_p25": float(low), "us_more_p75": float(high), "share": float(middle) / without,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="host")
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--json")
    given = parser.parse_args()
    comm = MPI.COMM_WORLD
    alone = MPI.COMM_SELF
    cases = [(comm, tokens, calls) for tokens, calls in ((0, 400), (8, 200), (128, 40), (1024, 6))]
    rows = [compare(of, given.backend, tokens, calls, given.blocks) for of, tokens, calls in cases]
    rows.append(compare(alone, given.backend, 0, 2000, given.blocks))
    if comm.rank == 0:
        sys.stdout.write(
            f"{'ranks':>5} {'tokens':>6} {'us a call':>10} {'us more':>8} {'p25..p75':>16} {'share':>7}\n"
        )
        for row in rows:
            quartiles = f"{row['us_more_p25']:.3f}..{row['us_more_p75']:.3f}"
            sys.stdout.write(
                f"{row['ranks']:>5} {row['tokens']:>6} {row['us_without']:>10.2f} {row['us_more']:>8.3f} "
                f"{quartiles:>16} {row['share']:>7.2%}\n"
            )
        if given.json:
            with open(given.json, "w", encoding="utf-8") as file:
                json.dump(rows, file, indent=1)
                file.write("\n")


if __name__ == "__main__":
    main()
