"""Any routing, any sizes, any bits: dispatch and combine equal the reference on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest

from mpi.cases import Sent, check_combine, check_dispatch, draw, raised, to_device, to_host
from parallel import given

NUM_TOPK, HIDDEN, NUM_LOCAL, MOST = 3, 32, 3, 6


@dataclass
class Call:
    """One round on a Buffer; `experts` are drawn from a unit interval, since the ranks' number is not known here."""

    tokens: list[int]
    experts: list[float]
    layout: str
    alignment: int
    dtype: str
    ids: type
    weights: bool
    special: bool
    worst: int
    biases: int
    staged: bool
    seed: int
    again: bool


def calls():
    return st.builds(
        Call,
        tokens=st.lists(st.integers(0, MOST), min_size=1, max_size=8),
        experts=st.lists(st.floats(-0.25, 1, exclude_max=True), min_size=1, max_size=24),
        layout=st.sampled_from(["rank", "expert"]),
        alignment=st.integers(1, 9),
        dtype=st.sampled_from(["bfloat16", "float16", "float32", "fp8"]),
        ids=st.sampled_from([np.int64, np.int32]),
        weights=st.booleans(),
        special=st.booleans(),
        worst=st.sampled_from([0, 0, 1, 5, 60]),
        biases=st.integers(0, 2),
        staged=st.booleans(),
        seed=st.integers(0, 2**16),
        again=st.booleans(),
    )


def sent_of(call: Call, size: int) -> Sent:
    """Draw the rows from the seed, and lay the drawn experts out over all lanes of all ranks."""
    tokens = [call.tokens[rank % len(call.tokens)] for rank in range(size)]
    num_experts = NUM_LOCAL * size
    options = {"num_experts": num_experts, "num_topk": NUM_TOPK, "hidden": HIDDEN, "weights": call.weights}
    sent = draw(call.seed, size, tokens, dtype=call.dtype, special=call.special, **options)
    place = 0
    for rank, num_tokens in enumerate(tokens):
        lanes = [call.experts[(place + i) % len(call.experts)] for i in range(num_tokens * NUM_TOPK)]
        place += len(lanes) + 1
        experts = np.array([-1 if lane < 0 else int(lane * num_experts) for lane in lanes], call.ids)
        sent.idxs[rank] = experts.reshape(num_tokens, NUM_TOPK)
        if call.weights:
            weights = sent.weights[rank].copy()
            weights[sent.idxs[rank] < 0] = np.nan
            sent.weights[rank] = weights
    return sent


@pytest.fixture
def buf(comm, make_buffer):
    return make_buffer(
        num_max_tokens_per_rank=MOST,
        hidden=HIDDEN,
        num_experts=NUM_LOCAL * comm.size,
        num_topk=NUM_TOPK,
        dtype="float32",
        num_max_recv_tokens=MOST * NUM_TOPK * comm.size + 60,
        num_sms=2,
    )


@given(max_examples=40, call=calls())
def test_any_round(comm, buf, call):
    rows = "bfloat16" if call.dtype == "fp8" else call.dtype
    alignment = call.alignment if call.layout == "expert" else 1
    sent = sent_of(call, comm.size)
    r, routing = check_dispatch(buf, sent, layout=call.layout, alignment=alignment, worst=call.worst)
    options = {"num_biases": call.biases, "special": call.special, "staged": call.staged}
    check_combine(buf, r.handle, routing, call.seed, dtype=rows, weights=call.weights, **options)
    if call.again:
        check_dispatch(buf, sent, handle=r.handle, routing=routing)
        check_combine(buf, r.handle, routing, call.seed + 1, dtype=rows, **options)
    raised(buf.check)


@given(max_examples=20, rounds=st.lists(calls(), min_size=2, max_size=4), order=st.permutations(range(4)))
def test_handles_in_any_order(comm, buf, rounds, order):
    made = []
    for call in rounds:
        sent = sent_of(call, comm.size)
        alignment = call.alignment if call.layout == "expert" else 1
        r, routing = check_dispatch(buf, sent, layout=call.layout, alignment=alignment)
        made.append((sent, r.handle, routing, call))
    for sent, handle, routing, call in (made[i] for i in order if i < len(made)):
        if call.again:
            check_dispatch(buf, sent, handle=handle, routing=routing)
        check_combine(buf, handle, routing, call.seed, dtype="float16", staged=call.staged)


@given(max_examples=30, call=calls())
def test_sum_of_what_was_sent(comm, buf, call):
    """Without the reference: with small whole numbers, combine gives x times the number of ranks or lanes."""
    sent = sent_of(call, comm.size)
    idx = sent.idxs[comm.rank]
    x = np.tile((np.arange(len(idx)) % 8 + 1).astype(np.float32)[:, None], (1, HIDDEN))
    r = buf.dispatch(*to_device(buf, (x, idx)), layout=call.layout)
    got = to_host(buf.combine(r.recv_x, r.handle).combined_x)
    if call.layout == "rank":
        times = np.array([len({e // NUM_LOCAL for e in row if e >= 0}) for row in idx.tolist()], np.float32)
    else:
        times = (idx >= 0).sum(1)
    assert np.array_equal(got, x * times.reshape(-1, 1))
