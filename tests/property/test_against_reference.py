"""Any sequence of calls on any Buffer gives the reference's bits."""

import hypothesis.strategies as st
import numpy as np
import pytest

import epcy
from mpi.cases import check_combine, check_dispatch, draw, to_device, to_host
from parallel import AGREEMENT, given

MAX_TOKENS = 24
COUNTS = st.one_of(st.sampled_from([0, 1, MAX_TOKENS]), st.integers(0, MAX_TOKENS))
PAYLOADS = st.sampled_from(["bfloat16", "float16", "float32", "fp8"])


def buffers():
    """Draw the shape of a Buffer; a row of every payload, fp8 too, is a multiple of 16 bytes."""
    return st.fixed_dictionaries(
        {
            "hidden": st.sampled_from([16, 48, 128, 144, 512, 528]),
            "experts_per_rank": st.integers(1, 5),
            "num_topk": st.integers(1, 6),
        }
    )


def calls():
    """Draw one step: a dispatch, how often its handle is used again, and a combine after each."""
    return st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**32 - 1),
            "tokens": st.lists(COUNTS, min_size=AGREEMENT.size, max_size=AGREEMENT.size),
            "dtype": PAYLOADS,
            "ids": st.sampled_from(["int64", "int32"]),
            "layout": st.sampled_from(["rank", "expert"]),
            "alignment": st.sampled_from([1, 1, 2, 3, 16]),
            "unused": st.sampled_from([0.0, 0.1, 0.9, 1.0]),
            "weights": st.booleans(),
            "special": st.booleans(),
            "again": st.lists(PAYLOADS, max_size=2),
            "rows": st.sampled_from(["bfloat16", "float16", "float32"]),
            "combine_weights": st.booleans(),
            "num_biases": st.integers(0, 2),
            "staged": st.booleans(),
        }
    )


@given(max_examples=60, shape=buffers(), steps=st.lists(calls(), min_size=1, max_size=4))
def test_sequences(comm, backend, shape, steps):
    num_experts = shape["experts_per_rank"] * comm.size
    num_topk, hidden = shape["num_topk"], shape["hidden"]
    room = comm.size * MAX_TOKENS * num_topk + 16 * shape["experts_per_rank"]
    with epcy.Buffer(
        comm,
        num_max_tokens_per_rank=MAX_TOKENS,
        hidden=hidden,
        num_experts=num_experts,
        num_topk=num_topk,
        dtype="float32",
        backend=backend,
        num_max_recv_tokens=room,
    ) as buf:
        for step in steps:
            alignment = step["alignment"] if step["layout"] == "expert" else 1
            options = {"num_experts": num_experts, "num_topk": num_topk, "hidden": hidden}
            options |= {name: step[name] for name in ("weights", "special")}

            def sent_of(dtype, seed, step=step, options=options):
                ids = np.dtype(step["ids"])
                unused = step["unused"]
                return draw(seed, comm.size, step["tokens"], dtype=dtype, ids=ids, unused=unused, **options)

            sent = sent_of(step["dtype"], step["seed"])
            r, routing = check_dispatch(buf, sent, layout=step["layout"], alignment=alignment)
            handle = r.handle
            for turn, dtype in enumerate([None, *step["again"]]):
                if dtype is not None:
                    later = sent_of(dtype, step["seed"] + turn)
                    later.idxs, later.weights = sent.idxs, sent.weights
                    check_dispatch(buf, later, handle=handle, routing=routing, layout=step["layout"])
                check_combine(
                    buf,
                    handle,
                    routing,
                    step["seed"] + turn,
                    dtype=step["rows"],
                    weights=step["combine_weights"],
                    num_biases=step["num_biases"],
                    special=step["special"],
                    staged=step["staged"],
                )


@given(max_examples=100, num_tokens=COUNTS, seed=st.integers(0, 2**32 - 1), num_topk=st.integers(1, 6))
def test_layout_counts(comm, make_buffer, buffers_by_topk, num_tokens, seed, num_topk):
    """get_dispatch_layout counts what a plain loop counts."""
    if num_topk not in buffers_by_topk:
        buffers_by_topk[num_topk] = make_buffer(num_topk=num_topk, num_max_tokens_per_rank=MAX_TOKENS)
    rng = np.random.default_rng([seed, comm.rank])
    topk_idx = rng.integers(-1, 4 * comm.size, (num_tokens, num_topk))
    buf = buffers_by_topk[num_topk]
    got = buf.get_dispatch_layout(to_device(buf, topk_idx))
    per_rank, per_node, per_expert, in_rank = map(to_host, got)
    want = np.zeros((num_tokens, comm.size), bool)
    for t, row in enumerate(topk_idx):
        want[t, row[row >= 0] // 4] = True
    assert np.array_equal(in_rank, want)
    assert np.array_equal(per_rank, want.sum(0))
    assert np.array_equal(per_expert, np.bincount(topk_idx[topk_idx >= 0], minlength=4 * comm.size))
    assert per_node.tolist() == [int(want.any(1).sum())]


@pytest.fixture
def buffers_by_topk():
    return {}
