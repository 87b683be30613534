"""epcy.trace: one file of all ranks that the trace-event format's readers take; clocks, flows, what is cut off."""

import json
import time

import numpy as np
import pytest

import epcy
from epcy import clocks, ranges, timeline
from mpi import trace_format
from mpi.cases import draw, mine, raised

E = 4


def shares_gpu(comm, backend):
    """Whether there are more ranks than GPUs."""
    if backend != "nvshmem":
        return False
    import cupy

    return cupy.cuda.runtime.getDeviceCount() < comm.size


@pytest.fixture
def check(comm, backend):
    """A function `check(path)` that reads a trace and fails where it is none."""
    return lambda path: trace_format.check(path, shares_gpu(comm, backend))


def work(buf, comm, rounds=3):
    sent = draw(3, comm.size, 8, num_experts=E * comm.size)
    x, idx, weights = mine(buf, sent)
    for _ in range(rounds):
        r = buf.dispatch(x, idx, weights)
        buf.combine(r.recv_x, r.handle)
    return sent


def arrows(content):
    """(sender, receiver) of each flow, by its id."""
    ends = {}
    for event in content["traceEvents"]:
        if event["ph"] in "sf":
            ends.setdefault(event["id"], {})[event["ph"]] = event["pid"]
    return sorted((one["s"], one["f"]) for one in ends.values())


