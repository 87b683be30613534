"""Whole programs that test_jobs.py starts in jobs of their own: `python jobs.py NAME [low_latency]`."""

import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

from guard import guard

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if sys.argv[1] in ("killed", "goes_on") and "EPCY_JOB" not in os.environ:
    guard()

import mpi4py  # noqa: E402
import numpy as np  # noqa: E402

if "not_initialized" in sys.argv:
    mpi4py.rc.initialize = False
from mpi4py import MPI  # noqa: E402

import epcy  # noqa: E402
from mpi.cases import counting  # noqa: E402

COMM = MPI.COMM_WORLD
SIZES = {"num_max_tokens_per_rank": 8, "hidden": 64, "num_topk": 1, "backend": "host"}


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def buffer(**options):
    options["low_latency_mode"] = "low_latency" in sys.argv
    return epcy.Buffer(COMM, **{**SIZES, "num_experts": COMM.size, **options})


def dispatch(buf):
    """Send four tokens to expert 0, with the calls that the command line names; return what came."""
    if "low_latency" in sys.argv:
        x, idx = np.full((4, 64), buf.rank, np.float16), np.zeros((4, 1), np.int64)
        recv_x, count, _, _, hook = buf.low_latency_dispatch(x, idx, use_fp8=False, return_recv_hook=True)
        hook()
        return SimpleNamespace(recv_x=recv_x[0, : count[0]])
    return buf.dispatch(np.full((4, 64), buf.rank, np.float16), np.zeros((4, 1), np.int64))


def killed():
    """The last rank is killed in mid-job; the others tell and leave."""
    buf = buffer(timeout=5)
    dispatch(buf)
    if COMM.rank == COMM.size - 1:
        say("victim", os.getpid())
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        dispatch(buf)
    except epcy.PeerError as error:
        say(
            f"rank {COMM.rank}: {type(error).__name__} ranks={error.ranks} {time.monotonic() - start:.2f} s: {error}"
        )
    say("state:", bool(buf))
    buf.free()
    say(f"rank {COMM.rank} left")


def goes_on():
    """The last rank is killed in mid-job; the others go on without it, and count what they lose."""
    fault = f"kill:rank={COMM.size - 1},operation=low_latency_dispatch,phase=data,call=3"
    buf = buffer(timeout=5, on_timeout="mask", faults=fault)
    x, idx = np.full((4, 64), 1 + buf.rank, np.float16), np.arange(4)[:, None] % COMM.size
    start, lost = time.monotonic(), 0
    for turn in range(30):
        recv_x, count, handle, _, _ = buf.low_latency_dispatch(x, idx, use_fp8=False)
        alive = COMM.size - (turn >= 2)
        mine = int((idx == buf.rank).sum())
        assert count[0] == mine * alive and (recv_x[0, :mine] == 1).all(), (turn, count)
        z, _, _ = buf.low_latency_combine(recv_x, None, None, handle)
        gone = (idx[:, 0] == COMM.size - 1) & (alive < COMM.size)
        assert (z == np.where(gone[:, None], 0, x)).all(), turn
        lost += int(gone.sum())
    assert buf.num_lanes_not_sent[-1] + buf.num_lanes_not_returned[-1] == lost
    say(f"rank {COMM.rank}: masked {buf.masked_ranks()}, lost {lost}, {time.monotonic() - start:.2f} s")
    buf.free()
    os._exit(0)  # MPI_Finalize would wait for the dead


def interrupted():
    """Ctrl-C on rank 0 while it waits."""
    buf = buffer(timeout=30)
    dispatch(buf)
    if COMM.rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        try:
            dispatch(buf)
        except KeyboardInterrupt:
            say(f"interrupted {time.monotonic() - start - 0.5:.2f}")
    COMM.Barrier()
    if COMM.rank:
        try:
            dispatch(buf)
        except epcy.PeerTimeoutError as error:
            say("told:", error)
    buf.reset()
    say("rows", len(dispatch(buf).recv_x))
    buf.free()


def to_the_second():
    """The last rank comes 3 s late, once with timeout=1, once with timeout=10, while another thread counts."""
    buf, late = buffer(timeout=1), COMM.rank == COMM.size - 1
    dispatch(buf)
    COMM.Barrier()
    start, error = time.monotonic(), None
    if late:
        time.sleep(3)
    try:
        dispatch(buf)
    except epcy.PeerTimeoutError as caught:
        error = caught
    took = time.monotonic() - start
    if not late:
        say(f"late: {took:.2f} s: {error}")
    COMM.Barrier()
    buf.reset()
    assert len(dispatch(buf).recv_x) == (0 if COMM.rank else 4 * COMM.size)
    buf.free()
    buf = buffer(timeout=10)
    for turn in range(3):
        if late:
            time.sleep((3, 0.2, 2)[turn])
        with counting() as counts:
            start = time.monotonic()
            rows = dispatch(buf).recv_x
            took = time.monotonic() - start
            counted = counts[0]
        want = np.repeat(np.arange(COMM.size), 4)[:, None] if COMM.rank == 0 else np.zeros((0, 1))
        assert np.array_equal(rows, np.broadcast_to(want, rows.shape)), rows
        if not late:
            say(f"waited: {took:.2f} s, counted {counted}")
    buf.free()


def never_freed():
    say("made", bool(buffer()))
    buf = buffer()
    dispatch(buf)
    globals()["kept"] = buf


def finalized_first():
    buf = buffer()
    r = dispatch(buf)
    assert len(r.recv_x) == (4 * COMM.size if COMM.rank == 0 else 0)
    MPI.Finalize()
    for call in (lambda: dispatch(buf), buf.barrier, buf.check):
        try:
            call()
        except epcy.StateError as error:
            say("told:", error)
    buf.free()
    say("freed", bool(buf))


def raises():
    with buffer() as buf:
        dispatch(buf)
        if COMM.rank == 0:
            raise RuntimeError("on purpose")
        dispatch(buf)


def not_initialized():
    try:
        epcy.Buffer(MPI.COMM_WORLD, **SIZES, num_experts=1)
    except epcy.ArgumentError as error:
        say("told:", error)


def atexit_free():
    import atexit

    buf = buffer()
    dispatch(buf)
    atexit.register(lambda: say("freed", buf.free()))


def resident():
    """Resident memory after 100 rounds, over that after the imports, less the heap."""

    def now():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    sizes = {"num_max_tokens_per_rank": 512, "hidden": 2048, "num_experts": 4 * COMM.size, "num_topk": 2}
    before = now()
    buf = epcy.Buffer(COMM, backend="host", **sizes)
    x, idx = np.ones((512, 2048), np.float16), np.arange(1024).reshape(512, 2) % (4 * COMM.size)
    for _ in range(100):
        r = buf.dispatch(x, idx)
        buf.combine(r.recv_x, r.handle)
    heap = epcy.Buffer.size_hint(COMM.size, **sizes)["total"]
    say("over", max(COMM.allgather(now() - before - heap * COMM.size)) >> 20)
    buf.free()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
