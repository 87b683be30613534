"""What epcy leaves on a machine that others use: its files are the user's alone, nothing of theirs is run or
overwritten, and nobody reaches its metrics from elsewhere."""

import ast
import os
import re
import socket
import stat
from pathlib import Path

import pytest

import epcy
from epcy import measured, private_file, recording, timeline
from epcy.bench import results

PACKAGE = Path(epcy.__file__).parent
SOURCES = {
    path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
    for path in PACKAGE.rglob("*.py*") if path.suffix in (".py", ".pyx")
}  # fmt: skip


@pytest.fixture(autouse=True)
def generous_umask():
    """Privacy does not hang on the user's umask."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.mark.parametrize("write", [
    lambda path: private_file.write_text(path, "text"),
    lambda path: timeline.write(path, {"traceEvents": []}),
    lambda path: recording.write(path, recording.Recording(1, "host", [], [], [])),
])  # fmt: skip
def test_files_are_private(tmp_path, write):
    path = tmp_path / "file.json"
    write(path)
    assert mode(path) == 0o600 and os.listdir(tmp_path) == ["file.json"]
    path.chmod(0o644)
    write(path)  # another one takes its place
    assert mode(path) == 0o600


def test_results_of_the_bench_are_as_private_as_the_umask_says(tmp_path):
    path = tmp_path / "results.json"
    os.umask(0o027)
    results.write(str(path), {"schema": 1})
    assert mode(path) == 0o640
    with pytest.raises(TypeError):
        results.write(str(path), {"schema": object()})
    assert path.read_text() == '{\n "schema": 1\n}\n'  # still


def test_cache_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv("EPCY_CACHE_DIR", str(tmp_path / "cache"))
    path = measured.put("tuning", "key", {"num_sms": 2})
    assert mode(path) == 0o600 and mode(path.parent) == 0o700


def test_a_link_in_the_way_is_replaced_and_not_followed(tmp_path):
    other = tmp_path / "another user's"
    other.write_text("theirs")
    path = tmp_path / "trace.json"
    path.symlink_to(other)
    for name in (f"{path.name}.part{os.getpid()}", f"{path.name}.tmp"):  # what might be guessed
        (tmp_path / name).symlink_to(other)
    timeline.write(path, {"traceEvents": []})
    assert other.read_text() == "theirs" and not path.is_symlink()


def test_nothing_is_left_of_a_write_that_fails(tmp_path):
    with pytest.raises(TypeError):
        timeline.write(tmp_path / "trace.json", {"traceEvents": [object()]})
    with pytest.raises(UnicodeEncodeError):
        private_file.write_text(tmp_path / "text", "\ud800")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        private_file.write_text(tmp_path / "folder", "text")
    with pytest.raises(KeyError), private_file.replace(tmp_path / "part") as file:
        file.write(b"half")
        raise KeyError
    assert os.listdir(tmp_path) == ["folder"]


def test_no_pickle_is_read_from_disk():
    """pickle is used for what ranks of one job say to each other by MPI, and nowhere else; np.load refuses it."""
    assert [name for name, text in SOURCES.items() if re.search(r"^\s*(import|from) (c?pickle|shelve|marshal|dill)\b",
            text, re.M)] == ["backends/bootstrap.py"]  # fmt: skip
    bootstrap = SOURCES["backends/bootstrap.py"]
    assert not re.search(r"pickle\.load\(|Unpickler|read_bytes", bootstrap)
    for name, text in SOURCES.items():
        assert "allow_pickle=True" not in text, name
        for line in re.findall(r"np\.load\(.*", text):
            assert "allow_pickle=False" in line, (name, line)
        assert not re.search(r"\b(eval|exec)\(", text), name


def test_no_file_by_a_name_in_a_shared_place():
    """Files are written by private_file, by status pages, or where the user of the bench says."""
    writers = []
    for name, text in SOURCES.items():
        assert "/tmp" not in text and "mktemp(" not in text, name
        opened = re.findall(
            r"""(?:\bopen\(.*["'][wax]b?\+?["']|write_text\(|write_bytes\(|mkstemp|mkdtemp|O_CREAT)""", text
        )
        if [call for call in opened if "os.devnull" not in call]:
            writers.append(name)
    assert sorted(writers) == [
        "bench/results.py",
        "measured.py",
        "private_file.py",
        "status.py",
        "timeline.py",
    ]


def test_metrics_are_for_this_machine():
    pytest.importorskip("prometheus_client")
    server, thread = epcy.metrics.serve(0)
    try:
        assert server.server_address[0] == "127.0.0.1"
        outside = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
        for address in outside - {"127.0.0.1", "127.0.1.1"}:
            with pytest.raises(OSError), socket.create_connection((address, server.server_port), timeout=2):
                pass
    finally:
        server.shutdown()
        thread.join()
    tree = ast.parse(SOURCES["metrics.py"])
    serve = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "serve")
    assert ast.unparse(serve.args).endswith("addr: str='127.0.0.1'")
