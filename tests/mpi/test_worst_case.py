"""num_worst_tokens: arrays of a fixed number of rows, clipping, errors that come later."""

import numpy as np
import pytest

import epcy
from mpi.cases import check_combine, check_dispatch, counted_rows, draw, mine, raised, to_expert_0, to_host


@pytest.mark.parametrize("layout, alignment", [("rank", 1), ("expert", 1), ("expert", 4)])
def test_roundtrip(comm, make_buffer, layout, alignment):
    buf = make_buffer(num_max_recv_tokens=512)
    for worst, dtype in ((1, "fp8"), (7, "bfloat16"), (64, "fp8"), (512, "bfloat16")):
        sent = draw(worst, comm.size, 9, num_experts=4 * comm.size, dtype=dtype)
        r, routing = check_dispatch(buf, sent, layout=layout, alignment=alignment, worst=worst)
        assert r.num_recv_tokens_per_expert is None
        check_combine(buf, r.handle, routing, worst, num_biases=1)
        for check in (r.handle.check, buf.check):
            assert isinstance(raised(check), epcy.CapacityError) == routing.overflow(comm.rank)
        assert raised(buf.check) is None


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_limits_differ_between_ranks(comm, make_buffer, layout):
    buf = make_buffer()
    worst = [[2, 16, 5][rank % 3] for rank in range(comm.size)]
    sent = draw(3, comm.size, [3 + rank for rank in range(comm.size)], num_experts=4 * comm.size)
    r, routing = check_dispatch(buf, sent, layout=layout, worst=worst)
    check_combine(buf, r.handle, routing, 3)
    raised(buf.check)


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_some_ranks_wait_for_their_count(comm, make_buffer, layout):
    buf = make_buffer()
    worst = [[None, 16][rank % 2] for rank in range(comm.size)]
    sent = draw(3, comm.size, 5, num_experts=4 * comm.size)
    r, routing = check_dispatch(buf, sent, layout=layout, worst=worst)
    check_combine(buf, r.handle, routing, 3)
    raised(buf.check)


def test_overflow_writes_nothing_past_the_limit(comm, make_buffer):
    buf = make_buffer(num_max_tokens_per_rank=8)
    xp, size = buf.xp, comm.size
    limit = 8 * size - 4
    to_rank_0 = xp.zeros((8, 2), np.int64)
    to_rank_0[:, 1] = 1
    x, weights = xp.asarray(counted_rows(comm, 8)), xp.ones((8, 2), np.float32)
    # views of both areas, as long as all that may come; the third dispatch writes into the first one again
    areas = [buf.dispatch(x, to_rank_0, weights, num_worst_tokens=8 * size) for _ in range(2)]
    guarded = (areas[0].recv_x, areas[0].recv_topk_idx, areas[0].recv_topk_weights)
    for array in guarded:
        array.view(np.uint8)[...] = 0xA5
    r = buf.dispatch(x, to_rank_0, weights, num_worst_tokens=limit)
    for array in guarded:
        assert (to_host(array[limit:]).view(np.uint8) == 0xA5).all()
    if comm.rank == 0:
        want = np.concatenate([np.arange(8) + 1 + 16 * (source % 8) for source in range(size)])[:limit]
        assert np.array_equal(to_host(r.recv_x)[:, 5].astype(np.int64), want)
        assert r.handle.overflow and int(r.handle.num_recv_tokens) == 8 * size
        error = raised(r.handle.check)
        assert isinstance(error, epcy.CapacityError)
        for text in (f"{8 * size} rows", f"num_worst_tokens={limit}", "rank 0"):
            assert text in str(error)
    else:
        assert not r.handle.overflow and raised(r.handle.check) is None and raised(buf.check) is None
    # combine leaves the clipped rows out
    back = to_host(buf.combine(r.recv_x, r.handle).combined_x).astype(np.float32)
    kept = np.clip(limit - 8 * comm.rank, 0, 8)
    assert np.array_equal(back[:kept], to_host(x).astype(np.float32)[:kept]) and not back[kept:].any()
    # a call that waits raises what is left over, on rank 0 alone, and when it is over itself
    comm.Barrier()
    error = raised(lambda: buf.dispatch(x, to_rank_0, weights))
    assert (
        isinstance(error, epcy.CapacityError) and f"{8 * size} rows" in str(error)
        if comm.rank == 0
        else error is None
    )
    # and the next one with room is right
    r = buf.dispatch(x, to_rank_0, weights, num_worst_tokens=8 * size)
    assert not r.handle.overflow and int(r.handle.num_recv_tokens) == (8 * size if comm.rank == 0 else 0)
    assert raised(buf.check) is None


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_bad_ids_count_as_unused_and_are_told_later(comm, make_buffer, layout):
    buf = make_buffer()
    sent = draw(6, comm.size, 8, num_experts=4 * comm.size, unused=0.0)
    for rank, idx in enumerate(sent.idxs):
        if rank % 2 == 0:
            idx[3, 1], idx[5, 0] = 4 * comm.size, -2  # the reference too takes them for unused
    r, routing = check_dispatch(buf, sent, layout=layout, worst=64)
    check_combine(buf, r.handle, routing, 6)
    if comm.rank % 2 == 0:
        for error in (raised(r.handle.check), raised(buf.check)):
            assert isinstance(error, epcy.ArgumentError)
            for text in (f"rank {comm.rank}", "token 3", "lane 1", str(4 * comm.size), "topk_idx"):
                assert text in str(error)
    assert raised(buf.check) is None
    check_dispatch(buf, draw(7, comm.size, 8, num_experts=4 * comm.size), layout=layout)


