"""buf.stats(): tokens, experts, waits, high-water marks and times are those of the calls that were made."""

import json
import time

import numpy as np
import pytest

import epcy
from epcy.stats import SPANS, imbalance
from mpi.cases import draw, mine, to_device

E = 4  # experts of a rank


def tokens_between(sent, size, lanes=False):
    """(R, R) tokens from each rank to each; `lanes`: one for each expert that a token names."""
    found = np.zeros((size, size), np.int64)
    for source, idx in enumerate(sent.idxs):
        for ids in idx:
            experts = {int(e) for e in ids if e >= 0}
            for e in experts if lanes else {e // E * E for e in experts}:
                found[source, e // E] += 1
    return found


def per_expert(sent, rank, distinct=False):
    counts = np.zeros(E, np.int64)
    for idx in sent.idxs:
        for ids in idx:
            for e in set(ids.tolist()) if distinct else ids.tolist():
                if e >= 0 and e // E == rank:
                    counts[e % E] += 1
    return counts


def roundtrip(buf, sent, **options):
    x, idx, weights = mine(buf, sent)
    r = buf.dispatch(x, idx, weights, **options)
    buf.combine(r.recv_x, r.handle).event.synchronize()  # a GPU's calls count when they end
    return r


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_tokens(comm, make_buffer, layout):
    buf = make_buffer(num_topk=3)
    sent = draw(3, comm.size, [5 + r for r in range(comm.size)], num_experts=E * comm.size, num_topk=3)
    for _ in range(3):
        r = roundtrip(buf, sent, layout=layout)
    x, _, weights = mine(buf, sent)
    buf.dispatch(x, None, weights, handle=r.handle).event.synchronize()
    between = 4 * tokens_between(sent, comm.size)
    s = buf.stats()
    assert s.tokens_to_rank == tuple(between[comm.rank])
    assert s.tokens_from_rank == tuple(between[:, comm.rank])
    assert s.tokens_per_expert == tuple(4 * per_expert(sent, comm.rank))
    assert s.num_tokens_sent == between[comm.rank].sum() and s.num_calls == 7
    assert s.imbalance == pytest.approx(imbalance(s.tokens_per_expert))
    away = between[comm.rank].sum() - between[comm.rank, comm.rank]
    back = (between[:, comm.rank].sum() - between[comm.rank, comm.rank]) // 4 * 3
    assert s.bytes_moved == (away + back) * 512 * 2
    assert s.kernels["dispatch"].count == 4 and s.kernels["combine"].count == 3


def test_low_latency_tokens(comm, make_buffer):
    buf = make_buffer(num_topk=3, low_latency_mode=True)
    sent = draw(4, comm.size, [3 + r for r in range(comm.size)], num_experts=E * comm.size, num_topk=3)
    x, idx, weights = mine(buf, sent)
    for hooks in (False, True):
        recv_x, _, handle, _, hook = buf.low_latency_dispatch(x, idx, use_fp8=False, return_recv_hook=hooks)
        if hooks:
            hook()
        _, _, hook = buf.low_latency_combine(recv_x, None, weights, handle, return_recv_hook=hooks)
        if hooks:
            hook()
    buf.capture().synchronize()
    between = 2 * tokens_between(sent, comm.size, lanes=True)
    s = buf.stats()
    assert s.tokens_to_rank == tuple(between[comm.rank])
    assert s.tokens_from_rank == tuple(between[:, comm.rank])
    assert s.tokens_per_expert == tuple(2 * per_expert(sent, comm.rank, distinct=True))
    # a call with a hook is two: what it sends, what it receives
    assert s.kernels["low_latency_dispatch"].count == 3 and s.kernels["low_latency_dispatch.send"].count == 2
    assert 0 < s.heap["low_latency"].high_water_bytes <= s.heap["low_latency"].num_bytes


def test_high_water(comm, make_buffer):
    buf = make_buffer(num_max_recv_tokens=16 * comm.size)
    assert buf.stats().heap["receive"].high_water_bytes == 0
    sent = draw(5, comm.size, 16, num_experts=E * comm.size, unused=0.0)
    few = draw(6, comm.size, 1, num_experts=E * comm.size, unused=0.0)
    filled = []
    for one in (few, sent, few, few):
        roundtrip(buf, one)
        filled.append(buf.stats().heap["receive"].high_water_bytes)
    assert filled == sorted(filled) and filled[2] == filled[3]
    heap = buf.stats().heap
    layout = epcy.Buffer.size_hint(
        comm.size, num_max_tokens_per_rank=16, hidden=512, num_experts=E * comm.size, num_topk=2,
        num_max_recv_tokens=16 * comm.size,
    )  # fmt: skip
    assert {name: heap[name].num_bytes for name in ("receive", "combine")} == {
        name: layout[name] for name in ("receive", "combine")
    }
    assert 0 < heap["receive"].fullness <= 1
    buf.combine_input(roundtrip(buf, sent).handle)
    assert buf.stats().heap["combine"].high_water_bytes > 0


def test_reset(comm, make_buffer):
    buf = make_buffer()
    sent = draw(7, comm.size, 4, num_experts=E * comm.size)
    roundtrip(buf, sent)
    before = buf.stats(reset=True)
    assert before.num_calls == 2
    s = buf.stats()
    assert (s.num_calls, s.num_tokens_sent, s.bytes_moved, sum(s.tokens_per_expert)) == (0, 0, 0, 0)
    assert not s.kernels and s.heap["receive"].high_water_bytes == 0 and s.seconds <= before.seconds + 5
    roundtrip(buf, sent)
    again = buf.stats()
    assert again.tokens_to_rank == before.tokens_to_rank
    assert again.tokens_per_expert == before.tokens_per_expert


def test_waits_are_those_for_the_late_rank(comm, make_buffer):
    if comm.size == 1:
        pytest.skip("two ranks")
    buf = make_buffer()
    sent = draw(8, comm.size, 4, num_experts=E * comm.size)
    roundtrip(buf, sent)
    buf.barrier()
    buf.stats(reset=True)
    late = comm.size - 1
    if comm.rank == late:
        time.sleep(0.3)
    roundtrip(buf, sent)
    s = buf.stats()
    if comm.rank != late:
        assert s.wait_us_per_peer[late] > 2e5, s
        assert s.wait_us_per_peer[late] == max(s.wait_us_per_peer)
        assert s.wait_us == pytest.approx(sum(s.wait_us_per_peer))
        assert 0.5 < s.wait_share <= 1


def test_times(comm, make_buffer):
    buf = make_buffer()
    sent = draw(9, comm.size, 8, num_experts=E * comm.size)
    start = time.perf_counter()
    for _ in range(20):
        roundtrip(buf, sent)
    elapsed_us = (time.perf_counter() - start) * 1e6
    s = buf.stats()
    for name, d in s.kernels.items():
        operation, _, phase = name.partition(".")
        assert operation in ("dispatch", "combine") and (phase == "" or phase in SPANS)
        assert 0 <= d.min_us <= d.p50_us <= d.p95_us <= d.p99_us <= d.max_us <= elapsed_us, name
        assert d.min_us <= d.mean_us <= d.max_us and d.count == 20
    whole = s.kernels["dispatch"].mean_us + s.kernels["combine"].mean_us
    assert whole * 20 <= elapsed_us
    parts = sum(d.mean_us for name, d in s.kernels.items() if "." in name)
    assert parts <= whole * 1.001
    json.dumps(s.as_dict())
    assert "dispatch" in str(s) and "imbalance" in str(s)


def test_what_did_not_move_is_not_counted(comm, make_buffer):
    buf = make_buffer()
    sent = draw(10, comm.size, 4, num_experts=E * comm.size)
    x, idx, weights = mine(buf, sent)
    wrong = to_device(buf, np.full((4, 2), 10**6)) if comm.rank == 0 else idx
    with pytest.raises(epcy.ArgumentError if comm.rank == 0 else epcy.PeerError):
        buf.dispatch(x, wrong, weights)
    assert buf.stats().num_tokens_sent == 0
    roundtrip(buf, sent)
    assert buf.stats().tokens_to_rank == tuple(tokens_between(sent, comm.size)[comm.rank])


def test_without_stats(comm, make_buffer):
    buf = make_buffer(stats=False, low_latency_mode=True)
    sent = draw(11, comm.size, 4, num_experts=E * comm.size)
    roundtrip(buf, sent)
    buf.warmup()
    with pytest.raises(epcy.StateError, match="stats: .*counts nothing.*stats=True"):
        buf.stats()


def test_after_free(comm, backend):
    buf = epcy.Buffer(
        comm, num_max_tokens_per_rank=4, hidden=512, num_experts=comm.size, num_topk=1, backend=backend
    )
    buf.free()
    with pytest.raises(epcy.StateError, match="stats: this Buffer was freed"):
        buf.stats()
