"""Whose memory a result lies in and how long it lives: areas in turn, out=, combine_input; input freed at once."""

import gc

import numpy as np
import pytest

import epcy
from epcy import reference
from mpi.cases import (
    BFLOAT16,
    address_of,
    assert_bits,
    check_combine,
    check_dispatch,
    counted_rows,
    draw,
    mine,
    raised,
    to_device,
    to_expert_0,
    to_host,
)


def test_a_result_lives_until_the_second_next_dispatch(comm, make_buffer):
    buf = make_buffer()
    sent = [draw(seed, comm.size, 6, num_experts=4 * comm.size) for seed in range(3)]
    first, routing = check_dispatch(buf, sent[0])
    kept = to_host(first.recv_x).copy()
    check_dispatch(buf, sent[1])
    assert_bits(first.recv_x, kept, "recv_x")
    check_combine(buf, first.handle, routing, 0)
    assert_bits(first.recv_x, kept, "recv_x")
    check_dispatch(buf, sent[2])
    for read in (
        lambda: first.recv_x,
        lambda: first.recv_topk_idx,
        lambda: first.recv_topk_weights,
        lambda: [*first],
    ):
        error = raised(read)
        assert isinstance(error, epcy.StateError)
        assert "recv_x" in str(error) and "out=True" in str(error)
    assert first.num_recv_tokens_per_expert and first.handle.layout == "rank"  # these are not in the area
    check_combine(buf, first.handle, routing, 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_out(comm, make_buffer, dtype, layout):
    buf = make_buffer()
    sent = draw(1, comm.size, 6, num_experts=4 * comm.size, dtype=dtype, special=True)
    most = 16 * comm.size
    arrays = buf.xp.zeros((most, 512), BFLOAT16)
    if dtype == "fp8":
        arrays = buf.xp.zeros((most, 512), np.uint8), buf.xp.zeros((most, 4), np.float32)
    own = []
    for out in (True, arrays):
        r, routing = check_dispatch(buf, sent, layout=layout, out=out)
        rows = r.recv_x if dtype == "fp8" else [r.recv_x]
        own.append((r, [to_host(a).copy() for a in (*rows, r.recv_topk_idx)]))
    for array, given in zip(rows, arrays if dtype == "fp8" else [arrays], strict=True):
        assert array.base is given
    for seed in range(3):
        check_dispatch(buf, draw(seed, comm.size, 6, num_experts=4 * comm.size, dtype=dtype))
    for r, kept in own:
        now = [*(r.recv_x if dtype == "fp8" else [r.recv_x]), r.recv_topk_idx]
        for array, before in zip(now, kept, strict=True):
            assert_bits(array, before, "own array")
    buf.free()
    assert own[0][0].recv_x is not None


def test_combine_out(comm, make_buffer):
    buf = make_buffer()
    sent = draw(1, comm.size, 6, num_experts=4 * comm.size)
    r, routing = check_dispatch(buf, sent)
    out = to_device(buf, np.full((6, 512), np.nan, BFLOAT16))
    assert check_combine(buf, r.handle, routing, 1, out=out).combined_x is out
    out = to_device(buf, np.full((6, 512), np.nan, np.float16))
    check_combine(buf, r.handle, routing, 1, dtype="float16", out=out)


def test_two_combine_areas(comm, make_buffer):
    buf = make_buffer()
    sent = draw(1, comm.size, 6, num_experts=4 * comm.size)
    r, routing = check_dispatch(buf, sent)
    first, second = buf.combine_input(r.handle), buf.combine_input(r.handle)
    assert first.shape == second.shape == r.recv_x.shape and first.dtype == BFLOAT16
    first[...], second[...] = r.recv_x, to_device(buf, 2 * to_host(r.recv_x))
    if len(first):
        assert address_of(first) != address_of(second)
    error = raised(lambda: buf.combine_input(r.handle))
    assert isinstance(error, epcy.StateError) and "both combine areas" in str(error)
    # rows outside of the Buffer need an area too
    staged = r.recv_x.copy()
    error = raised(lambda: buf.combine(staged, r.handle))
    assert isinstance(error, epcy.StateError) and "both combine areas" in str(error)
    comm.Barrier()
    # recv_x itself needs none
    twice = to_host(buf.combine(second, r.handle).combined_x).astype(np.float32)
    once = to_host(buf.combine(first, r.handle).combined_x).astype(np.float32)
    in_place = to_host(buf.combine(r.recv_x, r.handle).combined_x).astype(np.float32)
    assert np.array_equal(once, in_place) and np.allclose(twice, 2 * once)
    for seed in range(4):
        check_combine(buf, r.handle, routing, seed, staged=seed % 2 == 0)


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_recv_x_as_y(comm, make_buffer, layout):
    buf = make_buffer()
    sent = draw(1, comm.size, 6, num_experts=4 * comm.size)
    r, routing = check_dispatch(buf, sent, layout=layout)
    received, _ = reference.dispatch(
        sent.xs, sent.idxs, sent.weights, num_experts=4 * comm.size, layout=layout
    )
    rows = [one.recv_x for one in received]
    want, want_weights = reference.combine(rows, routing, [one.recv_topk_weights for one in received]
                                           if layout == "rank" else sent.weights)[comm.rank]  # fmt: skip
    weights = r.recv_topk_weights if layout == "rank" else mine(buf, sent)[2]  # in the area where y lies
    c = buf.combine(r.recv_x, r.handle, weights)
    assert_bits(c.combined_x, want, "combined_x")
    if layout == "rank":
        assert_bits(c.combined_topk_weights, want_weights, "combined_topk_weights")


def test_part_of_a_larger_array_as_y(comm, make_buffer):
    """Rows that are not contiguous, inside of the Buffer's memory and outside."""
    buf = make_buffer()
    sent = draw(3, comm.size, 6, num_experts=4 * comm.size)
    r, routing = check_dispatch(buf, sent)
    want = to_host(buf.combine(r.recv_x, r.handle).combined_x)
    wide = buf.xp.zeros((len(r.recv_x), 1024), BFLOAT16)
    wide[:, 256:768] = r.recv_x
    assert_bits(buf.combine(wide[:, 256:768], r.handle).combined_x, want, "strided")
    assert_bits(buf.combine(buf.xp.asfortranarray(r.recv_x), r.handle).combined_x, want, "column-major")
    backwards = to_device(buf, np.array(to_host(r.recv_x)[::-1]))
    assert_bits(buf.combine(backwards[::-1], r.handle).combined_x, want, "backwards")
    x, idx, _ = mine(buf, sent)
    buf.dispatch(x, idx, num_worst_tokens=16 * comm.size)
    old = r.recv_x[::-1]
    assert len(old) == len(r.recv_x)
    backwards = old[::-1]
    assert_bits(buf.combine(backwards, r.handle).combined_x, want, "an area's rows, twice turned")


def test_input_freed_at_once(comm, make_buffer):
    buf = make_buffer()
    want = 1 + 16 * (comm.rank % 8) + np.arange(16) % 16
    idx = np.full((16, 2), -1)
    idx[:, 0] = 4 * ((comm.rank + 1) % comm.size)
    idx = to_device(buf, idx)
    for _ in range(5):
        x = to_device(buf, counted_rows(comm, 16))
        r = buf.dispatch(x, idx, async_finish=True)
        del x
        gc.collect()
        noise = [to_device(buf, np.full((16, 512), np.nan, BFLOAT16)) for _ in range(8)]
        r.event.current_stream_wait()
        y = r.recv_x.copy()
        c = buf.combine(y, r.handle, async_finish=True, previous_event=buf.capture())
        c.event.synchronize()
        y.fill(np.nan)
        assert np.array_equal(to_host(c.combined_x).astype(np.float32)[:, 7], want.astype(np.float32))
        del noise


@pytest.mark.host_only("a view into a freed Buffer on a GPU must not be used at all")
def test_views_after_free_are_not_the_next_buffers_memory(comm, make_buffer):
    """Arrays that look into a freed Buffer may hold anything, but never somebody else's rows."""
    buf = make_buffer()
    x, idx = to_expert_0(buf, 16)
    r = buf.dispatch(x, idx)
    view = r.recv_x
    buf.free()
    assert isinstance(raised(lambda: r.recv_x), epcy.StateError)
    other = make_buffer()
    again = other.dispatch(x, idx).recv_x
    kept = again.copy()
    if view.size:
        view[...] = 7
        assert not np.shares_memory(view, again)
    comm.Barrier()
    assert_bits(again, kept, "recv_x")
