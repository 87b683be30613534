"""Calls that do not fit: bad ids, too many tokens, ranks that disagree; and shapes that change, and equal bits."""

import time

import numpy as np
import pytest

import epcy
from mpi.cases import (
    assert_bits,
    check_combine,
    check_dispatch,
    draw,
    mine,
    raised,
    to_device,
    to_expert_0,
    told,
    works,
)


@pytest.mark.parametrize("value", ["E", -2, 2**40, -(2**63)])
@pytest.mark.parametrize("culprit", [0, -1])
def test_bad_id(comm, make_buffer, value, culprit):
    buf = make_buffer()
    culprit %= comm.size
    value = 4 * comm.size if value == "E" else value
    idx = np.zeros((5, 2), np.int64)
    if comm.rank == culprit:
        idx[3, 1], idx[4, 0] = value, value
    x, idx = to_expert_0(buf, 5)[0], to_device(buf, idx)
    for layout in ("rank", "expert"):
        error = raised(lambda: buf.dispatch(x, idx, layout=layout))  # noqa: B023
        assert isinstance(error, epcy.ArgumentError if comm.rank == culprit else epcy.PeerError)
        for text in (f"rank {culprit}", "token 3", "lane 1", str(value), "topk_idx", str(4 * comm.size - 1)):
            assert text in str(error), error
        texts = comm.allgather(str(error))
        assert all(texts[culprit] in text for text in texts)
        if comm.rank != culprit:
            assert error.ranks == (culprit,)
    works(buf)


@pytest.mark.parametrize("kind", ["floats", "K"])
def test_ids_of_a_wrong_kind(comm, make_buffer, kind):
    buf = make_buffer()
    idx = np.zeros((5, 2), np.float64) if kind == "floats" else np.zeros((5, 3), np.int64)
    x, good = to_expert_0(buf, 5)
    error = raised(lambda: buf.dispatch(x, to_device(buf, idx) if comm.rank == 0 else good))
    assert isinstance(error, epcy.ArgumentError if comm.rank == 0 else epcy.PeerError)
    for text in ("topk_idx", *(("float64", "int64") if kind == "floats" else ("(5, 2)", "(5, 3)"))):
        assert text in str(error)
    works(buf)


def test_too_many_tokens(comm, make_buffer):
    buf = make_buffer(num_max_tokens_per_rank=8)
    x, idx = to_expert_0(buf, 9 if comm.rank == 0 else 8)
    start = time.monotonic()
    error = raised(lambda: buf.dispatch(x, idx))
    assert time.monotonic() - start < 2
    assert isinstance(error, epcy.CapacityError if comm.rank == 0 else epcy.PeerError)
    for text in ("9 tokens", "num_max_tokens_per_rank=8"):
        assert text in str(error)
    works(buf)


@pytest.mark.parametrize(
    "name, values",
    [("num_max_tokens_per_rank", (16, 32)), ("hidden", (512, 1024)), ("dtype", ("bfloat16", "float32"))]
    + [("num_experts", (1, 2)), ("num_topk", (2, 3))],
)
def test_options_differ(comm, backend, name, values):
    if comm.size == 1:
        pytest.skip("two ranks")
    values = [value * comm.size for value in values] if name == "num_experts" else list(values)
    options = {"num_max_tokens_per_rank": 16, "hidden": 512, "num_experts": 4 * comm.size, "num_topk": 2}
    options[name] = values[1 if comm.rank == comm.size - 1 else 0]
    error = raised(lambda: epcy.Buffer(comm, backend=backend, **options))
    assert isinstance(error, epcy.MismatchError) and isinstance(error, ValueError)
    for text in (name, f"rank 0: {values[0]!r}", f"rank {comm.size - 1}: {values[1]!r}"):
        assert text in str(error)
    assert len(set(comm.allgather(str(error)))) == 1


