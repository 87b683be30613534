"""A package outside the tree cimports epcy: it is built with `epcy.get_include()` alone, and runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parallel import ROOT, launch

SOURCE = Path(__file__).with_name("thirdparty")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The third party's folder with its module built in place, and the environment in which it finds epcy."""
    pytest.importorskip("epcy.buffer", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("third party") / "package"
    shutil.copytree(SOURCE, folder)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_runs(built, num_ranks):
    folder, env = built
    done = launch(num_ranks, ["-m", "mpi4py", str(folder / "main.py")], env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"thirdparty works on {num_ranks}" in done.stdout
