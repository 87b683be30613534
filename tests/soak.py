"""Many dispatch and combine pairs in a row, of random shapes, under random delays and with faults, every row compared
with the reference.

Every second pair is one of low latency, by turns with hooks. A shape has a Buffer of its own, with routings of its own.
Memory, file descriptors and shared-memory segments must be at the end what they were after the first fifth.

mpiexec -n N python -m mpi4py tests/soak.py --pairs 10000 --backend host --json soak.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from tqdm import tqdm

from epcy.bench.environment import describe

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from soak_pairs import FAULTS, Case, Shape, low_latency_pair, one_of, pair, survive  # noqa: E402

SETS = 12  # of a shape, drawn beforehand with their reference: drawing takes longer than moving


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--shapes", type=int, default=50, help="how many, one after the other")
    parser.add_argument("--backend", choices=("host", "nvshmem"), default="host")
    parser.add_argument("--tokens", type=int, default=24, help="most tokens of a rank in one call")
    parser.add_argument("--hidden", type=int, default=1024, help="most elements of a row")
    parser.add_argument("--topk", type=int, default=6, help="most lanes of a token")
    parser.add_argument(
        "--delay-us", type=float, default=300.0, help="most that a rank is delayed, every 4th call"
    )
    parser.add_argument(
        "--fault-every", type=int, default=250, help="pairs from one fault to the next; 0: none"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args()


def footprint() -> dict[str, int]:
    """What must stay flat: MiB resident, open files, mapped shared segments."""
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize() >> 20
    with open("/proc/self/maps") as file:
        segments = sum("/dev/shm" in line for line in file)
    return {"MiB": resident, "files": len(os.listdir("/proc/self/fd")), "segments": segments}


class Run:
    """All shapes, one after the other."""

    def __init__(self, args: argparse.Namespace, comm: MPI.Intracomm) -> None:
        self.args, self.comm = args, comm
        self.order = np.random.default_rng(args.seed)  # the same on all ranks
        delays = np.random.default_rng([args.seed, comm.rank, 1])  # differ
        self.hesitate = one_of(delays, args.delay_us)
        self.pairs = self.wrong = self.shapes = 0
        self.faults: Counter[str] = Counter()
        self.start = time.monotonic()
        self.footprints: list[dict[str, int]] = []
        self.progress = tqdm(total=args.pairs, disable=comm.rank != 0, mininterval=2)

    def over(self) -> bool:
        late = time.monotonic() - self.start > self.args.seconds
        return bool(self.comm.allreduce(late or self.wrong > 0, MPI.LOR))

    def shape(self, number: int, num_pairs: int) -> bool:
        """Make `num_pairs` pairs of one shape; False: this is the end."""
        args, comm = self.args, self.comm
        shape = Shape.draw(self.order, args.tokens, args.hidden, args.topk)
        with shape.buffer(comm, args.backend) as buf:
            if buf.xp is not np:
                buf.xp.cuda.Device(buf.options["device"]).use()
            cases = [
                Case([args.seed, number, one], shape, comm.size, comm.rank).put(buf) for one in range(SETS)
            ]
            for turn in range(1, num_pairs + 1):
                case = cases[int(self.order.integers(SETS))]
                self.pairs += 1
                if turn % 2:
                    self.wrong += low_latency_pair(buf, case, turn % 4 == 1, self.hesitate)
                else:
                    self.wrong += pair(buf, case, turn % 4 == 2, self.hesitate)
                if args.fault_every and comm.size > 1 and self.pairs % args.fault_every == 0:
                    kind = FAULTS[sum(self.faults.values()) % len(FAULTS)]
                    survive(buf, kind, int(self.order.integers(comm.size)))
                    self.faults[kind] += 1
                self.progress.update()
                if turn % 64 == 0 and self.over():
                    return False
            buf.check()
        self.shapes += 1
        return not self.over()

    def all_shapes(self) -> None:
        shapes = max(1, min(self.args.shapes, self.args.pairs))
        for number in range(shapes):
            num_pairs = self.args.pairs * (number + 1) // shapes - self.args.pairs * number // shapes
            if not self.shape(number, num_pairs):
                return
            self.footprints.append(footprint())

    def grown(self) -> list[str]:
        """What is larger at the end than in the first fifth, on any rank; the first four shapes fill caches."""
        early, late = self.footprints[: max(4, len(self.footprints) // 5)], self.footprints[-1:]
        found = [f"{name} {max(one[name] for one in early)} -> {now}" for last in late for name, now in last.items()
                 if now > max(one[name] for one in early) + (16 if name == "MiB" else 0)]  # fmt: skip
        return [
            f"rank {rank}: {', '.join(one)}" for rank, one in enumerate(self.comm.allgather(found)) if one
        ]

    def figures(self, grown: list[str], wrong: int) -> dict[str, Any]:
        env = describe([], self.comm.size)
        words = [Path(word).name if os.sep in word else word for word in sys.argv[1:]]
        env["command"] = " ".join([f"mpiexec -n {self.comm.size} python -m mpi4py tests/soak.py", *words])
        first, last = self.footprints[0], self.footprints[-1]
        return {
            "schema": 1, "what": "soak", "env": env, "backend": self.args.backend, "ranks": self.comm.size,
            "pairs": self.pairs, "shapes": self.shapes, "wrong": wrong, "faults_survived": dict(self.faults),
            "seconds": round(time.monotonic() - self.start, 1), "grown": grown,
            "rank_0": {name: [first[name], last[name]] for name in first},
        }  # fmt: skip


def main() -> int:
    args, comm = parse(), MPI.COMM_WORLD
    run = Run(args, comm)
    run.all_shapes()
    run.progress.close()
    total = comm.allreduce(run.wrong)
    grown = run.grown()
    if comm.rank == 0 and run.footprints:
        figures = run.figures(grown, total)
        if args.json is not None:
            args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        said = ", ".join(f"{name} {a} -> {b}" for name, (a, b) in figures["rank_0"].items())
        sys.stdout.write(
            f"{run.pairs} pairs of {run.shapes} shapes on {comm.size} ranks, backend {args.backend}, "
            f"{figures['seconds']:.0f} s: {total} wrong rows, {sum(run.faults.values())} faults survived; "
            f"rank 0: {said}; grown: {'; '.join(grown) or 'nothing'}\n"
        )
    return int(bool(total or grown))


if __name__ == "__main__":
    sys.exit(main())
