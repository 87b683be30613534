"""Jobs of their own (jobs.py): a killed rank, Ctrl-C, and how a process may leave. From one rank."""

import re
import time

import pytest

from parallel import ROOT, launch

SCRIPT = "tests/mpi/jobs.py"


pytestmark = pytest.mark.usefixtures("one_rank")

MODES = pytest.mark.parametrize("mode", ["", "low_latency"])


def run(name, num_ranks, *, mpi4py=False, mode="", **options):
    start = time.monotonic()
    args = [*(["-m", "mpi4py"] if mpi4py else []), SCRIPT, name, mode]
    done = launch(num_ranks, args, timeout=30, env={"PYTHONPATH": str(ROOT)}, **options)
    return done, done.stdout + done.stderr, time.monotonic() - start


@MODES
def test_a_killed_rank(mode):
    done, told, took = run("killed", 3, mode=mode, options=("-disable-auto-cleanup",))
    assert took < 25, told
    assert "ended with -9" in told
    for rank in range(2):
        line = next((one for one in done.stdout.splitlines() if one.startswith(f"rank {rank}: Peer")), told)
        assert "ranks=(2,)" in line
        for text in ("dispatch (call 2)", "rank 2 (pid", "arrival"):
            assert text in line, line
        assert float(re.search(r"([\d.]+) s: ", line)[1]) < 2, line  # found dead, not waited for
        assert f"rank {rank} left" in told
    assert told.count("state: False") == 2 and "state: True" not in told
    ends = [
        float(after)
        for code, after in re.findall(r"ended with (-?\d+) after ([\d.]+) s", told)
        if code != "-9"
    ]
    assert len(ends) == 2 and max(ends) < 8, told


def test_goes_on_without_a_killed_rank():
    done, told, took = run("goes_on", 3, mode="low_latency", options=("-disable-auto-cleanup",))
    assert took < 25, told
    for rank in range(2):
        line = next((one for one in done.stdout.splitlines() if one.startswith(f"rank {rank}: masked")), told)
        assert "masked (2,), lost 28," in line and float(re.search(r"([\d.]+) s$", line)[1]) < 4, line


@MODES
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ctrl_c(num_ranks, mode):
    done, told, _ = run("interrupted", num_ranks, mode=mode)
    assert done.returncode == 0, told
    assert float(re.search(r"interrupted (-?[\d.]+)", told)[1]) < 1
    assert told.count("told:") == num_ranks - 1 and "rank 0 gave up" in told
    assert told.count("rows") == num_ranks and f"rows {4 * num_ranks}" in told


@MODES
def test_a_late_rank_is_told_in_time_and_other_threads_run(mode):
    done, told, _ = run("to_the_second", 2, mode=mode)
    assert done.returncode == 0, told
    seconds, text = re.search(r"late: ([\d.]+) s: (.*)", told).groups()
    assert 1 <= float(seconds) < 2, told
    for part in (
        "dispatch (call 2)",
        "on rank 0",
        "timeout=1 s",
        "waited for ranks [1] in phase arrival",
        "rank 1 (pid",
    ):
        assert part in text, text
    waits = [(float(s), int(n)) for s, n in re.findall(r"waited: ([\d.]+) s, counted (\d+)", told)]
    assert len(waits) == 3 and waits[0][0] > 2.5 and waits[2][0] > 1.5, told
    # It runs every millisecond, at best.
    assert all(counted > 100 * waited for waited, counted in waits), told


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_buffer_that_is_never_freed(num_ranks):
    done, told, took = run("never_freed", num_ranks)
    assert done.returncode == 0 and took < 20, told
    assert told.count("made True") == num_ranks and "Traceback" not in told


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_mpi_finalized_before_the_buffer(num_ranks):
    done, told, took = run("finalized_first", num_ranks)
    assert done.returncode == 0 and took < 20, told
    assert told.count("told:") == 3 * num_ranks and "MPI was finalized" in told
    assert told.count("freed False") == num_ranks


@pytest.mark.parametrize("culprits", [2, 3])
def test_an_exception_on_one_rank(culprits):
    done, told, took = run("raises", culprits, mpi4py=True)
    assert done.returncode not in (0, None) and took < 20, told
    assert "on purpose" in told


def test_free_at_exit():
    done, told, _ = run("atexit_free", 2)
    assert done.returncode == 0 and told.count("freed None") == 2, told


def test_before_mpi_is_initialized():
    done, told, _ = run("not_initialized", 1)
    assert done.returncode == 0, told
    assert "told: comm: MPI is not running" in told


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_resident_memory(num_ranks):
    done, told, _ = run("resident", num_ranks)
    assert done.returncode == 0, told
    assert int(re.search(r"over (-?\d+)", told)[1]) <= 40, told
