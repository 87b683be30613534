"""Cached handles: the same routing again, across layers, types and layouts, forward and backward."""

import numpy as np
import pytest

import epcy
from mpi.cases import Sent, check_combine, check_dispatch, draw, draw_rows, mine, raised


def payload_of(sent, seed, dtype="bfloat16", hidden=512):
    """Other rows on the routing of `sent`."""
    rng = np.random.default_rng([seed, 2])
    rows = [draw_rows(rng, len(idx), hidden, dtype) for idx in sent.idxs]
    return Sent(rows, sent.idxs, sent.weights)


@pytest.mark.parametrize("layout, alignment", [("rank", 1), ("expert", 1), ("expert", 8)])
def test_again(comm, make_buffer, layout, alignment):
    buf = make_buffer(num_max_recv_tokens=512)
    sent = draw(1, comm.size, [(3 * rank) % 16 for rank in range(comm.size)], num_experts=4 * comm.size)
    r, routing = check_dispatch(buf, sent, layout=layout, alignment=alignment)
    for seed, dtype in enumerate(("bfloat16", "float16", "fp8", "bfloat16")):  # the handle came with bfloat16
        again = payload_of(sent, seed, dtype)
        again.weights = again.weights if seed % 2 else None
        r2, _ = check_dispatch(buf, again, handle=r.handle, routing=routing)
        assert r2.handle is r.handle
        check_combine(buf, r.handle, routing, seed, dtype="float16" if seed % 2 else "bfloat16")


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_layers_forward_then_backward(comm, make_buffer, layout):
    buf = make_buffer()
    layers = []
    for layer in range(4):
        sent = draw(layer, comm.size, 5 + layer, num_experts=4 * comm.size)
        r, routing = check_dispatch(buf, sent, layout=layout)
        check_combine(buf, r.handle, routing, layer)
        layers.append((sent, r.handle, routing))
    for layer, (sent, handle, routing) in reversed(list(enumerate(layers))):
        # the gradient of combine is a dispatch on the same handle, and the other way round
        check_dispatch(buf, payload_of(sent, layer), handle=handle, routing=routing)
        check_combine(buf, handle, routing, layer + 10, staged=False)


def test_worst_case_again(comm, make_buffer):
    buf = make_buffer()
    sent = draw(4, comm.size, 8, num_experts=4 * comm.size)
    worst = [3 + 5 * rank for rank in range(comm.size)]
    r, routing = check_dispatch(buf, sent, worst=worst)
    for seed in range(3):
        check_dispatch(buf, payload_of(sent, seed), handle=r.handle, routing=routing)
        check_combine(buf, r.handle, routing, seed)
    raised(r.handle.check)
    raised(buf.check)


def test_handle_of_a_rank_without_tokens(comm, make_buffer):
    buf = make_buffer()
    sent = draw(7, comm.size, [0] + [8] * (comm.size - 1), num_experts=4 * comm.size)
    r, routing = check_dispatch(buf, sent)
    check_dispatch(buf, payload_of(sent, 1), handle=r.handle, routing=routing)
    check_combine(buf, r.handle, routing, 7)


def test_handle_outlives_its_result_and_many_calls(comm, make_buffer):
    buf = make_buffer()
    sent = draw(2, comm.size, 8, num_experts=4 * comm.size)
    r, routing = check_dispatch(buf, sent)
    handle = r.handle
    del r
    for seed in range(5):
        check_dispatch(buf, draw(10 + seed, comm.size, 12, num_experts=4 * comm.size))
    check_dispatch(buf, payload_of(sent, 3), handle=handle, routing=routing)
    check_combine(buf, handle, routing, 3)


def test_foreign_handle(comm, make_buffer):
    one, two = make_buffer(), make_buffer()
    sent = draw(2, comm.size, 8, num_experts=4 * comm.size)
    r, routing = check_dispatch(one, sent)
    x, _, _ = mine(two, sent)
    for call in (
        lambda: two.dispatch(x, handle=r.handle),
        lambda: two.combine(r.recv_x, r.handle),
        lambda: two.combine_input(r.handle),
    ):
        error = raised(call)
        assert isinstance(error, epcy.ArgumentError), error
        assert "handle" in str(error) and "another Buffer" in str(error)
    check_dispatch(two, sent)
    check_combine(one, r.handle, routing, 1)


def test_ranks_pass_handles_of_different_calls(comm, make_buffer):
    buf = make_buffer()
    sent = draw(2, comm.size, 8, num_experts=4 * comm.size)
    handles = [check_dispatch(buf, sent) for _ in range(2)]
    handle = handles[comm.rank % 2][0].handle
    error = raised(lambda: buf.dispatch(mine(buf, sent)[0], handle=handle))
    error = error or raised(buf.check)  # a cached dispatch on a GPU does not wait
    if comm.size > 1:
        assert isinstance(error, epcy.MismatchError) and "handle" in str(error), error
    check_combine(buf, handles[0][0].handle, handles[0][1], 5)
