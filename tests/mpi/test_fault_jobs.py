"""A rank killed at every phase of every operation: the other one tells who has ended, at once, and hangs nowhere;
nothing is left in /dev/shm."""

import os
import re
import time

import pytest

from parallel import ROOT, launch

# Of rank 1.
CELLS = [
    *(f"{op}/{phase}" for op in ("dispatch", "combine", "reset") for phase in ("arrival", "data", "completion")),
    *(f"low_latency_{op}/{phase}" for op in ("dispatch", "combine")
      for phase in ("arrival", "data", "completion", "receipt")),
    "barrier/arrival", "free/arrival", "constructor/arrival",
]  # fmt: skip
OF_RANK_0 = ["dispatch/data", "combine/completion", "barrier/arrival", "low_latency_dispatch/arrival",
             "low_latency_combine/data", "reset/data", "free/arrival", "constructor/arrival"]  # fmt: skip


@pytest.mark.parametrize("part", range(4))
def test_killed_at_every_phase(comm, backend, part):
    if comm.size > 1:
        pytest.skip("this starts jobs of its own: run with one rank")
    if backend != "host":
        pytest.skip("the host backend's jobs")
    cells = CELLS[part::3] if part < 3 else OF_RANK_0
    victim = int(part < 3)
    before = windows()
    done = launch(
        2 * len(cells),
        ["tests/mpi/fault_jobs.py", str(victim), *cells],
        timeout=60,
        env={"PYTHONPATH": str(ROOT)},
        options=("-disable-auto-cleanup",),
    )
    told = done.stdout + done.stderr
    for cell in cells:
        line = next((one for one in told.splitlines() if one.startswith(f"{cell}: ")), "")
        assert "PeerTimeoutError" in line, f"{cell}: {told}"
        if cell != "constructor/arrival":  # MPI cannot tell who is missing
            operation = cell.split("/")[0]
            assert f"ranks=({victim},)" in line and "has ended" in line, line
            # A rank that has sent a low-latency call has done what others need of it: the next call finds it dead.
            if "low_latency" not in cell or cell.endswith(("arrival", "data")):
                assert f" {operation} (call " in line, line
        assert float(re.search(r"took=([\d.]+)", line)[1]) < 4, line
    limit = time.monotonic() + 5
    while (left := windows() - before) and time.monotonic() < limit:
        # Those of other jobs are there for a moment, between their making and their unlinking.
        time.sleep(0.2)
    assert not left, f"left in /dev/shm: {left}"


def windows():
    """The names of MPI's shared windows."""
    return {name for name in os.listdir("/dev/shm") if "osc" in name}
