"""python -m epcy doctor on all ranks: one report, one exit status. From one rank: it starts jobs of its own."""

import json

import pytest

from epcy.doctor import report
from parallel import ROOT, launch

SCRIPT = """
import sys
from mpi4py import MPI
from epcy.doctor import facts, report
gather = report.gather
def spoiled(root, environ=None):
    found = gather(root, environ)
    if MPI.COMM_WORLD.rank == 1:
        found["versions"]["epcy"] = "0.0.0"
        found["shm"] = None
    return found
report.gather = spoiled
sys.exit(report.main(False, False))
"""


@pytest.fixture(autouse=True)
def one_rank(comm, backend):
    if comm.size > 1 or backend != "host":
        pytest.skip("run with one rank on the host backend")


def test_one_report_of_all_ranks():
    done = launch(3, ["-m", "epcy", "doctor", "--json"], env={"PYTHONPATH": str(ROOT)})
    said = json.loads(done.stdout)
    assert said["num_ranks"] == 3 and [one["size"] for one in said["facts"]] == [3, 3, 3]
    names = [one["name"] for one in said["findings"]]
    assert names.count("MPI library") == 1 and "ranks" in names and "equal on all ranks" in names
    assert done.returncode == report.status([]) or any(one["state"] == "failure" for one in said["findings"])


def test_a_rank_that_differs():
    done = launch(2, ["-c", SCRIPT], env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("failure, ") <= 1 and done.stdout.count(" failure\n") == 1  # one report
    line = next(line for line in done.stdout.splitlines() if "epcy's version" in line)
    assert line.startswith("failure") and "0.0.0 on rank 1" in line


VARIABLE = """
import os, runpy, sys
from mpi4py import MPI
os.environ["EPCY_TIMEOUT"] = str(5 + MPI.COMM_WORLD.rank)
sys.argv[1:] = ["doctor"]
runpy.run_module("epcy", run_name="__main__")
"""


def test_variables_of_one_rank():
    done = launch(2, ["-c", VARIABLE], env={"PYTHONPATH": str(ROOT)})
    line = next(line for line in done.stdout.splitlines() if "EPCY_TIMEOUT" in line)
    assert line.startswith("warning") and "5 on rank 0; 6 on rank 1" in line
