"""Many dispatch and combine pairs in a row, fresh routing, random delays, every row compared with the reference.

mpiexec -n N python -m mpi4py tests/soak.py --pairs 10000 --backend host
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time

import numpy as np
from mpi4py import MPI
from tqdm import tqdm

import epcy
from epcy import reference

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mpi.cases import Sent, draw, draw_rows, mine, to_device, to_host  # noqa: E402

SETS = 64  # drawn beforehand with their reference: drawing takes longer than moving


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--backend", choices=("host", "nvshmem"), default="host")
    parser.add_argument("--tokens", type=int, default=24, help="most tokens of a rank in one call")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--topk", type=int, default=3)
    parser.add_argument(
        "--delay-us", type=float, default=300.0, help="most that a rank is delayed, every 4th call"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after this time")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Case:
    """What all ranks send in one pair, and what this rank shall get."""

    def __init__(self, seed: int, args: argparse.Namespace, comm: MPI.Intracomm) -> None:
        rng = np.random.default_rng([args.seed, seed])
        num_experts = 4 * comm.size
        tokens = [int(t) for t in rng.integers(0, args.tokens + 1, comm.size)]
        sent = draw(int(rng.integers(1 << 40)), comm.size, tokens, num_experts=num_experts, num_topk=args.topk,
                    hidden=args.hidden)  # fmt: skip
        self.layout = ("rank", "expert")[seed % 2]
        options = {"layout": "expert", "expert_alignment": 4} if self.layout == "expert" else {}
        received, routing = reference.dispatch(
            sent.xs, sent.idxs, sent.weights, num_experts=num_experts, **options
        )
        again = [draw_rows(rng, t, args.hidden, "bfloat16") for t in tokens]
        cached, _ = reference.dispatch(again, sent.idxs, sent.weights, num_experts=num_experts, **options)
        self.num_experts, self.options = num_experts, options
        self.sent, self.again = sent, Sent(again, sent.idxs, sent.weights)
        self.received, self.cached = received[comm.rank], cached[comm.rank]
        weights = sent.weights if self.layout == "expert" else None
        ys = [r.recv_x for r in received]
        self.combined = reference.combine(ys, routing, weights)[comm.rank][0]


def num_wrong(got: object, want: np.ndarray) -> int:
    """Count the rows that differ in any bit."""
    rows, want = to_host(got), np.asarray(want)
    if rows.shape != want.shape:
        return max(len(rows), len(want))
    return int((rows.view(np.uint8) != want.view(np.uint8)).any(axis=tuple(range(1, want.ndim))).sum())


def main() -> int:
    args, comm = parse(), MPI.COMM_WORLD
    rng = np.random.default_rng([args.seed, comm.rank, 1])  # delays differ between ranks
    sizes = {"num_max_tokens_per_rank": args.tokens, "hidden": args.hidden, "num_experts": 4 * comm.size,
             "num_topk": args.topk}  # fmt: skip
    cases = [Case(seed, args, comm) for seed in range(SETS)]
    wrong = pairs = 0
    with epcy.Buffer(comm, backend=args.backend, timeout=30, **sizes) as buf:
        if buf.xp is not np:
            buf.xp.cuda.Device(buf.options["device"]).use()
        order = np.random.default_rng(args.seed)
        given = [(mine(buf, c.sent), to_device(buf, c.again.xs[comm.rank])) for c in cases]
        start = time.monotonic()
        for pairs in tqdm(range(1, args.pairs + 1), disable=comm.rank != 0, mininterval=2):
            case_number = int(order.integers(SETS))
            case, ((x, idx, weights), other) = cases[case_number], given[case_number]

            def hesitate() -> None:
                if rng.random() < 0.25:
                    time.sleep(rng.random() * args.delay_us * 1e-6)

            hesitate()
            r = buf.dispatch(x, idx, weights, **case.options)
            wrong += num_wrong(r.recv_x, case.received.recv_x)
            wrong += num_wrong(r.recv_topk_idx, case.received.recv_topk_idx)
            hesitate()
            z = buf.combine(r.recv_x, r.handle, weights if case.layout == "expert" else None)
            if pairs % 2:
                hesitate()
                again = buf.dispatch(other, handle=r.handle)
                wrong += num_wrong(again.recv_x, case.cached.recv_x)
            wrong += num_wrong(z.combined_x, case.combined)
            if pairs % 64 == 0:
                late = comm.allreduce(time.monotonic() - start > args.seconds, MPI.LOR)
                if wrong or late:
                    break
        buf.check()
    taken, most = time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    total = comm.reduce(wrong)
    if comm.rank == 0:
        what = f"{pairs} pairs on {comm.size} ranks, backend {args.backend}, {taken:.0f} s"
        sys.stdout.write(f"{what}: {total} wrong rows, peak memory {most >> 10} MiB\n")
    return int(bool(comm.bcast(total)))


if __name__ == "__main__":
    sys.exit(main())
