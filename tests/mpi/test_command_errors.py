"""Command lines of jobs that are wrong: one line on stderr, once, and the exit status; no traceback. From one rank."""

import re

import pytest

from parallel import ROOT, launch

pytestmark = pytest.mark.usefixtures("one_rank")

HOST = "--backend host"
WRONG = [
    ("epcy.bench --floor-gbps nan", "argument --floor-gbps: expected GB/s"),
    ("epcy.bench -n 0", "argument -n/--runs: expected a whole number from 1"),
    (f"epcy.bench dispatch -b 4 -e 4 -n 1 --hidden 7 --experts 4 --topk 2 {HOST}", "hidden: expected rows"),
    (
        f"epcy.bench dispatch -b 4 -e 4 --mode ll --hidden 7 --experts 4 --topk 2 {HOST}",
        "hidden: expected rows",
    ),
    (f"epcy.bench dispatch -b 4 -e 4 -n 1 --json /proc/no.json {HOST} --experts 4 --topk 2", "/proc/no"),
    ("epcy.bench replay /nowhere.npz", "/nowhere.npz"),
    ("epcy.bench replay /nowhere.npz --timeout nan", "argument --timeout: expected seconds"),
    ("epcy tune --tokens 0", "argument --tokens: expected a whole number from 1"),
    (f"epcy tune --tokens 4 --hidden 7 {HOST}", "hidden: expected rows"),
    (f"epcy tune --tokens 4 --experts 3 {HOST}", "num_experts: expected a multiple"),
    ("epcy calibrate --seconds inf", "argument --seconds: expected seconds"),
    ("epcy calibrate --backend nvshmem", "backend: 'nvshmem'"),
]


@pytest.mark.parametrize("command, words", WRONG)
def test_told_once(command, words):
    module, *options = command.split()
    done = launch(2, ["-m", "mpi4py", "-m", module, *options], env={"PYTHONPATH": str(ROOT)})
    told = done.stdout + done.stderr
    assert done.returncode == (1 if "/proc" in command else 2), told
    assert "Traceback" not in told, told
    lines = [line for line in done.stderr.splitlines() if words in line]
    assert len(lines) == 1 and words not in done.stdout, told
    others = [line for line in done.stderr.splitlines() if "error" in line.lower() and line not in lines]
    assert not [line for line in others if not re.match(r"(Abort|application called)", line)], told
