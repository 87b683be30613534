"""What tests/soak.py does over and over: pairs of calls of one random shape compared with the reference, and faults."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import epcy
from epcy import reference
from mpi.cases import Sent, draw, draw_rows, mine, raised, to_device, to_host


@dataclass(frozen=True)
class Shape:
    """What a Buffer is made with; the same on all ranks."""

    num_max_tokens_per_rank: int
    hidden: int
    experts_a_rank: int
    num_topk: int
    dtype: str
    num_sms: int

    @staticmethod
    def draw(rng: np.random.Generator, most_tokens: int, most_hidden: int, most_topk: int) -> Shape:
        unit = int(rng.choice([8, 128])) if most_hidden >= 128 else 8
        return Shape(
            int(rng.integers(1, most_tokens + 1)),
            unit * int(rng.integers(1, most_hidden // unit + 1)),
            int(rng.integers(1, 9)),
            int(rng.integers(1, most_topk + 1)),
            str(rng.choice(["bfloat16", "float16"])),
            int(rng.integers(1, 3)),
        )

    def buffer(self, comm: Any, backend: str) -> epcy.Buffer:
        return epcy.Buffer(
            comm, backend=backend, num_max_tokens_per_rank=self.num_max_tokens_per_rank, hidden=self.hidden,
            num_experts=self.experts_a_rank * comm.size, num_topk=self.num_topk, dtype=self.dtype,
            low_latency_mode=True, num_max_low_latency_tokens_per_rank=self.num_max_tokens_per_rank, timeout=30,
            **({"num_sms": self.num_sms} if backend == "host" else {}),
        )  # fmt: skip


class Case:
    """What all ranks send in one pair, and what this rank shall get."""

    def __init__(self, seed: list[int], shape: Shape, size: int, rank: int) -> None:
        rng = np.random.default_rng(seed)
        num_experts, hidden, most = shape.experts_a_rank * size, shape.hidden, shape.num_max_tokens_per_rank
        tokens = [int(t) for t in rng.integers(0, most + 1, size)]
        sent = draw(int(rng.integers(1 << 40)), size, tokens, num_experts=num_experts, num_topk=shape.num_topk,
                    hidden=hidden, dtype=shape.dtype)  # fmt: skip
        self.layout = ("rank", "expert")[int(rng.integers(2))]
        alignment = int(rng.choice([1, 4, 16]))
        options = {"layout": "expert", "expert_alignment": alignment} if self.layout == "expert" else {}
        received, routing = reference.dispatch(
            sent.xs, sent.idxs, sent.weights, num_experts=num_experts, **options
        )
        again = [draw_rows(rng, t, hidden, shape.dtype) for t in tokens]
        cached, _ = reference.dispatch(again, sent.idxs, sent.weights, num_experts=num_experts, **options)
        self.options, self.sent, self.again = options, sent, Sent(again, sent.idxs, sent.weights)
        self.received, self.cached = received[rank], cached[rank]
        weights = sent.weights if self.layout == "expert" else None
        self.combined = reference.combine([r.recv_x for r in received], routing, weights)[rank][0]
        self.use_fp8 = bool(rng.integers(2)) and hidden % 128 == 0
        slots, routing = reference.low_latency_dispatch(
            sent.xs, sent.idxs, num_experts=num_experts, num_max_tokens_per_rank=most, use_fp8=self.use_fp8
        )
        rows = (shape.experts_a_rank, size * most, hidden)
        self.ys = [np.broadcast_to(draw_rows(rng, 1, hidden, shape.dtype), rows) for _ in range(size)]
        self.slots = slots[rank]
        self.low_latency_combined = reference.low_latency_combine(self.ys, routing, sent.weights)[rank]

    def put(self, buf: epcy.Buffer) -> Case:
        """Have this rank's inputs in the memory of the Buffer's backend."""
        self.given, self.other = mine(buf, self.sent), to_device(buf, self.again.xs[buf.rank])
        return self


def num_wrong(got: object, want: np.ndarray) -> int:
    """Count the rows that differ in any bit."""
    rows, want = to_host(got), np.asarray(want)
    if rows.shape != want.shape:
        return max(len(rows), len(want))
    return int((rows.view(np.uint8) != want.view(np.uint8)).any(axis=tuple(range(1, want.ndim))).sum())


def pair(buf: epcy.Buffer, case: Case, cached: bool, hesitate: Callable[[], None]) -> int:
    """Make one dispatch and combine, perhaps a cached dispatch after them; return the number of wrong rows."""
    x, idx, weights = case.given
    hesitate()
    r = buf.dispatch(x, idx, weights, **case.options)
    wrong = num_wrong(r.recv_x, case.received.recv_x)
    wrong += num_wrong(r.recv_topk_idx, case.received.recv_topk_idx)
    hesitate()
    z = buf.combine(r.recv_x, r.handle, weights if case.layout == "expert" else None)
    if cached:
        hesitate()
        again = buf.dispatch(case.other, handle=r.handle)
        wrong += num_wrong(again.recv_x, case.cached.recv_x)
    return wrong + num_wrong(z.combined_x, case.combined)


def low_latency_pair(buf: epcy.Buffer, case: Case, hook: bool, hesitate: Callable[[], None]) -> int:
    """Make one low-latency pair; return the number of wrong rows."""
    x, idx, weights = case.given
    recv, count, handle, _, receive = buf.low_latency_dispatch(
        x, idx, weights, use_fp8=case.use_fp8, return_recv_hook=hook
    )
    if receive is not None:
        hesitate()
        receive()
    want = case.slots
    wrong = int(to_host(count).tolist() != want.recv_count.tolist())
    parts = recv if isinstance(recv, tuple) else (recv,)
    wanted = want.recv_x if isinstance(want.recv_x, tuple) else (want.recv_x,)
    for got, rows in zip(parts, wanted, strict=True):
        for expert, n in enumerate(want.recv_count):
            wrong += num_wrong(got[expert, :n], rows[expert, :n])
    hesitate()
    y = buf.low_latency_combine_input(handle, case.ys[buf.rank].dtype)
    y[...] = to_device(buf, case.ys[buf.rank])
    z, _, receive = buf.low_latency_combine(y, None, None, handle, zero_copy=True, return_recv_hook=hook)
    if receive is not None:
        hesitate()
        receive()
    return wrong + num_wrong(z, case.low_latency_combined)


# ---- faults: one rank does something wrong, and the Buffer must go on

FAULTS = ("bad id", "too many tokens", "other call", "late")


def survive(buf: epcy.Buffer, kind: str, culprit: int) -> None:
    """Let `culprit` make a mistake; the error must be the right one on every rank."""
    mistaken = buf.rank == culprit
    tokens = buf.options["num_max_tokens_per_rank"] + (1 if kind == "too many tokens" and mistaken else 0)
    x = buf.xp.zeros((tokens, buf.options["hidden"]), np.float16)
    idx = buf.xp.zeros((tokens, buf.options["num_topk"]), np.int64)
    if kind == "bad id" and mistaken:
        idx[0, 0] = -9
    want: type[epcy.EpcyError] | None
    if kind == "late":
        error = None if mistaken else raised(lambda: buf.barrier(timeout=0.02))
        want = None if mistaken else epcy.PeerTimeoutError
        buf.comm.Barrier()
        buf.reset()
    elif kind == "other call":
        error, want = raised(buf.barrier if mistaken else lambda: buf.dispatch(x, idx)), epcy.MismatchError
    else:
        error = raised(lambda: buf.dispatch(x, idx))
        own = epcy.ArgumentError if kind == "bad id" else epcy.CapacityError
        want = own if mistaken else epcy.PeerError
    if type(error) is not type(None) if want is None else type(error) is not want:
        raise AssertionError(f"{kind} on rank {culprit}: rank {buf.rank} got {error!r}")


def one_of(rng: np.random.Generator, delay_us: float) -> Callable[[], None]:
    """A function that sleeps up to so long, every 4th time."""

    def hesitate() -> None:
        if rng.random() < 0.25:
            time.sleep(rng.random() * delay_us * 1e-6)

    return hesitate
