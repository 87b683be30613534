"""The reference on cases worked out by hand. R = 2, E = 4: rank 0 owns {0, 1}, rank 1 {2, 3}."""

import ml_dtypes
import numpy as np
import pytest

from epcy import reference

BF16 = np.dtype(ml_dtypes.bfloat16)
H = 8
NAN = float("nan")


def tokens(rank, num_tokens, hidden=H, dtype=BF16):
    """x_r[t, :] = 1 + 16 * r + t."""
    return np.repeat(1 + 16 * rank + np.arange(num_tokens), hidden).reshape(num_tokens, hidden).astype(dtype)


def ids(*rows, num_topk=2):
    return np.array(rows, dtype=np.int64).reshape(-1, num_topk)


def weights(*rows):
    return np.array(rows, dtype=np.float32)


def column(x):
    """One value a row; every row of these tests is constant."""
    x = x.astype(np.float32)
    assert (x == x[:, :1]).all()
    return x[:, 0].tolist()


def run(topk_idxs, topk_weights=None, xs=None, **kwargs):
    xs = [tokens(rank, len(idx)) for rank, idx in enumerate(topk_idxs)] if xs is None else xs
    return reference.dispatch(xs, topk_idxs, topk_weights, num_experts=4, **kwargs)


def identity(received, routing, *args, **kwargs):
    return reference.combine([r.recv_x for r in received], routing, *args, **kwargs)


def test_layout_counts_a_token_once_a_rank_once_a_node_and_once_a_lane_for_an_expert():
    idx = ids((0, 1), (1, 2), (3, 3), (-1, 2), (-1, -1), (4, -2))
    per_rank, per_node, per_expert, in_rank = reference.get_dispatch_layout(idx, num_ranks=2, num_experts=4)
    assert per_rank.tolist() == [2, 3]
    assert per_node.tolist() == [4]  # no ranks_per_node: one node
    assert per_expert.tolist() == [1, 2, 2, 2]
    assert in_rank.tolist() == [[1, 0], [1, 1], [0, 1], [0, 1], [0, 0], [0, 0]]
    assert {a.dtype for a in (per_rank, per_node, per_expert)} == {np.dtype(np.int64)}
    assert in_rank.dtype == bool
    _, per_node, _, _ = reference.get_dispatch_layout(
        ids((0, 1), (0, 2), (3, 4)), num_ranks=6, num_experts=6, ranks_per_node=2
    )
    assert per_node.tolist() == [2, 2, 1]
    # Three ranks on nodes of two: the last node is half full.
    _, per_node, _, _ = reference.get_dispatch_layout(
        ids((0, 1), (0, 2)), num_ranks=3, num_experts=3, ranks_per_node=2
    )
    assert per_node.tolist() == [2, 1]


def test_rank_layout_orders_rows_by_source_then_token():
    a, b = ids((0, 2), (3, 1), (-1, 0)), ids((2, 3), (1, 0))
    wa, wb = weights((0.5, 0.25), (0.125, 1), (NAN, 2)), weights((3, 4), (5, 6))
    (r0, r1), routing = run([a, b], [wa, wb])
    assert column(r0.recv_x) == [1, 2, 3, 18]
    assert r0.recv_topk_idx.tolist() == [[0, -1], [-1, 1], [-1, 0], [1, 0]]
    assert r0.recv_topk_weights.tolist() == [[0.5, 0], [0, 1], [0, 2], [5, 6]]
    assert r0.num_recv_tokens_per_expert == [3, 2]
    assert column(r1.recv_x) == [1, 2, 17]
    assert r1.recv_topk_idx.tolist() == [[-1, 0], [1, -1], [0, 1]]
    assert r1.recv_topk_weights.tolist() == [[0, 0.25], [0.125, 0], [3, 4]]
    assert r1.num_recv_tokens_per_expert == [2, 2]
    assert (r0.num_recv_tokens, r1.num_recv_tokens) == (4, 3)
    assert r0.expert_offsets is None
    assert not r0.overflow
    assert r0.recv_topk_idx.dtype == np.int64
    assert r0.recv_topk_weights.dtype == np.float32
    assert [row.tolist() for row in routing.lane_row] == [[[0, 0], [1, 1], [-1, 2]], [[2, 2], [3, 3]]]
    assert routing.counts.tolist() == [[3, 2], [1, 1]]
    # Identity experts: x times the number of ranks hit; each lane's weight comes back from its owner.
    (c0, cw0), (c1, cw1) = identity((r0, r1), routing, [r0.recv_topk_weights, r1.recv_topk_weights])
    assert column(c0) == [2, 4, 3]
    assert column(c1) == [17, 18]
    assert cw0.tolist() == [[0.5, 0.25], [0.125, 1], [0, 2]]
    assert cw1.tolist() == wb.tolist()


