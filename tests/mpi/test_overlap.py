"""Arguments that lie in memory which the call itself writes: the Buffer's own areas, or `out`."""

import numpy as np
import pytest

import epcy
from mpi.cases import assert_bits, check_dispatch, draw, raised, to_device


@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_dispatch_of_the_result_before_the_last(comm, make_buffer, dtype):
    """Its area is the one that the dispatch gives away."""
    rows = 400
    buf = make_buffer(num_max_tokens_per_rank=2 * rows, dtype="float32")
    xp, experts = buf.xp, 4 * comm.size
    idx = to_device(buf, np.arange(2 * rows).reshape(rows, 2) // 2 * 4 % experts)  # one rank a token
    sent = draw(1, comm.size, rows, num_experts=experts, dtype=dtype, unused=0)
    first = buf.dispatch(to_device(buf, sent.xs[comm.rank]), idx, to_device(buf, sent.weights[comm.rank]))
    buf.dispatch(xp.ones((rows, 512), np.float32), idx)
    x, weights = first.recv_x, first.recv_topk_weights
    kept = tuple(part.copy() for part in x) if isinstance(x, tuple) else x.copy()
    kept_weights = weights.copy()
    num_rows = len(weights)
    back = xp.broadcast_to(xp.arange(num_rows)[::-1, None] % experts, (num_rows, 2)).copy()
    got = buf.dispatch(x, back, weights)
    want = buf.dispatch(kept, back, kept_weights)
    assert_bits(got.recv_x, want.recv_x, "recv_x")
    assert_bits(got.recv_topk_weights, want.recv_topk_weights, "recv_topk_weights")


def test_combine_out_in_the_buffers_memory(comm, make_buffer):
    buf = make_buffer(dtype="float32")
    sent = draw(2, comm.size, 8, num_experts=4 * comm.size, dtype="float32")
    r, _ = check_dispatch(buf, sent)
    # Eight rows of the Buffer's memory.
    own = buf.dispatch(
        to_device(buf, np.zeros((8, 512), np.float32)), to_device(buf, np.full((8, 2), 4 * comm.rank))
    ).recv_x
    error = raised(lambda: buf.combine(r.recv_x, r.handle, out=own))
    assert type(error) is epcy.ArgumentError
    assert str(error).startswith("out: ") and f"rank {comm.rank}" in str(error)
    check_dispatch(buf, sent)


@pytest.mark.parametrize("shift", [0, 1])
def test_combine_bias_in_out(comm, make_buffer, shift):
    buf = make_buffer(dtype="float32")
    rng = np.random.default_rng([3, comm.rank])
    sent = draw(3, comm.size, 16, num_experts=4 * comm.size, dtype="float32")
    r, _ = check_dispatch(buf, sent)
    both = to_device(buf, rng.standard_normal((17, 512)).astype(np.float32))
    bias, out = both[:16], both[shift : 16 + shift]
    want = buf.combine(r.recv_x, r.handle, bias=bias.copy()).combined_x
    got = buf.combine(r.recv_x, r.handle, bias=bias, out=out).combined_x
    assert got is out
    assert_bits(got, want, "combined_x")


def test_combine_of_a_reversed_combine_input(comm, make_buffer):
    """The area comes back, although the rows do not lie in it in one piece."""
    buf = make_buffer(dtype="float32")
    sent = draw(4, comm.size, 8, num_experts=4 * comm.size, dtype="float32")
    for _ in range(4):
        r, _ = check_dispatch(buf, sent)
        want = buf.combine(r.recv_x.copy(), r.handle).combined_x
        y = buf.combine_input(r.handle)
        y[...] = r.recv_x[::-1]
        assert_bits(buf.combine(y[::-1], r.handle).combined_x, want, "combined_x")
