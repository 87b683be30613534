"""The programs of README.md run as they stand there, and its error texts are those that come."""

import difflib
import re
from pathlib import Path

import pytest

from parallel import ROOT, launch

README = Path(__file__).resolve().parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.S)


def run(program):
    exec(compile(program, "README.md", "exec"), {"__name__": "readme"})  # noqa: S102


def test_there_are_two_programs():
    assert [
        name in block for block, name in zip(BLOCKS, ("buf.dispatch(", "low_latency_dispatch("), strict=True)
    ]


@pytest.mark.host_only("its arrays are NumPy's")
def test_use(comm, backend, monkeypatch):
    if 64 % comm.size:
        pytest.skip("64 experts need 1, 2, 4 or 8 ranks")
    monkeypatch.setenv("EPCY_BACKEND", backend)
    run(BLOCKS[0] + "\n    assert z.combined_x.tobytes() == x.tobytes()\n")


def test_decode(comm, backend, monkeypatch):
    monkeypatch.setenv("EPCY_BACKEND", backend)
    run(BLOCKS[1])


def steady(text):
    """Without what differs from run to run: process numbers and moments."""
    return re.sub(r"\d+\.\d+ s\b", "SECONDS", re.sub(r"pid \d+", "pid PID", text)).strip().splitlines()


def test_when_something_goes_wrong(comm, backend):
    if comm.size > 1 or backend != "host":
        pytest.skip("a job of its own, of the host backend: run with one rank")
    section = README.read_text(encoding="utf-8").partition("## When something goes wrong")[2]
    shown = steady(re.search(r"```text\n(.*?)```", section, flags=re.S)[1])
    done = launch(
        2, ["tests/mpi/provoked.py"], env={"PYTHONPATH": str(ROOT)}, options=("-disable-auto-cleanup",)
    )
    came = [line for line in steady(done.stdout) if not line.startswith("ended with")]
    assert came == shown, "\n".join(difflib.unified_diff(shown, came, "README.md", "what came", lineterm=""))
