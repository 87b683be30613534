"""What README.md shows under "When something goes wrong": two ranks make one mistake after the other, and each rank's
error is printed as it stands there. At last rank 1 is killed.

    mpiexec -disable-auto-cleanup -n 2 python tests/mpi/provoked.py
"""

import os
import signal
import sys
import time

from guard import guard

if "EPCY_JOB" not in os.environ:
    guard(3.0)

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

import epcy  # noqa: E402

COMM = MPI.COMM_WORLD
SIZES = {"num_max_tokens_per_rank": 8, "hidden": 64, "num_experts": 4, "num_topk": 2, "backend": "host"}


def tell(title, call):
    """Make a call that fails; print what every rank got, rank by rank."""
    text = None
    try:
        call()
    except epcy.EpcyError as error:
        text = f"{type(error).__name__}: {error}"
    texts = COMM.gather(text)
    if COMM.rank == 0:
        show(title, texts)


def show(title, texts):
    sys.stdout.write(f"# {title}\n")
    told = [f"rank {rank}: {text}\n" for rank, text in enumerate(texts) if text is not None]
    same = len(told) > 1 and len(set(texts)) == 1
    sys.stdout.write(f"all ranks: {texts[0]}\n" if same else "".join(told))
    sys.stdout.flush()


def main():
    rank = COMM.rank
    x, idx = np.ones((4, 64), np.float16), np.zeros((4, 2), np.int64)
    many = np.ones((9, 64), np.float16), np.zeros((9, 2), np.int64)
    wrong = idx.copy()
    wrong[3, 1] = 99
    tell("ranks that give different options", lambda: epcy.Buffer(COMM, **SIZES | {"hidden": 64 + 64 * rank}))
    buf = epcy.Buffer(COMM, **SIZES, timeout=1)
    r = buf.dispatch(x, idx)
    tell("an id that names no expert, on rank 1", lambda: buf.dispatch(x, wrong if rank else idx))
    tell("more tokens than there is room for, on rank 1", lambda: buf.dispatch(*(many if rank else (x, idx))))
    tell(
        "ranks in different calls", lambda: buf.combine(r.recv_x, r.handle) if rank else buf.dispatch(x, idx)
    )
    tell("rank 1 comes later than timeout=1", lambda: time.sleep(1.2) if rank else buf.barrier())
    tell("the next call after that, without reset()", lambda: None if rank else buf.barrier())
    buf.reset()
    buf.barrier()  # it works again
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        buf.barrier()
    except epcy.PeerTimeoutError as error:
        show("after reset() it works again; then rank 1 is killed", [f"{type(error).__name__}: {error}"])
    os._exit(0)  # MPI_Finalize would wait for the dead


main()
