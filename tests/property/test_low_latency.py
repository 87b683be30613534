"""Low latency: any routing, casts and legal order of calls and hooks, ranks at any distance: the reference's bits."""

from __future__ import annotations

import time
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest

from epcy import reference
from mpi.cases import assert_bits, draw, mine, to_device
from mpi.low_latency_cases import compare_received, expected, expert_rows
from parallel import given

CASTS = [
    {"use_fp8": False},
    {"use_fp8": True},
    {"round_scale": True},
    {"round_scale": True, "use_ue8m0": True},
]


@dataclass
class Step:
    """One thing to do, if the calls in flight allow it."""

    what: str
    seed: int
    tokens: list[int]
    casts: int
    hook: bool
    weights: int  # bit 0: given to the dispatch, bit 1: to the combine
    reduction: str
    use_logfmt: bool
    zero_copy: bool
    dtype: str
    late: int  # the rank that sleeps a moment first


def steps():
    step = st.builds(
        Step,
        what=st.sampled_from(["dispatch", "dispatch", "combine", "combine", "receive", "barrier"]),
        seed=st.integers(0, 2**16),
        tokens=st.lists(st.integers(0, 6), min_size=1, max_size=8),
        casts=st.integers(0, 3),
        hook=st.booleans(),
        weights=st.integers(0, 3),
        reduction=st.sampled_from(["rank", "source"]),
        use_logfmt=st.booleans(),
        zero_copy=st.booleans(),
        dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
        late=st.integers(-1, 3),
    )
    return st.lists(step, min_size=4, max_size=16)


class Player:
    """Makes the calls and compares what comes."""

    def __init__(self, buf):
        self.buf, self.dispatched, self.combined, self.handles = buf, [], [], []

    def receive(self, flights):
        hook, compare = flights.pop(0)
        hook()
        compare()

    def dispatch(self, step):
        buf = self.buf
        if len(self.dispatched) == 2 or self.dispatched and not step.hook:
            self.receive(self.dispatched)
        if self.dispatched and not step.hook:
            self.receive(self.dispatched)
        tokens = [step.tokens[rank % len(step.tokens)] for rank in range(buf.size)]
        size = {"num_experts": 3 * buf.size, "num_topk": 3, "weights": bool(step.weights & 1)}
        sent = draw(step.seed, buf.size, tokens, dtype=step.dtype, **size)
        casts = CASTS[step.casts]
        x, idx, weights = mine(buf, sent)
        recv_x, count, handle, _, hook = buf.low_latency_dispatch(
            x, idx, weights, return_recv_hook=step.hook, **casts
        )

        def compare():
            want, routing = expected(buf, sent, **casts)
            compare_received(recv_x, count, want)
            self.handles.append((handle, routing, sent))

        if step.hook:
            self.dispatched.append((hook, compare))
        else:
            compare()

    def combine(self, step):
        buf = self.buf
        if not self.handles:
            return
        if len(self.combined) == 2 or self.combined and not step.hook:
            self.receive(self.combined)
        if self.combined and not step.hook:
            self.receive(self.combined)
        handle, routing, sent = self.handles[step.seed % len(self.handles)]
        ys = expert_rows(buf, routing, step.seed, step.dtype)
        y = to_device(buf, ys[buf.rank])
        if step.zero_copy:
            y = buf.low_latency_combine_input(handle, ys[0].dtype)
            y[...] = to_device(buf, ys[buf.rank])
        weights = sent.weights
        if step.weights & 2:
            rng = np.random.default_rng(step.seed)
            weights = [rng.standard_normal(idx.shape).astype(np.float32) for idx in sent.idxs]
        options = {"reduction": step.reduction, "use_logfmt": step.use_logfmt}
        given_here = to_device(buf, weights[buf.rank]) if step.weights & 2 else None
        z, _, hook = buf.low_latency_combine(
            y, None, given_here, handle, zero_copy=step.zero_copy, return_recv_hook=step.hook, **options
        )

        def compare():
            want = reference.low_latency_combine(ys, routing, weights, **options)
            assert_bits(z, want[buf.rank], "combined_x")

        if step.hook:
            self.combined.append((hook, compare))
        else:
            compare()

    def play(self, step):
        if step.late == self.buf.rank:
            time.sleep(0.003)
        if step.what == "dispatch":
            self.dispatch(step)
        elif step.what == "combine":
            self.combine(step)
        elif step.what == "barrier":
            self.buf.barrier()
        elif self.combined:
            self.receive(self.combined)
        elif self.dispatched:
            self.receive(self.dispatched)


@pytest.fixture
def buf(comm, make_buffer):
    return make_buffer(
        num_max_tokens_per_rank=6,
        hidden=512,
        num_experts=3 * comm.size,
        num_topk=3,
        dtype="float32",
        low_latency_mode=True,
        num_sms=2,
    )


@given(max_examples=40, sequence=steps())
def test_any_order(comm, buf, sequence):
    player = Player(buf)
    for step in sequence:
        player.play(step)
    while player.dispatched:
        player.receive(player.dispatched)
    while player.combined:
        player.receive(player.combined)
