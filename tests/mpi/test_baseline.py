"""The bench's baseline gives the reference's bits, and so the comparison with it is a fair one."""

import numpy as np
import pytest

from epcy.bench import checking, workload
from epcy.bench.cases import make_baseline


@pytest.mark.parametrize("routing", ["random", "skewed", "one-hot"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp8"])
def test_baseline_gives_the_bits_of_the_reference(comm, dtype, routing):
    shape = workload.Shape(17, 264, min(3, 2 * comm.size), 2 * comm.size, dtype)
    exchange = make_baseline(comm, shape)
    for seed in range(2):
        expected = checking.Expected(shape, routing, seed, comm.rank, comm.size, "rank")
        assert checking.check_baseline(exchange, expected, "roundtrip") == 0


def test_lanes_of_minus_one_and_unequal_numbers_of_tokens(comm):
    num_tokens, num_experts = 5 * (comm.rank % 2), 2 * comm.size
    exchange = make_baseline(comm, workload.Shape(5, 8, 3, num_experts, "fp32"))
    x = np.full((num_tokens, 8), comm.rank + 1, np.float32)
    topk_idx = np.tile([num_experts - 1, -1, 0], (num_tokens, 1))
    topk_idx[2:3] = -1
    rows, recv_topk_idx, recv_topk_weights, route = exchange.dispatch(
        x, topk_idx, np.ones((num_tokens, 3), np.float32)
    )
    assert len(rows) == len(recv_topk_idx) == len(recv_topk_weights) == route.num_recv_tokens
    assert set(recv_topk_idx.ravel().tolist()) <= {-1, 0, 1}
    hit = np.full(num_tokens, len({0, comm.size - 1}))
    hit[2:3] = 0
    assert np.array_equal(exchange.combine(rows, route), x * hit[:, None])
    assert exchange.dispatch(x, None, None, route)[0].shape == rows.shape


def test_dispatch_needs_ids_or_a_route(comm):
    exchange = make_baseline(comm, workload.Shape(1, 8, 1, comm.size, "fp32"))
    with pytest.raises(ValueError, match="topk_idx"):
        exchange.dispatch(np.zeros((1, 8), np.float32), None, None)
