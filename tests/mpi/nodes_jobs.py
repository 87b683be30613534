"""Whole programs that test_nodes_faults.py starts in jobs of their own: `python nodes_jobs.py NAME ARGS...`."""

import os
import sys
import time

from guard import guard

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if sys.argv[1] == "lost" and "EPCY_JOB" not in os.environ:
    guard()

from mpi4py import MPI  # noqa: E402

import epcy  # noqa: E402
from mpi.cases import check_combine, check_dispatch, draw  # noqa: E402

COMM = MPI.COMM_WORLD


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def buffer(path, **options):
    sizes = {"num_max_tokens_per_rank": 64, "hidden": 512, "num_experts": 4 * COMM.size, "num_topk": 4}
    return epcy.Buffer(COMM, backend="host", path=path, **sizes, **options)


def sent():
    return draw(3, COMM.size, 64, num_experts=4 * COMM.size, num_topk=4, unused=0)


def lost(operation, path):
    """The last rank is killed when all have arrived; the others tell and leave."""
    fault = f"kill:rank={COMM.size - 1},operation={operation},phase=data,call=2"
    buf = buffer(path, num_max_nvl_peers=2, timeout=20, faults=fault, node_chunk_tokens=4)
    for _ in range(2):
        start = time.monotonic()
        try:
            r, routing = check_dispatch(buf, sent())
            start = time.monotonic()
            check_combine(buf, r.handle, routing, 3)
        except epcy.PeerTimeoutError as error:
            took, kind = time.monotonic() - start, type(error).__name__
            say(f"rank {COMM.rank}: {kind} ranks={error.ranks} phase={error.phase} {took:.2f} s: {error}")
    buf.free()
    say(f"rank {COMM.rank} left")


def works(path):
    """Both layouts, exact, on the nodes that MPI tells of."""
    with buffer(path, node_chunk_tokens=5) as buf:
        if COMM.rank == 0:
            say(buf.topology)
        for layout in ("rank", "expert"):
            r, routing = check_dispatch(buf, sent(), layout=layout)
            check_combine(buf, r.handle, routing, 3, num_biases=1)
            check_dispatch(buf, sent(), handle=r.handle, routing=routing)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