def test_combine_meets_dispatch(comm, make_buffer):
    if comm.size == 1:
        pytest.skip("two ranks")
    buf = make_buffer(timeout=5)
    x, idx = to_expert_0(buf, 4)
    r = buf.dispatch(x, idx)
    y = r.recv_x.copy()
    error = raised(lambda: buf.combine(y, r.handle) if comm.rank == 0 else buf.dispatch(x, idx))
    error = error or raised(buf.check)  # a combine on a GPU does not wait
    assert isinstance(error, epcy.MismatchError)
    for text in ("operation", "rank 0: in combine", "rank 1: in dispatch"):
        assert text in str(error)
    assert len(set(comm.allgather(str(error)))) == 1
    works(buf)


@pytest.mark.parametrize(
    "what", ["layout", "expert_alignment", "x.dtype", "topk_weights", "handle", "operation"]
)
def test_calls_differ(comm, make_buffer, what):
    if comm.size == 1:
        pytest.skip("two ranks")
    buf = make_buffer(timeout=5)
    (x, idx), weights = to_expert_0(buf, 4), buf.xp.zeros((4, 2), np.float32)
    r = buf.dispatch(x, idx)
    other = comm.rank == comm.size - 1
    calls = {
        "layout": lambda: buf.dispatch(x, idx, layout="expert" if other else "rank"),
        "expert_alignment": lambda: buf.dispatch(x, idx, layout="expert", expert_alignment=8 if other else 4),
        "x.dtype": lambda: buf.dispatch(x.astype(np.float16) if other else x, idx),
        "topk_weights": lambda: buf.dispatch(x, idx, weights if other else None),
        "handle": lambda: buf.dispatch(x, handle=r.handle) if other else buf.dispatch(x, idx),
        "operation": lambda: buf.barrier() if other else buf.dispatch(x, idx),
    }
    error = told(buf, calls[what])
    assert isinstance(error, epcy.MismatchError) and what in str(error), error
    assert f"rank {comm.size - 1}: " in str(error)
    works(buf)


def test_unequal_tokens_simply_work(comm, make_buffer):
    buf = make_buffer(num_max_tokens_per_rank=128)
    sent = draw(
        7, comm.size, [1 if rank == 0 else 128 for rank in range(comm.size)], num_experts=4 * comm.size
    )
    r, routing = check_dispatch(buf, sent)
    check_combine(buf, r.handle, routing, 7)


def test_shapes_change(comm, make_buffer):
    shapes = [(16, 2048, 8), (4, 4096, 16), (16, 512, 4)]
    for turn in range(20):
        most, hidden, experts = shapes[turn % 3]
        buf = make_buffer(num_max_tokens_per_rank=most, hidden=hidden, num_experts=experts * comm.size)
        full = draw(turn, comm.size, most, num_experts=experts * comm.size, hidden=hidden)
        x, idx, _ = mine(buf, full)
        for _ in range(2):  # both receive areas hold 0xFF before
            buf.dispatch(x, idx).recv_x.view(np.uint8)[...] = 0xFF
        r = buf.dispatch(x, idx)
        y = buf.combine_input(r.handle)
        y.view(np.uint8)[...] = 0xFF
        buf.combine(y, r.handle)
        sent = draw(turn + 50, comm.size, most - turn % 2, num_experts=experts * comm.size, hidden=hidden)
        r, routing = check_dispatch(buf, sent, layout=("rank", "expert")[turn % 2])
        check_combine(buf, r.handle, routing, turn)
        buf.free()


def test_the_same_bits_every_time(comm, make_buffer):
    buf = make_buffer(hidden=64, num_topk=4)
    sent = draw(16, comm.size, 16, num_experts=4 * comm.size, num_topk=4, hidden=64)
    x, idx, weights = mine(buf, sent)
    first = None
    for _ in range(100):
        r = buf.dispatch(x, idx, weights, out=True)
        c = buf.combine(r.recv_x, r.handle, r.recv_topk_weights)
        results = (r.recv_x, r.recv_topk_idx, r.recv_topk_weights, c.combined_x, c.combined_topk_weights)
        first = first or results
        assert_bits(results, first, "run")
