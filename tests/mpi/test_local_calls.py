"""get_dispatch_layout, events, barrier, warmup and preinitialize, status pages, EPCY_* variables."""

import os
import resource
import stat
import time

import numpy as np
import pytest

import epcy
from epcy import reference, status
from mpi.cases import (
    DTYPES,
    assert_bits,
    check_combine,
    check_dispatch,
    draw,
    mine,
    raised,
    to_device,
    to_host,
)


@pytest.mark.parametrize("ids", [np.int64, np.int32])
def test_get_dispatch_layout(comm, make_buffer, ids):
    buf = make_buffer(num_topk=4)
    for seed, num_tokens in enumerate((0, 1, 16, 300)):  # a local count: any T will do
        size = {"num_experts": 4 * comm.size, "num_topk": 4, "hidden": 8}
        idx = draw(seed, comm.size, num_tokens, ids=ids, **size).idxs[comm.rank]
        got = buf.get_dispatch_layout(to_device(buf, idx))
        want = reference.get_dispatch_layout(idx, num_ranks=comm.size, num_experts=4 * comm.size)
        names = ("num_tokens_per_rank", "num_tokens_per_node", "num_tokens_per_expert", "is_token_in_rank")
        for name, one, other in zip(names, got, want, strict=True):
            assert_bits(one, other, name)
        assert to_host(got[1]).shape == (buf.topology.num_nodes,)


def test_layout_agrees_with_dispatch(comm, make_buffer):
    buf = make_buffer()
    sent = draw(1, comm.size, 9, num_experts=4 * comm.size)
    per_rank, _, per_expert, _ = buf.get_dispatch_layout(mine(buf, sent)[1])
    r, _ = check_dispatch(buf, sent)
    assert sum(comm.alltoall(to_host(per_rank).tolist())) == len(r.recv_x)
    total = np.sum(comm.allgather(to_host(per_expert)), 0).reshape(comm.size, -1)[comm.rank]
    assert total.tolist() == r.num_recv_tokens_per_expert


def test_events(comm, make_buffer):
    buf = make_buffer()
    sent = draw(1, comm.size, 9, num_experts=4 * comm.size)
    x, idx, _ = mine(buf, sent)
    event = buf.capture()
    assert isinstance(event, epcy.Event) and epcy.EventOverlap is epcy.Event
    r = buf.dispatch(x, idx, previous_event=event, async_finish=True)
    r.event.current_stream_wait()
    c = buf.combine(r.recv_x, r.handle, previous_event=r.event, async_finish=True)
    c.event.synchronize()
    assert c.event.query() is True and "Event" in repr(c.event)


def test_barrier_waits(comm, make_buffer):
    buf = make_buffer()
    for late in range(min(2, comm.size)):
        buf.barrier()
        start = time.monotonic()
        if comm.rank == late:
            time.sleep(0.2)
        buf.barrier()
        assert time.monotonic() - start > 0.15


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_warmup(comm, make_buffer, dtype):
    for buf in (make_buffer(dtype=dtype, preinitialize=True), make_buffer(dtype=dtype)):
        sent = draw(1, comm.size, 9, num_experts=4 * comm.size, dtype=dtype)
        before, routing = check_dispatch(buf, sent)
        check_combine(buf, before.handle, routing, 1, dtype=dtype)
        buf.warmup()
        r, routing = check_dispatch(buf, sent)
        check_combine(buf, r.handle, routing, 1, dtype=dtype)
        check_combine(buf, before.handle, routing, 2, dtype=dtype)


@pytest.mark.parametrize("hidden", [8, 24, 136])
def test_warmup_of_rows_that_have_no_fp8(comm, make_buffer, hidden):
    """A row of e4m3 bytes must be a multiple of 16 bytes; one of bfloat16 may be where that is not."""
    buf = make_buffer(hidden=hidden, low_latency_mode=True, preinitialize=True)
    sent = draw(1, comm.size, 9, num_experts=4 * comm.size, hidden=hidden)
    r, routing = check_dispatch(buf, sent)
    check_combine(buf, r.handle, routing, 1)


def test_warmup_keeps_areas_that_are_given_out(comm, make_buffer):
    buf = make_buffer()
    sent = draw(1, comm.size, 9, num_experts=4 * comm.size)
    r, routing = check_dispatch(buf, sent)
    y = buf.combine_input(r.handle)
    y.fill(3)
    buf.warmup()
    assert (to_host(y).astype(np.float32) == 3).all()