def test_expert_layout_groups_by_expert_and_pads_with_zero_rows():
    a, b = ids((0, 2), (3, 1), (-1, 0)), ids((0, 3), (1, 0))
    wa, wb = weights((0.5, 0.25), (0.125, 1), (NAN, 2)), weights((3, 4), (5, 6))
    (r0, r1), routing = run([a, b], [wa, wb], layout="expert", expert_alignment=4)
    assert r0.expert_offsets.tolist() == [0, 4, 8]
    assert column(r0.recv_x) == [1, 3, 17, 18, 2, 18, 0, 0]
    assert r0.recv_topk_idx.tolist() == [0, 0, 0, 0, 1, 1, -1, -1]
    assert r0.recv_topk_weights.tolist() == [0.5, 2, 3, 6, 1, 5, 0, 0]
    assert r0.num_recv_tokens_per_expert == [4, 2]  # unpadded
    assert r0.num_recv_tokens == 8
    assert r1.expert_offsets.tolist() == [0, 4, 8]
    assert column(r1.recv_x) == [1, 0, 0, 0, 2, 17, 0, 0]
    assert r1.num_recv_tokens_per_expert == [1, 2]
    (c0, cw0), (c1, _) = identity((r0, r1), routing, [wa, wb])
    assert cw0 is None
    assert column(c0) == [0.75, 2 * 1.125, 3 * 2]
    assert column(c1) == [17 * 7, 18 * 11]
    (c0, _), (c1, _) = identity((r0, r1), routing)  # no weights: all are 1
    assert column(c0) == [2, 4, 3]


def test_expert_layout_leaves_an_empty_group_empty():
    (r0, r1), _ = run([ids((1, 1)), ids((1, -1))], layout="expert", expert_alignment=8)
    assert r0.expert_offsets.tolist() == [0, 0, 8]
    assert column(r0.recv_x) == [1, 1, 17, 0, 0, 0, 0, 0]
    assert r1.recv_x.shape == (0, H)
    assert r1.expert_offsets.tolist() == [0, 0, 0]


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("idle", [0, 1])
def test_a_rank_with_nothing(layout, idle):
    busy = 1 - idle
    mine = [2 * busy, 2 * busy + 1]
    idxs = [ids(), ids()]
    idxs[busy] = ids(*[mine] * 8)
    received, routing = run(idxs, layout=layout)
    assert received[busy].num_recv_tokens_per_expert == [8, 8]
    assert received[idle].num_recv_tokens_per_expert == [0, 0]
    assert received[idle].recv_x.shape == (0, H)
    own = column(tokens(busy, 8))
    assert column(received[busy].recv_x) == own * (2 if layout == "expert" else 1)
    combined = identity(received, routing)
    assert column(combined[busy][0]) == [v * (2 if layout == "expert" else 1) for v in own]
    assert combined[idle][0].shape == (0, H)


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_lanes_of_minus_one(layout):
    nowhere = ids(*[(-1, -1)] * 4)
    received, routing = run([nowhere, nowhere], layout=layout)
    assert [r.recv_x.shape for r in received] == [(0, H), (0, H)]
    bias = tokens(5, 4)
    (c0, _), (c1, _) = identity(received, routing, bias=[bias, None])
    assert c0.tobytes() == bias.tobytes()
    assert c1.tobytes() == bytes(4 * H * 2)

    some = ids((0, 1), (2, 3), (0, 2), (-1, -1))
    received, routing = run([some, some], layout=layout)
    (c0, _), _ = identity(received, routing, bias=[(bias, bias), None])
    assert column(c0[3:]) == [2 * 84]
    assert column(identity(received, routing)[0][0][3:]) == [0]

    (r0, r1), routing = run(
        [ids((2, -1)), ids()], [weights((0.5, NAN)), np.zeros((0, 2), np.float32)], layout=layout
    )
    assert len(r0.recv_x) == 0
    assert column(r1.recv_x) == [1]
    assert r1.recv_topk_weights.ravel().tolist() == ([0.5, 0] if layout == "rank" else [0.5])
    assert np.isfinite(r1.recv_topk_weights).all()
    if layout == "expert":
        (c0, _), _ = identity((r0, r1), routing, [weights((0.5, NAN)), np.zeros((0, 2), np.float32)])
        assert column(c0) == [0.5]


