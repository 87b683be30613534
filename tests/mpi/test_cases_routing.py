"""Cases of where tokens go: a rank with nothing, lanes of -1, a repeated expert, skew, odd sizes."""

import numpy as np
import pytest

from mpi.cases import check_combine, check_dispatch, counted_rows, draw, to_device, to_host


def floats(a):
    return to_host(a).astype(np.float32)


def test_rank_with_nothing(comm, make_buffer):
    buf = make_buffer(num_experts=2 * comm.size)
    for round_number in range(4):
        sender = 0 if round_number < 3 else comm.size - 1
        mine = comm.rank == sender
        x = to_device(buf, counted_rows(comm, 8 if mine else 0))
        idx = to_device(buf, np.tile(np.array([2 * sender, 2 * sender + 1]), (len(x), 1)))
        r = buf.dispatch(x, idx)
        assert r.num_recv_tokens_per_expert == ([8, 8] if mine else [0, 0])
        assert r.recv_x.shape == (len(x), 512)
        assert np.array_equal(floats(r.recv_x), floats(x))
        c = buf.combine(r.recv_x, r.handle)
        assert np.array_equal(floats(c.combined_x), floats(x))


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_unused_lanes(comm, make_buffer, layout):
    buf = make_buffer(num_experts=2 * comm.size)
    x = to_device(buf, counted_rows(comm, 6))
    bias = to_device(buf, np.full((6, 512), 3, counted_rows(comm, 0).dtype))
    last = 2 * comm.size - 1
    nowhere, one_nowhere, half = np.full((6, 2), -1), np.full((6, 2), last), np.full((6, 2), -1)
    one_nowhere[:, 1], one_nowhere[3], half[:, 0] = 0, -1, last
    everywhere = buf.dispatch(x, buf.xp.zeros((6, 2), np.int64), layout=layout)
    for idx in (nowhere, one_nowhere, half):
        for _ in range(2):  # both combine areas, and what lay there before, are full of NaN
            y = buf.combine_input(everywhere.handle)
            y.fill(np.nan)
            buf.combine(y, everywhere.handle)
        weights = to_device(buf, np.where(idx < 0, np.nan, 0.5).astype(np.float32))
        r = buf.dispatch(x, to_device(buf, idx), weights, layout=layout)
        used = (idx >= 0).sum(1)
        if layout == "rank":
            used = np.array([len({e // 2 for e in row if e >= 0}) for row in idx.tolist()])
            assert not np.isnan(floats(r.recv_topk_weights)).any()
            assert np.array_equal((floats(r.recv_topk_idx) < 0), floats(r.recv_topk_weights) == 0)
        received = r.recv_x.copy()
        c = buf.combine(received, r.handle, bias=bias)
        assert np.array_equal(floats(c.combined_x), floats(x) * used[:, None] + 3)
        scale = weights if layout == "expert" else None
        c = buf.combine(received, r.handle, scale)
        assert np.array_equal(
            floats(c.combined_x), floats(x) * used[:, None] * (0.5 if layout == "expert" else 1)
        )


def test_repeated_expert(comm, make_buffer):
    buf = make_buffer(num_experts=2 * comm.size)
    x = to_device(buf, counted_rows(comm, 1) if comm.rank == 0 else counted_rows(comm, 0))
    idx = to_device(buf, np.full((len(x), 2), 2 * comm.size - 1))
    weights = to_device(buf, np.tile(np.float32([0.5, 0.25]), (len(x), 1)))
    owner = comm.rank == comm.size - 1
    r = buf.dispatch(x, idx, weights)
    assert len(r.recv_x) == owner and r.num_recv_tokens_per_expert == [0, 2 * owner]
    if owner:
        assert floats(r.recv_topk_idx).tolist() == [[1, 1]]
        assert floats(r.recv_topk_weights).tolist() == [[0.5, 0.25]]
    assert np.array_equal(floats(buf.combine(r.recv_x, r.handle).combined_x), floats(x))
    r = buf.dispatch(x, idx, weights, layout="expert")
    assert len(r.recv_x) == 2 * owner and r.num_recv_tokens_per_expert == [0, 2 * owner]
    assert np.array_equal(floats(buf.combine(r.recv_x, r.handle, weights).combined_x), 0.75 * floats(x))


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("num_tokens", [600, 2304])
def test_all_to_one_expert(comm, make_buffer, layout, num_tokens):
    num_tokens //= max(1, comm.size // 2)  # the same total from 2 ranks up
    buf = make_buffer(num_max_tokens_per_rank=num_tokens, hidden=64, num_topk=1)
    x = to_device(buf, counted_rows(comm, num_tokens, 64))
    r = buf.dispatch(x, to_device(buf, np.full((num_tokens, 1), 1)), layout=layout)
    total = num_tokens * comm.size if comm.rank == 0 else 0
    assert r.num_recv_tokens_per_expert == [0, total, 0, 0]
    want = [1 + 16 * (source % 8) + np.arange(num_tokens) % 16 for source in range(comm.size)]
    got = floats(r.recv_x)
    assert np.array_equal(got, np.tile(np.concatenate(want)[:total, None], (1, 64)))
    assert np.array_equal(floats(buf.combine(r.recv_x, r.handle).combined_x), floats(x))


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_one_rank_has_100_times_more(comm, make_buffer, layout):
    buf = make_buffer(num_max_tokens_per_rank=300, hidden=64)
    tokens = [300 if rank == comm.size - 1 else 3 for rank in range(comm.size)]
    sent = draw(12, comm.size, tokens, num_experts=4 * comm.size, hidden=64)
    r, routing = check_dispatch(buf, sent, layout=layout)
    check_combine(buf, r.handle, routing, 12)


@pytest.mark.parametrize("hidden", [8, 1536, 2880, 4608, 6400, 7168, 8192])
def test_odd_hidden(comm, make_buffer, hidden):
    buf = make_buffer(hidden=hidden, num_max_tokens_per_rank=4)
    for layout in ("rank", "expert"):
        sent = draw(hidden, comm.size, 3, num_experts=4 * comm.size, hidden=hidden)
        r, routing = check_dispatch(buf, sent, layout=layout)
        check_combine(buf, r.handle, routing, hidden)


@pytest.mark.parametrize("num_topk", [1, 12, 16, 32])
def test_odd_topk(comm, make_buffer, num_topk):
    buf = make_buffer(num_topk=num_topk, hidden=32, num_experts=5 * comm.size)
    for layout in ("rank", "expert"):
        size = {"num_experts": 5 * comm.size, "num_topk": num_topk, "hidden": 32}
        sent = draw(num_topk, comm.size, 6, **size)
        r, routing = check_dispatch(buf, sent, layout=layout)
        check_combine(buf, r.handle, routing, num_topk)


@pytest.mark.parametrize("num_local_experts", [1, 129])
def test_odd_numbers_of_local_experts(comm, make_buffer, num_local_experts):
    num_experts = num_local_experts * comm.size
    buf = make_buffer(num_experts=num_experts, hidden=32)
    assert buf.num_local_experts == num_local_experts
    for layout, alignment in (("rank", 1), ("expert", 1), ("expert", 2)):
        sent = draw(num_local_experts, comm.size, 16, num_experts=num_experts, hidden=32)
        r, routing = check_dispatch(buf, sent, layout=layout, alignment=alignment)
        check_combine(buf, r.handle, routing, 13)


def test_odd_numbers_of_tokens(comm, make_buffer):
    buf = make_buffer(num_max_tokens_per_rank=4095, hidden=8, num_topk=1)
    sizes = [0, 1, 2, 127, 128, 129, 255, 256, 257]
    for turn in range(len(sizes)):
        tokens = [sizes[(turn + rank) % len(sizes)] for rank in range(comm.size)]
        sent = draw(turn, comm.size, tokens, num_experts=4 * comm.size, hidden=8, num_topk=1)
        r, routing = check_dispatch(buf, sent, layout=("rank", "expert")[turn % 2])
        check_combine(buf, r.handle, routing, turn)
    tokens = [4095 if rank == 0 else 1 for rank in range(comm.size)]
    r, routing = check_dispatch(
        buf, draw(1, comm.size, tokens, num_experts=4 * comm.size, hidden=8, num_topk=1)
    )
    check_combine(buf, r.handle, routing, 1)
