"""A short run of tests/soak.py: its faults are survived, its figures are written, and it finds rows that are wrong."""

import json
import re

import pytest

from parallel import ROOT, launch

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(autouse=True)
def progress_bars(one_rank):
    pytest.importorskip("tqdm")


def run(*args, program="tests/soak.py"):
    return launch(2, ["-m", "mpi4py", program, *args], timeout=100, env={"PYTHONPATH": str(ROOT)})


def test_soak(tmp_path):
    path = tmp_path / "soak.json"
    done = run("--pairs", "400", "--shapes", "8", "--fault-every", "20", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(path.read_text())
    assert (figures["pairs"], figures["shapes"], figures["wrong"], figures["grown"]) == (400, 8, 0, [])
    assert figures["faults_survived"] == dict.fromkeys(("bad id", "too many tokens", "other call", "late"), 5)
    assert "0 wrong rows, 20 faults survived" in done.stdout


def test_soak_ends_in_time():
    done = run(
        "--pairs", "100000000", "--shapes", "100000", "--seconds", "2", "--tokens", "4", "--hidden", "64"
    )
    assert done.returncode == 0 and "grown: nothing" in done.stdout, done.stdout + done.stderr


def test_soak_sees_a_wrong_row(tmp_path):
    """An expectation with one other bit, in one case of one shape."""
    program = tmp_path / "soak_wrong.py"
    program.write_text(
        "import sys\n"
        f"sys.path[:0] = [{str(ROOT / 'tests')!r}]\n"
        "import numpy as np, soak, soak_pairs\n"
        "init = soak_pairs.Case.__init__\n"
        "def other(self, seed, *args):\n"
        "    init(self, seed, *args)\n"
        "    if seed[1:] == [1, 3] and len(self.combined):\n"
        "        self.combined.view(np.uint16)[0, 0] ^= 1\n"
        "soak_pairs.Case.__init__ = other\n"
        "sys.exit(soak.main())\n"
    )
    done = run("--pairs", "400", "--shapes", "4", program=str(program))
    told = re.search(r"(\d+) wrong rows", done.stdout)
    assert done.returncode != 0 and told and int(told[1]) > 0, done.stdout + done.stderr
