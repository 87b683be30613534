"""Status pages: the folder's and the files' rights, parsing, and the pages of processes that are gone."""

import os
import stat
import struct
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epcy import status
from epcy.errors import ArgumentError

FORMAT = "<QiiiiiiQq7q"


def page(pid=1, op=1, phase=2, epoch=9, magic=0x7375746174737965, version=4):
    now = time.monotonic_ns()
    raw = struct.pack(FORMAT, magic, version, pid, 3, 4, op, phase, epoch, now - 10**9, 0, 5, 4, 1, 0, 0, 0)
    return raw.ljust(4096, b"\0")


def test_folder_is_private(tmp_path):
    path = status.folder(str(tmp_path / "a" / "b"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert status.folder(str(path)) == path


def test_default_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert status.folder() == tmp_path / f"epcy-{os.getuid()}"


@pytest.mark.parametrize("runtime", [None, "nowhere"])
def test_default_folder_in_a_shared_place(tmp_path, monkeypatch, runtime):
    """Its name is not to be known beforehand, and what somebody else put there is left alone."""
    if runtime is None:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / runtime))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    prefix = f"epcy-{os.getuid()}-"
    (tmp_path / f"{prefix}aaaa").mkdir()
    (tmp_path / f"{prefix}aaaa").chmod(0o777)
    (tmp_path / f"{prefix}bbbb").symlink_to(tmp_path)
    (tmp_path / f"{prefix}cccc").write_text("")
    assert status.read_all() == [] and len(os.listdir(tmp_path)) == 3  # looking makes nothing
    first = status.folder()
    assert first.parent == tmp_path and len(first.name) >= len(prefix) + 8
    assert stat.S_IMODE(first.stat().st_mode) == 0o700 and status.folder() == first
    second = tmp_path / f"{prefix}0"  # a rank that started at the same moment
    second.mkdir(mode=0o700)
    for folder in (first, second):
        status.open_page(folder, 3)[0][:4096] = page(pid=os.getpid())
    assert len(status.read_all()) == 2


@pytest.mark.parametrize("kind", ["open", "file", "link"])
def test_folder_that_others_may_write_to(tmp_path, kind):
    path = tmp_path / "pages"
    if kind == "open":
        path.mkdir()
        path.chmod(0o777)
    elif kind == "file":
        path.write_text("")
    else:
        (tmp_path / "real").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "real")
    with pytest.raises(ArgumentError) as caught:
        status.folder(str(path))
    for text in ("status_dir: ", str(path), "EPCY_STATUS_DIR"):
        assert text in str(caught.value)


def test_open_page(tmp_path):
    folder = status.folder(str(tmp_path / "pages"))
    made = [status.open_page(folder, 3) for _ in range(2)]
    assert made[0][1] != made[1][1]
    for memory, path in made:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_size == len(memory)
        assert path.name.startswith(f"{os.getpid()}-") and path.name.endswith("-3")
        assert status.parse(path.read_bytes()) is None  # empty yet
        memory[:4096] = page(pid=os.getpid())
    assert len(status.read_all(str(folder))) == 2


def test_parse():
    one = status.parse(page(pid=12))
    assert (one.pid, one.rank, one.size, one.operation, one.phase, one.epoch) == (
        12,
        3,
        4,
        "dispatch",
        "data",
        9,
    )
    assert one.num_calls == {
        "nothing": 0,
        "dispatch": 5,
        "combine": 4,
        "barrier": 1,
        "free": 0,
        "low_latency_dispatch": 0,
        "low_latency_combine": 0,
    }
    assert 0.9 < one.age < 5 and "in dispatch (call 9), phase data" in str(one)
    assert "outside of epcy" in str(status.parse(page(phase=0)))


@pytest.mark.parametrize(
    "raw", [b"", page()[:40], page(magic=1), page(version=1), page(op=99), page(phase=-1)]
)
def test_what_is_no_page(raw):
    assert status.parse(raw) is None


def test_pages_of_ended_processes_go(tmp_path):
    folder = status.folder(str(tmp_path / "pages"))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (folder / f"{ended.pid}-0-0").write_bytes(page(pid=ended.pid))
    (folder / f"{os.getpid()}-0-1").write_bytes(page(pid=os.getpid()))
    (folder / "notes").write_text("mine")
    assert [one.pid for one in status.read_all(str(folder))] == [os.getpid()]
    assert sorted(os.listdir(folder)) == sorted([f"{os.getpid()}-0-1", "notes"])


@settings(deadline=None, max_examples=300)
@given(
    data=st.binary(max_size=200),
    changes=st.lists(st.tuples(st.integers(0, 111), st.integers(0, 255)), max_size=6),
)
def test_any_bytes(data, changes):
    """A page of anybody's bytes is a status or none, and can be shown; it never raises."""
    whole = bytearray(page())
    for at, value in changes:
        whole[at] = value
    for raw in (data, bytes(whole), bytes(whole)[: len(data)], page()[:24] + data):
        found = status.parse(raw)
        assert found is None or (str(found) and found.age >= 0)


def test_who_looks_on_leaves_word(tmp_path):
    folder = status.folder(str(tmp_path / "pages"))
    mapped, path = status.open_page(folder, 3)
    written = page(pid=os.getpid())
    mapped[:] = written
    status.read_all(str(folder))
    assert struct.unpack_from("<q", path.read_bytes(), struct.calcsize(FORMAT)) == (0,)
    before = time.monotonic_ns()
    assert len(status.read_all(str(folder), watch=True)) == 1
    (watched_ns,) = struct.unpack_from("<q", mapped, struct.calcsize(FORMAT))
    assert before <= watched_ns <= time.monotonic_ns()
    assert mapped[: struct.calcsize(FORMAT)] == written[: struct.calcsize(FORMAT)]