def test_timeline(comm, check, make_buffer, same, tmp_path):
    path = same(str(tmp_path / "run.json"))
    buf = make_buffer()
    with epcy.trace(path, comm):
        sent = work(buf, comm)
    content = check(path)
    slices = [event for event in content["traceEvents"] if event["ph"] == "X"]
    for rank in range(comm.size):
        calls = [s["name"] for s in slices if s["pid"] == rank and s["cat"] == "call"]
        assert calls == ["dispatch", "combine"] * 3
        phases = {s["name"] for s in slices if s["pid"] == rank and s["cat"] == "phase"}
        assert phases >= {"send", "wait"} and phases <= {
            "count",
            "exchange",
            "send",
            "wait",
            "fan_out",
            "reduce",
        }
    meta = content["otherData"]
    assert meta["num_ranks"] == comm.size and meta["num_dropped_slices"] == 0
    assert (meta["clock_error_us"] > 0) == (comm.size > 1)
    pairs = set()
    for source, idx in enumerate(sent.idxs):
        pairs |= {(source, int(e) // E) for e in idx.reshape(-1) if e >= 0 and int(e) // E != source}
    expected = [pair for pair in pairs for _ in range(3)] + [pair[::-1] for pair in pairs for _ in range(3)]
    assert arrows(content) == sorted(expected)


def test_low_latency(comm, check, make_buffer, same, tmp_path):
    path = same(str(tmp_path / "run.json"))
    buf = make_buffer(low_latency_mode=True)
    sent = draw(3, comm.size, 8, num_experts=E * comm.size)
    x, idx, weights = mine(buf, sent)
    with epcy.trace(path, comm):
        for hooks in (False, True):
            recv_x, _, handle, _, hook = buf.low_latency_dispatch(
                x, idx, weights, use_fp8=False, return_recv_hook=hooks
            )
            if hooks:
                hook()
            buf.low_latency_combine(recv_x, None, None, handle)
    content = check(path)
    to = [{int(e) // E for e in idx.reshape(-1) if e >= 0} - {rank} for rank, idx in enumerate(sent.idxs)]
    assert len(arrows(content)) == 4 * sum(map(len, to))


def test_buffers_of_parts_and_those_made_meanwhile(comm, check, make_buffer, subcomm, same, tmp_path):
    path = same(str(tmp_path / "run.json"))
    part = subcomm((comm.size + 1) // 2)
    with epcy.trace(path, comm):
        if part:
            with epcy.Buffer(
                part, num_max_tokens_per_rank=8, hidden=512, num_experts=E * part.size, num_topk=2,
                backend=make_buffer().backend if part.size == comm.size else "host",
            ) as buf:  # fmt: skip
                work(buf, part, 1)
    content = check(path)
    busy = {event["pid"] for event in content["traceEvents"] if event["ph"] == "X"}
    assert busy == set(range((comm.size + 1) // 2))


def test_what_the_ring_has_lost(comm, check, make_buffer, same, tmp_path):
    path = same(str(tmp_path / "run.json"))
    buf = make_buffer()
    with epcy.trace(path, comm, num_events=32):
        work(buf, comm, 20)
    content = check(path)
    assert content["otherData"]["num_dropped_slices"] > 0
    work(buf, comm, 1)


def test_an_exception_waits_for_nobody(comm, check, make_buffer, same, tmp_path):
    folder = same(str(tmp_path))
    buf = make_buffer()
    with pytest.raises(KeyError), epcy.trace(f"{folder}/run.json", comm):
        work(buf, comm, 1)
        if comm.rank == comm.size - 1:
            time.sleep(0.1)
        raise KeyError("mine")
    check(f"{folder}/run.json.rank{comm.rank}")
    comm.Barrier()
    assert not (tmp_path / "run.json").exists()


def test_a_rank_that_leaves_alone(comm, check, make_buffer, same, tmp_path):
    """One rank raises, the others wait for it no longer than `timeout`; all of them leave their parts."""
    if comm.size == 1:
        pytest.skip("two ranks")
    folder, last = same(str(tmp_path)), comm.size - 1
    buf = make_buffer()

    def job():
        with epcy.trace(f"{folder}/run.json", comm, timeout=1):
            work(buf, comm, 1)
            if comm.rank == last:
                raise KeyError("mine")

    error = raised(job)
    assert isinstance(error, KeyError if comm.rank == last else epcy.PeerTimeoutError)
    assert comm.rank == last or str(error).startswith("timeout: the end of epcy.trace did not end within 1 s")
    check(f"{folder}/run.json.rank{comm.rank}")
    comm.Barrier()


def test_no_memory_on_one_rank(comm, check, make_buffer, same, tmp_path, monkeypatch):
    """At the end of the block everybody hears of it; the next trace works."""
    buf, path = make_buffer(), same(tmp_path / "trace.json")

    def refuse(meter):
        raise MemoryError("none left")

    start = time.monotonic()
    with monkeypatch.context() as patch, pytest.raises(epcy.EpcyError, match="none left") as caught:
        with epcy.trace(path, comm):
            buf.barrier()
            if comm.rank == comm.size - 1:
                patch.setattr(timeline, "_buffer_part", refuse)
    assert time.monotonic() - start < 5
    mine = comm.rank == comm.size - 1
    assert type(caught.value) is (epcy.HeapError if mine else epcy.PeerError), repr(caught.value)
    with epcy.trace(path, comm):
        buf.barrier()


def test_a_path_that_cannot_be_written(comm, make_buffer):
    buf = make_buffer()
    with pytest.raises(epcy.ArgumentError, match="path: rank 0 could not write '/nowhere/run.json'"):
        with epcy.trace("/nowhere/run.json", comm):
            work(buf, comm, 1)
    buf.barrier()


def test_a_trace_is_entered_once(comm, same, tmp_path):
    once = epcy.trace(same(str(tmp_path / "run.json")), comm)
    with once:
        errors = [raised(once.__enter__)]
    errors.append(raised(once.__enter__))  # when it has ended, too
    for error in errors:
        assert isinstance(error, epcy.StateError) and f"entered before (rank {comm.rank})" in str(error)
    comm.Barrier()


def test_arguments(comm, tmp_path):
    with pytest.raises(epcy.ArgumentError, match="num_events: expected a positive"):
        epcy.trace(tmp_path / "x", comm, num_events=0)


def test_clocks(comm):
    found = clocks.compare(comm)
    assert len(found) == comm.size and found[0].ahead_ns == found[0].error_ns == 0
    assert comm.allgather(found) == [found] * comm.size
    for one in found:  # the ranks of one machine have one clock
        assert abs(one.ahead_ns) <= one.error_ns < 10**8


def test_clocks_that_differ_are_brought_together():
    """Two ranks whose clocks differ by 1 s and drift by 1 in 10^5: the same moment is the same in the file."""
    first = [clocks.ClockOffset(0, 0, 0), clocks.ClockOffset(0, 10**9, 100)]
    last = [clocks.ClockOffset(10**9, 0, 0), clocks.ClockOffset(10**9, 10**9 + 10**4, 200)]
    events = {0: [(500, 900, 1, "dispatch")], 1: [(10**9 + 500, 10**9 + 900, 1, "dispatch")]}
    parts = [
        {"rank": r, "start_ns": 0, "buffers": [{"group": (0, 1), "number": 0, "rank": r, "backend": "host",
                                                "events": events[r], "dropped": 0, "flows": []}]}
        for r in (0, 1)
    ]  # fmt: skip
    content = timeline.assemble(parts, first, last)
    starts = [event["ts"] for event in content["traceEvents"] if event["ph"] == "X"]
    assert np.ptp(starts) < 0.2
    assert content["otherData"]["clock_error_us"] == pytest.approx(0.2)
    late = clocks.Aligned(first[1], last[1])
    assert late(10**9 + 10**9 + 10**4) == pytest.approx(10**9, abs=2)
    json.dumps(content)


class FakeDomain:
    """NVTX's domain as epcy uses it."""

    def __init__(self):
        self.open, self.seen = [], []

    def get_event_attributes(self, message):
        return message

    def push_range(self, message):
        self.open.append(message)
        self.seen.append(message)

    def pop_range(self):
        self.open.pop()


def test_ranges(comm, make_buffer, same, tmp_path, monkeypatch):
    """Inside of a trace calls are NVTX ranges, and they close when a call raises."""
    domain = FakeDomain()
    monkeypatch.setattr(ranges, "_domain", lambda: domain)
    buf = make_buffer()
    work(buf, comm, 1)
    with epcy.trace(same(str(tmp_path / "run.json")), comm):
        work(buf, comm, 1)
        with pytest.raises(epcy.ArgumentError):
            buf.dispatch(None, None)
        buf.barrier()
    work(buf, comm, 1)
    assert domain.seen == ["dispatch", "combine", "dispatch", "barrier"] and domain.open == []
