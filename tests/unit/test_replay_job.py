"""What a job of a replay tells of how it ended; the launchers here are scripts that start no rank."""

import os
import time

import numpy as np
import pytest

from epcy.errors import ArgumentError
from epcy.options import resolve
from epcy.recording import Call, Recorded, Recording
from epcy.recording.checks import PLACES
from epcy.replay import Job

SIZES = {"num_max_tokens_per_rank": 8, "hidden": 128, "num_experts": 8, "num_topk": 2}


@pytest.fixture
def failure(tmp_path):
    """A function that replays a barrier by a launcher of one line, and returns how that failed."""
    options = {name: value.value for name, value in resolve(SIZES, {}).items() if name not in PLACES}
    barrier = Call(0, 0, "barrier", [{}], None, [0], [-1], np.zeros((1, 2), np.int64))
    recording = Recording(1, "host", [Recorded((0,), options)], [barrier], [])

    def run(line, seconds=20.0):
        script = tmp_path / "launcher"
        script.write_text(f"#!/bin/sh\n{line}\n")
        script.chmod(0o700)
        return Job([str(script)], "host", 1, seconds).failure(recording)

    return run


OUT = """while [ "$1" != --json ]; do shift; done; echo '{"failure": %s}' > "$2";"""


def test_good(failure):
    assert failure(OUT % "null") is None


def test_a_failure(failure):
    assert failure(OUT % '{"kind": "x", "call": 0}' + "exit 1") == {"kind": "x", "call": 0}


def test_a_crash(failure):
    assert failure("kill -9 $$")["kind"] == "crash"


def test_a_hang(failure, tmp_path):
    assert failure(f"echo $$ > {tmp_path}/pid; sleep 60", seconds=1.0)["kind"] == "hang"
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not os.path.exists(f"/proc/{pid}"):
            break
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")  # nothing of it is left


def test_what_cannot_be_replayed(failure):
    with pytest.raises(ArgumentError, match="cannot be replayed: why"):
        failure("echo why >&2; exit 2")


def test_ranks_are_not_those_of_an_outer_job(failure, tmp_path, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "3")
    failure(f"env > {tmp_path}/env;" + OUT % "null")
    assert "PMI_RANK" not in (tmp_path / "env").read_text()
