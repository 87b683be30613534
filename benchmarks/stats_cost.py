"""What the counting behind `buf.stats()` costs: the same calls on a Buffer with it and on one without it, in turns.

    mpiexec -n 2 python -m mpi4py benchmarks/stats_cost.py [--json FILE] [--backend host]

Short blocks of calls on the two Buffers follow one another, which of them first by turns, so that what else the machine
does meets both. A block's time is the slowest rank's, and what is compared is the first decile of them: blocks which
nothing disturbed. It is done twice, with the counting Buffer made first and made second, since where memory happens to
lie makes a difference too: how far the two differences lie apart says how much of them is that, or noise. The last line
is each rank alone, without tokens: nothing of a call is left but its fixed cost.
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


def pair_of_buffers(comm, backend, num_tokens, order):
    """Buffers with counting and without; which is made first decides about where their memory lies."""
    sizes = {"num_max_tokens_per_rank": max(num_tokens, 1), "hidden": 2048, "num_experts": 64, "num_topk": 8}
    made = {on: epcy.Buffer(comm, **sizes, backend=backend, stats=on, preinitialize=True) for on in order}
    return made[True], made[False]


def block_us(comm, run, num_calls):
    """Microseconds a call of one block, the slowest rank's."""
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(num_calls):
        run()
    return comm.allreduce((time.perf_counter() - start) * 1e6 / num_calls, MPI.MAX)


def measure(comm, backend, num_tokens, num_calls, num_blocks, order):
    """Return the first deciles of the blocks' microseconds, with counting and without."""
    buffers = pair_of_buffers(comm, backend, num_tokens, order)
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
            # Of a call: there are two in a round.
            us[which, block] = block_us(comm, runs[which], num_calls) / 2
    gc.enable()
    for buf in buffers:
        buf.free()
    return np.percentile(us, 10, axis=1)


def compare(comm, backend, num_tokens, num_calls, num_blocks):
    """Return a row of figures."""
    orders = ((True, False), (False, True))
    found = [measure(comm, backend, num_tokens, num_calls, num_blocks // 2, order) for order in orders]
    more = [float(with_ - without) for with_, without in found]
    without, middle = float(min(one[1] for one in found)), sum(more) / 2
    return {
        "ranks": comm.size, "tokens": num_tokens, "us_without": without, "us_more": middle,
        "us_more_made_first": more[0], "us_more_made_second": more[1], "share": middle / without,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="host")
    parser.add_argument("--blocks", type=int, default=2000)
    parser.add_argument("--json")
    given = parser.parse_args()
    comm = MPI.COMM_WORLD
    alone = MPI.COMM_SELF
    cases = [(comm, tokens, calls) for tokens, calls in ((0, 10), (8, 10), (128, 3), (1024, 1))]
    rows = [
        compare(of, given.backend, tokens, calls, max(100, given.blocks // (1 + tokens // 64)))
        for of, tokens, calls in cases
    ]
    rows.append(compare(alone, given.backend, 0, 30, given.blocks))
    if comm.rank == 0:
        sys.stdout.write(
            f"{'ranks':>5} {'tokens':>6} {'us a call':>10} {'us more':>8} {'first, second':>16} {'share':>7}\n"
        )
        for row in rows:
            halves = f"{row['us_more_made_first']:.3f}, {row['us_more_made_second']:.3f}"
            sys.stdout.write(
                f"{row['ranks']:>5} {row['tokens']:>6} {row['us_without']:>10.2f} {row['us_more']:>8.3f} "
                f"{halves:>16} {row['share']:>7.2%}\n"
            )
        if given.json:
            with open(given.json, "w", encoding="utf-8") as file:
                json.dump(rows, file, indent=1)
                file.write("\n")


if __name__ == "__main__":
    main()