def test_receive_area_too_small(comm, make_buffer):
    """More rows than num_max_recv_tokens where a rank waits: an error on all, and the Buffer goes on."""
    buf = make_buffer(num_max_tokens_per_rank=8, num_max_recv_tokens=6)
    x, idx = to_expert_0(buf, 8)
    idx[:, 1] = -1
    for worst in (0, 6 if comm.rank else 0):  # the second time only rank 0 waits for its count
        error = raised(lambda: buf.dispatch(x, idx, num_worst_tokens=worst))  # noqa: B023
        if comm.rank == 0:
            assert isinstance(error, epcy.CapacityError) and "num_max_recv_tokens" in str(error)
            assert str(8 * comm.size) in str(error) and "6" in str(error)
        elif worst == 0:
            assert isinstance(error, epcy.PeerError) and error.ranks == (0,)
        else:
            assert error is None and isinstance(raised(buf.check), epcy.PeerError)
        comm.Barrier()
    r = buf.dispatch(x[:6], idx[:6] if comm.rank == 0 else idx[:6] * 0 - 1)
    assert len(r.recv_x) == (6 if comm.rank == 0 else 0)


def test_refusal_reaches_ranks_that_wait_and_ranks_that_do_not(comm, make_buffer):
    """One refuses, one waits for its count, one does not wait: nobody is held up."""
    if comm.size < 3:
        pytest.skip("three ranks")
    buf = make_buffer(timeout=3)
    x, idx = to_expert_0(buf, 4)
    worst = 16 if comm.rank % 3 == 2 else 0
    given = idx if comm.rank else idx.astype(np.float32)
    error = raised(lambda: buf.dispatch(x, given, num_worst_tokens=worst))
    comm.Barrier()
    if comm.rank == 0:
        assert isinstance(error, epcy.ArgumentError)
    elif worst:
        assert error is None and isinstance(raised(buf.check), epcy.PeerError)
    else:
        assert isinstance(error, epcy.PeerError) and error.ranks == (0,)
    assert len(buf.dispatch(x, idx).recv_x) == (4 * comm.size if comm.rank == 0 else 0)


def test_refusal_beside_a_barrier(comm, make_buffer):
    """One refuses, one is in a barrier, the others do not wait: nobody is held up."""
    if comm.size < 3:
        pytest.skip("three ranks")
    buf = make_buffer(timeout=3)
    x, idx = to_expert_0(buf, 4)
    if comm.rank == 0:
        assert isinstance(raised(lambda: buf.dispatch(x[:, :8], idx)), epcy.ArgumentError)
    elif comm.rank == 1:
        assert isinstance(raised(buf.barrier), epcy.PeerError)
    else:
        buf.dispatch(x, idx, num_worst_tokens=16)
        assert isinstance(raised(buf.check), epcy.PeerError)
    assert len(buf.dispatch(x, idx).recv_x) == (4 * comm.size if comm.rank == 0 else 0)


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_refusal_leaves_a_handle_as_it_was(comm, make_buffer, layout):
    """A cached dispatch in which nothing came: its result says so, and the handle that was passed still routes."""
    if comm.size == 1:
        pytest.skip("two ranks")
    buf = make_buffer(dtype="float32", num_max_recv_tokens=64 * comm.size)
    sent = draw(5, comm.size, 16, num_experts=4 * comm.size, dtype="float32")
    limit = 64 * comm.size
    r, routing = check_dispatch(buf, sent, layout=layout, worst=limit)
    handle, x = r.handle, mine(buf, sent)[0]
    if comm.rank == 0:
        assert isinstance(raised(lambda: buf.dispatch(x[:, :8], handle=handle)), epcy.ArgumentError)
    else:
        nothing = buf.dispatch(x, handle=handle)
        if buf.backend == "host":  # on a GPU the host does not know yet that nothing came
            assert nothing.handle is not handle and int(nothing.handle.num_recv_tokens) == 0
        assert (nothing.recv_topk_idx == -1).all() and len(nothing.recv_x) == limit
        assert isinstance(raised(nothing.handle.check), epcy.PeerError)
        assert isinstance(raised(buf.check), epcy.PeerError)
    handle.check()
    check_dispatch(buf, sent, handle=handle, routing=routing)
