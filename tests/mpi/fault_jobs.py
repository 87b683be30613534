"""Rank pairs of which one is killed, each pair at another phase: `fault_jobs.py VICTIM
OPERATION/PHASE...`, a pair each; VICTIM is its rank in the pair."""

import os
import sys
import time

from guard import guard

if "EPCY_JOB" not in os.environ:
    guard(3.0)

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

import epcy  # noqa: E402

victim, cell = sys.argv[1], sys.argv[2 + MPI.COMM_WORLD.rank // 2]
operation, phase = cell.split("/")
pair = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank // 2)
start, told = time.monotonic(), None


def life():
    """Every operation, in a turn that makes every phase of it matter."""
    global start
    options = {"num_max_tokens_per_rank": 8, "hidden": 64, "num_topk": 1, "num_experts": 2, "backend": "host"}
    faults = f"kill:rank={victim},operation={operation},phase={phase}"
    limit = 2 if operation == "constructor" else 20
    buf = epcy.Buffer(pair, low_latency_mode=True, timeout=limit, faults=faults, **options)
    x, idx = np.full((4, 64), buf.rank, np.float16), np.array([[0], [1], [0], [1]], np.int64)
    for _ in range(3):
        start = time.monotonic()
        r = buf.dispatch(x, idx)
        buf.combine(r.recv_x, r.handle)
        buf.barrier()
        _, _, handle, _, hook = buf.low_latency_dispatch(x, idx, use_fp8=False, return_recv_hook=True)
        hook()
        y = np.ones((1, 16, 64), np.float16)
        buf.low_latency_combine(y, None, None, handle, return_recv_hook=True)[2]()
        buf.reset()
    buf.free()


try:
    life()
except epcy.PeerTimeoutError as error:
    took = time.monotonic() - start
    told = f"{cell}: ranks={error.ranks} took={took:.2f} {type(error).__name__} {error}"
sys.stdout.write(f"{told or cell + ': nothing was told'}\n")
sys.stdout.flush()
os._exit(0)  # MPI_Finalize would wait for the dead