@pytest.mark.parametrize("bad", [4, -2, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_bad_id_counts_as_minus_one(bad, dtype):
    (r0, r1), routing = run([ids((bad, 1), (bad, bad)).astype(dtype), ids().astype(dtype)])
    assert column(r0.recv_x) == [1]
    assert r0.recv_topk_idx.tolist() == [[-1, 1]]
    assert len(r1.recv_x) == 0
    assert routing.topk_idx[0].tolist() == [[-1, 1], [-1, -1]]


def test_a_repeated_expert():
    idxs, w = [ids((3, 3)), ids()], [weights((0.5, 0.25)), np.zeros((0, 2), np.float32)]
    (_, r1), routing = run(idxs, w)
    assert column(r1.recv_x) == [1]
    assert r1.recv_topk_idx.tolist() == [[1, 1]]
    assert r1.num_recv_tokens_per_expert == [0, 2]
    (r0, r1), routing = run(idxs, w, layout="expert")
    assert column(r1.recv_x) == [1, 1]
    assert r1.recv_topk_weights.tolist() == [0.5, 0.25]
    assert column(identity((r0, r1), routing, w)[0][0]) == [0.75]


def test_worst_case_overflow_clips_and_combine_leaves_clipped_rows_out():
    idxs = [ids(*[(0, 1)] * 8), ids(*[(1, 2)] * 8)]
    w = [np.full((8, 2), 0.5, np.float32)] * 2
    (r0, r1), routing = run(idxs, w, num_worst_tokens=12)
    assert (r0.num_recv_tokens, r0.overflow) == (16, True)
    assert (r1.num_recv_tokens, r1.overflow) == (8, False)
    assert column(r0.recv_x) == [*range(1, 9), *range(17, 21)]
    assert r0.num_recv_tokens_per_expert is None
    assert routing.num_tokens_per_expert[0].tolist() == [8, 16]
    assert column(r1.recv_x[:8]) == list(range(17, 25))
    assert r1.recv_x.shape == (12, H)
    assert r1.recv_topk_idx[:8].tolist() == [[-1, 0]] * 8
    assert r1.recv_topk_idx[8:].tolist() == [[-1, -1]] * 4
    assert not r1.recv_topk_weights[8:].any()
    poisoned = r1.recv_x.copy()
    poisoned[8:] = NAN  # unspecified rows never reach a result
    (c0, _), (c1, cw1) = reference.combine(
        [r0.recv_x, poisoned], routing, [r0.recv_topk_weights, r1.recv_topk_weights]
    )
    assert column(c0) == list(range(1, 9))
    assert column(c1) == [2 * v for v in range(17, 21)] + list(range(21, 25))
    assert cw1.tolist() == [[0.5, 0.5]] * 4 + [[0, 0.5]] * 4
    (r0, _), _ = run(idxs, num_worst_tokens=16)
    assert not r0.overflow
    assert len(column(r0.recv_x)) == 16


def test_worst_case_limits_may_differ_between_ranks_and_some_may_wait():
    idxs = [ids(*[(0, 2)] * 3)] * 2
    (r0, r1), routing = run(idxs, num_worst_tokens=[2, 0])
    assert column(r0.recv_x) == [1, 2]
    assert r0.overflow
    assert r0.num_recv_tokens_per_expert is None
    assert column(r1.recv_x) == [1, 2, 3, 17, 18, 19]
    assert r1.num_recv_tokens_per_expert == [6, 0]
    (c0, _), (c1, _) = identity((r0, r1), routing)
    assert column(c0) == [2, 4, 3]
    assert column(c1) == [17, 18, 19]


def test_worst_case_in_expert_layout_clips_padded_rows_and_keeps_true_offsets():
    idxs = [ids((0, 1), (0, 1), (0, 1)), ids()]
    (r0, _), routing = run(idxs, layout="expert", expert_alignment=4, num_worst_tokens=5)
    assert (r0.num_recv_tokens, r0.overflow) == (8, True)
    assert r0.expert_offsets.tolist() == [0, 4, 8]
    assert r0.recv_topk_idx.tolist() == [0, 0, 0, -1, 1]
    assert column(r0.recv_x) == [1, 2, 3, 0, 1]
    assert column(identity((r0, _), routing)[0][0]) == [2, 2, 3]


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_everything_to_one_expert(layout):
    idxs = [np.full((2304, 1), 3), np.full((23, 1), 3)]
    xs = [tokens(r, len(i), dtype=np.float32) for r, i in enumerate(idxs)]
    (r0, r1), routing = run(idxs, xs=xs, layout=layout)
    assert len(r0.recv_x) == 0
    assert r1.num_recv_tokens_per_expert == [0, 2327]
    assert r1.recv_x.tobytes() == np.concatenate(xs).tobytes()
    assert [c.tobytes() for c, _ in identity((r0, r1), routing)] == [x.tobytes() for x in xs]


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 127, 128, 129, 255, 256, 257, 4095])
@pytest.mark.parametrize(("num_topk", "num_local"), [(1, 1), (12, 129), (32, 16)])
def test_odd_sizes(num_tokens, num_topk, num_local):
    rng = np.random.default_rng(num_tokens)
    num_experts = 2 * num_local
    idxs = [rng.integers(-1, num_experts, (n, num_topk)) for n in (num_tokens, 3)]
    xs = [rng.standard_normal((len(i), H), dtype=np.float32) for i in idxs]
    for layout in ("rank", "expert"):
        received, routing = reference.dispatch(xs, idxs, num_experts=num_experts, layout=layout)
        for (got, _), x, idx in zip(identity(received, routing), xs, idxs, strict=True):
            used = idx >= 0
            owner = idx // num_local
            hit = sum((owner == r).any(1) for r in (0, 1)) if layout == "rank" else used.sum(1)
            np.testing.assert_allclose(got, x * hit[:, None], rtol=1e-5)


