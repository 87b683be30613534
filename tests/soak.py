"""Many dispatch and combine pairs in a row, fresh routing, random delays, every row compared with the reference.

Every second pair is one of low latency, by turns with hooks. At the end memory, file descriptors and shared-memory
segments must be what they were after the first tenth.

mpiexec -n N python -m mpi4py tests/soak.py --pairs 10000 --backend host
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable

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
        self.use_fp8 = seed % 4 > 1 and args.hidden % 128 == 0
        slots, routing = reference.low_latency_dispatch(
            sent.xs,
            sent.idxs,
            num_experts=num_experts,
            num_max_tokens_per_rank=args.tokens,
            use_fp8=self.use_fp8,
        )
        rows = (4, comm.size * args.tokens, args.hidden)
        self.ys = [
            np.broadcast_to(draw_rows(rng, 1, args.hidden, "bfloat16"), rows) for _ in range(comm.size)
        ]
        self.slots = slots[comm.rank]
        self.low_latency_combined = reference.low_latency_combine(self.ys, routing, sent.weights)[comm.rank]


def num_wrong(got: object, want: np.ndarray) -> int:
    """Count the rows that differ in any bit."""
    rows, want = to_host(got), np.asarray(want)
    if rows.shape != want.shape:
        return max(len(rows), len(want))
    return int((rows.view(np.uint8) != want.view(np.uint8)).any(axis=tuple(range(1, want.ndim))).sum())


def low_latency_pair(
    buf: epcy.Buffer, case: Case, given: tuple, hook: bool, hesitate: Callable[[], None]
) -> int:
    """Make one low-latency pair; return the number of wrong rows."""
    x, idx, weights = given
    recv, count, handle, _, receive = buf.low_latency_dispatch(
        x, idx, weights, use_fp8=case.use_fp8, return_recv_hook=hook
    )
    if receive is not None:
        hesitate()
        receive()
    want = case.slots
    wrong = int(to_host(count).tolist() != want.recv_count.tolist())
    parts = recv if isinstance(recv, tuple) else (recv,)
    wanted = want.recv_x if isinstance(want.recv_x, tuple) else (want.recv_x,)
    for got, rows in zip(parts, wanted, strict=True):
        for expert, n in enumerate(want.recv_count):
            wrong += num_wrong(got[expert, :n], rows[expert, :n])
    hesitate()
    y = buf.low_latency_combine_input(handle)
    y[...] = to_device(buf, case.ys[buf.rank])
    z, _, receive = buf.low_latency_combine(y, None, None, handle, zero_copy=True, return_recv_hook=hook)
    if receive is not None:
        hesitate()
        receive()
    return wrong + num_wrong(z, case.low_latency_combined)


def footprint() -> dict[str, int]:
    """What must stay flat: MiB resident, open files, mapped shared segments, entries of /dev/shm."""
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize() >> 20
    with open("/proc/self/maps") as file:
        segments = sum("/dev/shm" in line for line in file)
    return {"MiB": resident, "files": len(os.listdir("/proc/self/fd")), "segments": segments,
            "/dev/shm": len(os.listdir("/dev/shm"))}  # fmt: skip


def main() -> int:
    args, comm = parse(), MPI.COMM_WORLD
    rng = np.random.default_rng([args.seed, comm.rank, 1])  # delays differ between ranks
    sizes = {"num_max_tokens_per_rank": args.tokens, "hidden": args.hidden, "num_experts": 4 * comm.size,
             "num_topk": args.topk}  # fmt: skip
    cases = [Case(seed, args, comm) for seed in range(SETS)]
    wrong = pairs = 0
    early = {}
    low_latency = {"low_latency_mode": True, "num_max_low_latency_tokens_per_rank": args.tokens}
    with epcy.Buffer(comm, backend=args.backend, timeout=30, **low_latency, **sizes) as buf:
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

            if pairs % 2:
                wrong += low_latency_pair(buf, case, (x, idx, weights), pairs % 4 == 1, hesitate)
                continue
            hesitate()
            r = buf.dispatch(x, idx, weights, **case.options)
            wrong += num_wrong(r.recv_x, case.received.recv_x)
            wrong += num_wrong(r.recv_topk_idx, case.received.recv_topk_idx)
            hesitate()
            z = buf.combine(r.recv_x, r.handle, weights if case.layout == "expert" else None)
            if pairs % 4 == 2:
                hesitate()
                again = buf.dispatch(other, handle=r.handle)
                wrong += num_wrong(again.recv_x, case.cached.recv_x)
            wrong += num_wrong(z.combined_x, case.combined)
            if not early and pairs >= args.pairs // 10:
                early = footprint()
            if pairs % 64 == 0:
                late = comm.allreduce(time.monotonic() - start > args.seconds, MPI.LOR)
                if wrong or late:
                    break
        buf.check()
        late_footprint = footprint()
    taken, most = time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # /dev/shm may hold other jobs' segments; of this one it has none on Linux, where MPI unlinks them at once.
    grown = [f"{name} {early[name]} -> {now}" for name, now in late_footprint.items()
             if early and name != "/dev/shm" and now > early[name] + (16 if name == "MiB" else 0)]  # fmt: skip
    grown = [f"rank {rank}: {', '.join(one)}" for rank, one in enumerate(comm.allgather(grown)) if one]
    total = comm.reduce(wrong)
    if comm.rank == 0:
        what = f"{pairs} pairs on {comm.size} ranks, backend {args.backend}, {taken:.0f} s"
        sys.stdout.write(
            f"{what}: {total} wrong rows, peak memory {most >> 10} MiB, {late_footprint['files']} "
            f"open files, {late_footprint['segments']} shared mappings; grown: {'; '.join(grown) or 'nothing'}\n"
        )
    return int(bool(comm.bcast(total) or grown))


if __name__ == "__main__":
    sys.exit(main())
