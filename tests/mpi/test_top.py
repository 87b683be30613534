"""python -m epcy top and epcy.metrics: what they tell of Buffers at work."""

import subprocess
import sys
import urllib.request

import pytest

import epcy
from epcy import status, top
from mpi.cases import draw, mine, settle

E = 4
PAGES = pytest.mark.host_only("the host backend's status pages")


@pytest.fixture
def busy(comm, make_buffer, same, tmp_path):
    """A Buffer, and a function that makes it work."""
    folder = same(str(tmp_path / "pages"))
    buf = make_buffer(status_dir=folder)
    x, idx, weights = mine(buf, draw(3, comm.size, 8, num_experts=E * comm.size))

    def work(rounds=3):
        for _ in range(rounds):
            r = buf.dispatch(x, idx, weights)
            buf.combine(r.recv_x, r.handle)
        comm.Barrier()

    work.buf, work.folder = buf, folder
    return work


@PAGES
def test_pages_hold_the_sums(comm, busy):
    busy()
    mine_ = next(s for s in status.read_all(busy.folder) if s.rank == comm.rank)
    s = busy.buf.stats()
    g = mine_.gauges
    assert (g.num_calls, g.tokens_sent, g.tokens_received, g.bytes_moved) == (
        6,
        s.num_tokens_sent,
        s.num_tokens_received,
        s.bytes_moved,
    )
    assert g.tokens_per_expert == s.tokens_per_expert and g.first_expert == comm.rank * E
    comm.Barrier()


@PAGES
def test_lines(comm, busy):
    busy()
    before = status.read_all(busy.folder)
    comm.Barrier()
    busy.buf.stats(reset=True)  # of the Buffer's own numbers; the page's go on
    busy(5)
    found = top.lines(status.read_all(busy.folder), before, 2.0)
    assert [one.rank for one in found] == list(range(comm.size))
    for one in found:
        assert one.calls_per_s == 5.0 and one.us > 0 and one.gbps >= 0 and 0 <= one.wait_share <= 1
        assert one.imbalance >= 1 and 1 <= len(one.hottest) <= 3
        assert all(expert // E == one.rank for expert, _ in one.hottest)
    comm.Barrier()
    idle = top.lines(before, before, 1.0)
    assert all(one.us is None and one.where == "idle" for one in idle)
    comm.Barrier()


@PAGES
def test_command(comm, busy):
    pytest.importorskip("rich")
    busy()
    if comm.rank == 0:
        command = [sys.executable, "-m", "epcy", "top", "--once", "--status-dir", busy.folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        for text in ("rank", "us", "GB/s", "imbalance", "waits", "hottest experts"):
            assert text in lines[0]
        assert [line.split()[0] for line in lines[1:]] == [f"{r}/{comm.size}" for r in range(comm.size)]
    comm.Barrier()


@PAGES
def test_a_buffer_that_counts_nothing(comm, make_buffer, same, tmp_path):
    folder = same(str(tmp_path / "pages"))
    make_buffer(status_dir=folder, stats=False).barrier()
    comm.Barrier()
    found = top.lines(status.read_all(folder))
    assert len(found) == comm.size and all(one.us is None and not one.hottest for one in found)
    comm.Barrier()


def test_without_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(epcy.BackendUnavailableError, match=r"pip install 'epcy\[top\]'"):
        top.show(once=True)


def test_metrics(comm, make_buffer):
    client = pytest.importorskip("prometheus_client")
    buf = make_buffer()
    x, idx, weights = mine(buf, draw(3, comm.size, 8, num_experts=E * comm.size))
    r = buf.dispatch(x, idx, weights)
    buf.combine(r.recv_x, r.handle)
    settle(buf)
    registry = client.CollectorRegistry()
    epcy.metrics.register(registry)
    text = client.generate_latest(registry).decode()
    s = buf.stats()
    ours = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            ours[name] = float(value)
    number = max(int(name.split('buffer="')[1].split('"')[0]) for name in ours)
    label = f'backend="{buf.backend}",buffer="{number}"'
    assert ours[f'epcy_calls_total{{{label},rank="{comm.rank}"}}'] == 2
    for peer, count in enumerate(s.tokens_to_rank):
        assert ours[f'epcy_tokens_sent_total{{{label},peer="{peer}",rank="{comm.rank}"}}'] == count
    kernel = f'epcy_kernel_seconds_count{{{label},kernel="dispatch",rank="{comm.rank}"}}'
    assert ours[kernel] == 1
    server, thread = epcy.metrics.serve(0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as reply:
            assert b"epcy_calls_total" in reply.read()
    finally:
        server.shutdown()
        thread.join()


def test_without_prometheus(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(epcy.BackendUnavailableError, match=r"pip install 'epcy\[metrics\]'"):
        epcy.metrics.register()