@pytest.mark.parametrize("hidden", [1, 96 * 16, 2880, 8192])
@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_an_fp8_pair_travels_as_it_is(layout, hidden):
    rng = np.random.default_rng(hidden)
    payload = [rng.integers(0, 256, (n, hidden), dtype=np.uint8) for n in (3, 2)]
    scales = [
        rng.integers(0, 2**32, (n, -(-hidden // 128)), dtype=np.uint32).view(np.float32) for n in (3, 2)
    ]
    xs = [(payload[0].view(ml_dtypes.float8_e4m3fn), scales[0]), (payload[1], np.asfortranarray(scales[1]))]
    idxs = [ids((2, 0), (-1, 3), (0, 1)), ids((3, 3), (3, 2))]
    (r0, r1), _ = reference.dispatch(xs, idxs, num_experts=4, layout=layout, expert_alignment=2)
    (p0, s0), (p1, s1) = r0.recv_x, r1.recv_x
    assert p0.dtype == np.uint8
    rank0 = [(0, 0), (0, 2)] if layout == "rank" else [(0, 0), (0, 2), (0, 2), None]
    rank1 = [(0, 0), (0, 1), (1, 0), (1, 1)]
    if layout == "expert":
        rank1 = [(0, 0), (1, 1), (0, 1), (1, 0), (1, 0), (1, 1)]
    for got_p, got_s, rows in ((p0, s0, rank0), (p1, s1, rank1)):
        assert got_p.shape == (len(rows), hidden)
        for p, s, row in zip(got_p, got_s, rows, strict=True):
            assert p.tobytes() == (bytes(hidden) if row is None else payload[row[0]][row[1]].tobytes())
            assert s.tobytes() == (bytes(s.nbytes) if row is None else scales[row[0]][row[1]].tobytes())


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_a_routing_is_used_again_with_another_payload(layout):
    idxs = [ids((0, 2), (3, 1)), ids((1, 1))]
    first, routing = run(idxs, layout=layout, expert_alignment=2, num_worst_tokens=[3, None])
    xs = [-tokens(r, len(i), dtype=np.float32) for r, i in enumerate(idxs)]
    again, same = reference.dispatch(xs, None, num_experts=4, routing=routing)
    assert same is routing
    for a, b in zip(first, again, strict=True):
        assert column(b.recv_x) == [-v for v in column(a.recv_x)]
        assert b.recv_topk_idx.tolist() == a.recv_topk_idx.tolist()
        assert b.num_recv_tokens_per_expert == a.num_recv_tokens_per_expert


def test_low_latency_rows_are_a_token_and_expert_and_a_repeated_expert_counts_once():
    idxs = [ids((3, 3), (0, 3)), ids((3, -1), (1, 4))]
    xs = [tokens(r, 2) for r in (0, 1)]
    (r0, r1), routing = reference.low_latency_dispatch(
        xs, idxs, num_experts=4, num_max_tokens_per_rank=3, use_fp8=False
    )
    assert r0.recv_x.shape == (2, 6, H)
    assert r0.recv_count.tolist() == [1, 1]
    assert r1.recv_count.tolist() == [0, 3]
    assert column(r0.recv_x[0, :1]) == [2]
    assert column(r0.recv_x[1, :1]) == [18]
    assert column(r1.recv_x[1, :3]) == [1, 2, 17]
    w = [weights((0.5, 0.25), (2, 4)), weights((1, NAN), (8, NAN))]
    ys = [r0.recv_x.copy(), r1.recv_x.copy()]
    for y, r in zip(ys, (r0, r1), strict=True):
        for e, n in enumerate(r.recv_count):
            y[e, n:] = NAN
    for reduction in ("rank", "source"):
        c0, c1 = reference.low_latency_combine(ys, routing, w, reduction=reduction)
        assert column(c0) == [0.75, 12]
        assert column(c1) == [17, 8 * 18]
    assert column(reference.low_latency_combine(ys, routing, None)[0]) == [2, 4]


@pytest.mark.parametrize("cast", [{}, {"round_scale": True}, {"round_scale": True, "use_ue8m0": True}])
def test_low_latency_casts_what_it_sends(cast):
    rng = np.random.default_rng(1)
    xs = [rng.standard_normal((n, 512)).astype(BF16) for n in (2, 0)]
    received, _ = reference.low_latency_dispatch(
        xs, [ids((0, 2), (2, 3)), ids()], num_experts=4, num_max_tokens_per_rank=2, **cast
    )
    payload, scales = reference.cast_to_fp8(xs[0], **cast)
    got_payload, got_scales = received[1].recv_x
    assert got_payload[0, :2].tobytes() == payload.tobytes()
    assert got_scales[0, :2].tobytes() == scales.tobytes()
    assert got_scales.shape == (2, 4, 1 if "use_ue8m0" in cast else 4)
    assert received[0].recv_x[0][0, 0].tobytes() == payload[0].tobytes()


def test_nonsense_is_refused():
    idx, x = ids((0, 1)), tokens(0, 1)
    two = [idx, idx]
    for kwargs in (
        {"xs": [x, x[:, :4]]},
        {"xs": [x, x.astype(np.float32)]},
        {"xs": [x, x.astype(np.float64)]},
        {"xs": [x, tokens(0, 2)]},
        {"topk_idxs": [idx, idx.astype(np.float32)]},
        {"topk_idxs": [idx, ids((0, 1, 2), num_topk=3)]},
        {"topk_weights": [weights((1, 1)), weights((1, 1)).astype(np.float64)]},
        {"topk_weights": [weights((1, 1)), weights((1,))]},
        {"num_experts": 5},
        {"layout": "node"},
        {"expert_alignment": 0},
        {"num_worst_tokens": [1]},
        {"num_worst_tokens": -1},
        {"topk_idxs": None},
    ):
        with pytest.raises(ValueError, match=r".+"):
            reference.dispatch(**{"xs": [x, x], "topk_idxs": two, "num_experts": 4, **kwargs})
    received, routing = run(two)
    ys = [r.recv_x for r in received]
    with pytest.raises(ValueError, match="either"):
        reference.dispatch([x, x], two, num_experts=4, routing=routing)
    with pytest.raises(ValueError, match="experts"):
        reference.dispatch([x, x], None, num_experts=8, routing=routing)
    with pytest.raises(ValueError, match="rows"):
        reference.combine([ys[0], x], routing)
    with pytest.raises(ValueError, match="one dtype"):
        reference.combine([ys[0], ys[1].astype(np.float32)], routing)
    with pytest.raises(ValueError, match="e4m3"):
        reference.combine([reference.cast_to_fp8(np.zeros((2, 128), BF16)), ys[1]], routing)
    with pytest.raises(ValueError, match="bias"):
        reference.combine(ys, routing, bias=[x.astype(np.float32), None])
    with pytest.raises(ValueError, match="path"):
        reference.combine(ys, routing, path="ring")
    with pytest.raises(ValueError, match="num_max_tokens_per_rank"):
        reference.low_latency_dispatch([x, x], two, num_experts=4, num_max_tokens_per_rank=0, use_fp8=False)
