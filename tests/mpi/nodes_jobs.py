"""Whole programs that test_nodes_faults.py starts in jobs of their own: `python nodes_jobs.py NAME ARGS...`."""

import contextlib
import os
import signal
import sys
import time

from guard import guard

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if sys.argv[1] in ("lost", "masked") and "EPCY_JOB" not in os.environ:
    guard(3.0)

import numpy as np  # noqa: E402
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


def calls(buf):
    """The calls that a rank is lost in, by name; each checks what it returns."""
    r, routing = check_dispatch(buf, sent())
    many = low_latency_sent()
    return {
        "dispatch": lambda: check_dispatch(buf, sent()),
        "combine": lambda: check_combine(buf, r.handle, routing, 3),
        "barrier": buf.barrier,
        "reset": buf.reset,
        "free": buf.free,
        "low_latency_dispatch": lambda **options: buf.low_latency_dispatch(*many, use_fp8=False, **options),
        "low_latency_combine": lambda: back(buf, buf.low_latency_dispatch(*many, use_fp8=False)[2]),
    }


def low_latency_sent():
    """Messages that do not leave without help of their sender's."""
    idx = np.arange(512 * 4).reshape(512, 4) % (4 * COMM.size)
    return np.ones((512, 512), np.float16), idx


def back(buf, handle, **options):
    y = buf.low_latency_combine_input(handle, np.float16)
    return buf.low_latency_combine(y, low_latency_sent()[1], np.ones((512, 4), np.float32), handle, **options)


def lost(operation, phase, path):
    """The last rank is killed in `phase` of an operation; the others tell and leave."""
    last, number = COMM.size - 1, 2 if operation == "dispatch" else 1
    kill = "" if phase == "outside" else f"kill:rank={last},operation={operation},phase={phase},call={number}"
    buf = buffer(
        path, num_max_nvl_peers=3 if operation == "free" else 2, timeout=20, faults=kill, node_chunk_tokens=4,
        low_latency_mode=True, num_max_low_latency_tokens_per_rank=512,
    )  # fmt: skip
    call = calls(buf)[operation]  # of free: ranks of the lost one's node free shared memory with it, and wait
    if phase == "outside":  # what the last rank sends cannot leave any more
        if operation == "low_latency_combine":
            handle = buf.low_latency_dispatch(*low_latency_sent(), use_fp8=False)[2]
            call = lambda **options: back(buf, handle, **options)  # noqa: E731
        COMM.Barrier()
        if COMM.rank == last:
            if operation.startswith("low_latency"):
                call(return_recv_hook=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.4)
    start = time.monotonic()
    try:
        call()
        error = None
    except epcy.PeerTimeoutError as raised:
        error = raised
    took, kind = time.monotonic() - start, type(error).__name__
    ranks, phase = (error.ranks, error.phase) if error else ((), None)
    say(f"rank {COMM.rank}: {kind} ranks={ranks} phase={phase} {took:.2f} s: {error}")
    with contextlib.suppress(epcy.PeerTimeoutError):  # for whom the call was over
        buf.free()
    say(f"rank {COMM.rank} left")
    time.sleep(1)  # the others must not see this one dead
    os._exit(0)  # MPI_Finalize would wait for the last rank


def masked():
    """The last rank is killed while its rows are on their way; the others go on without it."""
    last = COMM.size - 1
    buf = buffer(
        "direct", num_max_nvl_peers=2, timeout=20, low_latency_mode=True, on_timeout="mask",
        num_max_low_latency_tokens_per_rank=512,
    )  # fmt: skip
    COMM.Barrier()
    if COMM.rank == last:
        buf.low_latency_dispatch(*low_latency_sent(), use_fp8=False, return_recv_hook=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.4)
    start = time.monotonic()
    for _ in range(3):
        handle = buf.low_latency_dispatch(*low_latency_sent(), use_fp8=False)[2]
        back(buf, handle)
    took = time.monotonic() - start
    say(f"rank {COMM.rank}: masked {buf.masked_ranks()} missing {handle.missing_ranks} {took:.2f} s")
    time.sleep(1)
    os._exit(0)


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
