"""Dispatch and combine give the reference's bits: layouts, types, ids, weights, biases, unequal T."""

from itertools import product

import numpy as np
import pytest

from mpi.cases import check_combine, check_dispatch, draw, to_host

LAYOUTS = [("rank", 1), ("expert", 1), ("expert", 4), ("expert", 7)]


def unequal(size):
    return [(5 * rank + 3) % 17 for rank in range(size)]


@pytest.mark.parametrize("layout, alignment", LAYOUTS)
def test_roundtrip(comm, make_buffer, layout, alignment):
    buf = make_buffer(num_topk=3, dtype="float32", hidden=144, num_max_recv_tokens=512)
    size = {"num_experts": 4 * comm.size, "num_topk": 3, "hidden": 144}
    payloads = ("bfloat16", "float16", "float32", "fp8")
    for seed, (dtype, ids) in enumerate(product(payloads, (np.int64, np.int32))):
        sent = draw(seed, comm.size, unequal(comm.size), dtype=dtype, ids=ids, **size)
        r, routing = check_dispatch(buf, sent, layout=layout, alignment=alignment)
        rows = "bfloat16" if dtype == "fp8" else dtype
        check_combine(buf, r.handle, routing, seed, dtype=rows, num_biases=seed % 3)


@pytest.mark.parametrize("layout, alignment", LAYOUTS[:3])
def test_combine_options(comm, make_buffer, layout, alignment):
    buf = make_buffer(hidden=64)
    for dispatch_weights in (False, True):
        sent = draw(1, comm.size, 9, num_experts=4 * comm.size, hidden=64, weights=dispatch_weights)
        r, routing = check_dispatch(buf, sent, layout=layout, alignment=alignment)
        for seed, (biases, weights, staged) in enumerate(product((0, 1, 2), (False, True), (False, True))):
            check_combine(buf, r.handle, routing, seed, weights=weights, num_biases=biases, staged=staged)


def test_combine_of_other_types(comm, make_buffer):
    buf = make_buffer(dtype="float32")
    for dtype in ("fp8", "float32"):
        sent = draw(3, comm.size, 11, num_experts=4 * comm.size, dtype=dtype)
        r, routing = check_dispatch(buf, sent)
        for rows in ("bfloat16", "float16", "float32"):
            check_combine(buf, r.handle, routing, 4, dtype=rows, staged=rows == "float16")


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_no_token_anywhere(comm, make_buffer, layout):
    buf = make_buffer()
    sent = draw(0, comm.size, 0, num_experts=4 * comm.size)
    r, routing = check_dispatch(buf, sent, layout=layout, alignment=1 if layout == "rank" else 16)
    assert len(r.recv_x) == 0
    check_combine(buf, r.handle, routing, 0, num_biases=1)


def test_one_rank_alone_sends(comm, make_buffer):
    buf = make_buffer()
    for layout, sender in product(("rank", "expert"), (0, comm.size - 1)):
        tokens = [16 if rank == sender else 0 for rank in range(comm.size)]
        sent = draw(5, comm.size, tokens, num_experts=4 * comm.size)
        r, routing = check_dispatch(buf, sent, layout=layout)
        check_combine(buf, r.handle, routing, 5)


@pytest.mark.parametrize("hidden", [8, 24, 520])
def test_hidden_that_fills_no_vector(comm, make_buffer, hidden):
    buf = make_buffer(hidden=hidden, num_topk=4)
    for layout, dtype in product(("rank", "expert"), ("bfloat16", "float16")):
        sent = draw(hidden, comm.size, 13, num_experts=4 * comm.size, num_topk=4, hidden=hidden, dtype=dtype)
        r, routing = check_dispatch(buf, sent, layout=layout)
        check_combine(buf, r.handle, routing, hidden, dtype=dtype, num_biases=2)


def test_large_rows_take_the_streaming_copy(comm, make_buffer):
    num_tokens = -(-130 // comm.size)  # more than 1 MiB a rank
    buf = make_buffer(num_max_tokens_per_rank=num_tokens, hidden=4096, num_topk=max(2, comm.size))
    sent = draw(6, comm.size, num_tokens, num_experts=4 * comm.size, num_topk=max(2, comm.size), hidden=4096)
    for layout in ("rank", "expert"):
        check_dispatch(buf, sent, layout=layout)


@pytest.mark.parametrize("num_sms", [1, 3])
def test_threads_change_no_bit(comm, make_buffer, num_sms):
    buf = make_buffer(num_sms=num_sms, num_max_tokens_per_rank=100, hidden=64)
    assert buf.num_sms == (num_sms if buf.backend == "host" else max(num_sms, comm.size))  # a block a peer
    for seed, layout in enumerate(("rank", "expert", "rank")):
        sent = draw(seed, comm.size, [97, 40, 1][seed], num_experts=4 * comm.size, hidden=64)
        r, routing = check_dispatch(buf, sent, layout=layout)
        check_combine(buf, r.handle, routing, seed, num_biases=1)


def test_routed_nowhere_is_the_bias_or_zero(comm, make_buffer):
    buf = make_buffer()
    sent = draw(8, comm.size, 7, num_experts=4 * comm.size, unused=1.0)
    r, routing = check_dispatch(buf, sent)
    assert not np.any(to_host(check_combine(buf, r.handle, routing, 8).combined_x).astype(np.float32))
    check_combine(buf, r.handle, routing, 9, num_biases=1)
    check_combine(buf, r.handle, routing, 9, num_biases=2, special=True)


def test_results_unpack(comm, make_buffer):
    buf = make_buffer()
    sent = draw(1, comm.size, 4, num_experts=4 * comm.size)
    r, routing = check_dispatch(buf, sent)
    recv_x, idx, weights, counts, handle, event = r
    assert recv_x is r.recv_x and idx is r.recv_topk_idx and weights is r.recv_topk_weights
    assert counts is r.num_recv_tokens_per_expert and handle is r.handle and event is r.event and len(r) == 6
    combined_x, weights, event = c = check_combine(buf, r.handle, routing, 1)
    assert combined_x is c.combined_x and weights is c.combined_topk_weights and len(c) == 3
    assert handle.layout == "rank" and handle.num_tokens == 4
    assert "rank layout" in repr(r) and "rank layout" in repr(handle)
