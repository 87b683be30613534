"""The programs of README.md run as they stand there."""

import re
from pathlib import Path

import pytest

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