@pytest.mark.host_only("pages of this process")
def test_no_new_page_after_warmup(comm, make_buffer):
    """The first call of each kind finds every page that a balanced load takes, this rank's and the other ranks'."""
    sizes = {"num_max_tokens_per_rank": 64, "hidden": 2048, "num_experts": 8 * comm.size, "num_topk": 4}
    buf = make_buffer(low_latency_mode=True, preinitialize=True, **sizes)
    # Expert e of all gets equally many tokens of every rank.
    idx = (np.arange(64)[:, None] + np.arange(4) * 2 * comm.size) % (8 * comm.size)
    x, weights = np.ones((64, 2048), DTYPES["bfloat16"]), np.ones((64, 4), np.float32)
    x8 = np.ones((64, 2048), np.uint8), np.ones((64, 16), np.float32)
    out = np.ones((64, 2048), DTYPES["bfloat16"])

    def high_throughput(layout):
        r = buf.dispatch(x, idx, weights, layout=layout)
        y = buf.combine_input(r.handle)
        y[...] = r.recv_x
        buf.combine(y, r.handle, weights if layout == "expert" else None, out=out)

    def low_latency(use_fp8, reduction):
        recv_x, counts, handle, _, _ = buf.low_latency_dispatch(x, idx, weights, use_fp8=use_fp8)
        y = buf.low_latency_combine_input(handle)
        for expert, count in enumerate(counts):
            y[expert, :count] = 1
        buf.low_latency_combine(y, None, None, handle, zero_copy=True, reduction=reduction, out=out)

    for kind in (
        lambda: high_throughput("rank"),
        lambda: high_throughput("expert"),
        lambda: buf.dispatch(x8, idx),
        lambda: low_latency(True, "rank"),
        lambda: low_latency(False, "source"),
    ):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        kind()
        new = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert new < 30, new  # Python's own; without warmup() it is hundreds
        comm.Barrier()


# ---- status pages

PAGES = pytest.mark.host_only("the host backend's status pages")


@PAGES
def test_status_page(comm, make_buffer, same, tmp_path):
    folder = same(str(tmp_path / "pages"))
    buf = make_buffer(status_dir=folder)
    comm.Barrier()
    info = os.stat(folder)
    assert stat.S_IMODE(info.st_mode) == 0o700 and info.st_uid == os.getuid()
    pages = [name for name in os.listdir(folder) if name.startswith(f"{os.getpid()}-")]
    assert len(pages) == 1 and stat.S_IMODE(os.stat(f"{folder}/{pages[0]}").st_mode) == 0o600
    sent = draw(1, comm.size, 9, num_experts=4 * comm.size)
    r, routing = check_dispatch(buf, sent)
    check_combine(buf, r.handle, routing, 1)
    buf.barrier()
    comm.Barrier()
    found = sorted(status.read_all(folder), key=lambda one: one.rank)
    assert [one.rank for one in found] == list(range(comm.size))
    mine = found[comm.rank]
    assert (mine.pid, mine.size, mine.phase, mine.epoch) == (os.getpid(), comm.size, "idle", 3)
    assert mine.num_calls["dispatch"] == mine.num_calls["combine"] == mine.num_calls["barrier"] == 1
    assert 0 <= mine.age < 30 and "outside of epcy" in str(mine)
    comm.Barrier()
    buf.free()
    comm.Barrier()
    assert os.listdir(folder) == []


@PAGES
def test_status_page_tells_where_a_rank_waits(comm, make_buffer, same, tmp_path):
    if comm.size == 1:
        pytest.skip("two ranks")
    folder = same(str(tmp_path / "pages"))
    buf = make_buffer(status_dir=folder)
    comm.Barrier()
    if comm.rank == 0:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            waiting = [one for one in status.read_all(folder) if one.operation == "barrier"]
            if len(waiting) == comm.size - 1:
                break
            time.sleep(0.01)
        assert {(one.operation, one.phase, one.epoch) for one in waiting} == {("barrier", "arrival", 1)}
        assert "in barrier (call 1), phase arrival" in str(waiting[0])
    buf.barrier()


@PAGES
def test_no_status_page(comm, make_buffer, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    make_buffer(status_dir="").barrier()
    assert os.listdir(tmp_path) == []
    make_buffer().barrier()
    assert os.listdir(tmp_path) == [f"epcy-{os.getuid()}"]


# ---- variables


def test_variables(comm, make_buffer, monkeypatch, tmp_path):
    for name, value in (("TIMEOUT", "12.5"), ("NUM_SMS", "2"), ("SPIN_US", "0"), ("PREINITIALIZE", "yes")):
        monkeypatch.setenv(f"EPCY_{name}", value)
    monkeypatch.setenv("EPCY_STATUS_DIR", str(tmp_path / "mine"))
    monkeypatch.setenv("EPCY_NUM_MAX_RECV_TOKENS", "333")
    buf = make_buffer(num_sms=1)
    got = {name: buf.options[name] for name in ("timeout", "spin_us", "preinitialize", "num_max_recv_tokens")}
    assert got == {"timeout": 12.5, "spin_us": 0.0, "preinitialize": True, "num_max_recv_tokens": 333}
    assert buf.num_sms == (1 if buf.backend == "host" else comm.size)  # a block a peer
    if buf.backend == "host":
        assert len(os.listdir(tmp_path / "mine")) == 1
    sent = draw(1, comm.size, 9, num_experts=4 * comm.size)
    check_dispatch(buf, sent)


def test_wrong_variable_on_one_rank(comm, make_buffer, monkeypatch):
    if comm.rank == 0:
        monkeypatch.setenv("EPCY_NUM_SMS", "two")
    error = raised(make_buffer)
    assert type(error) is (epcy.ArgumentError if comm.rank == 0 else epcy.PeerError)
    assert "EPCY_NUM_SMS" in str(error) and "'two'" in str(error)
