"""Low-latency calls compared with the reference, bit by bit (see cases.py for the inputs)."""

from __future__ import annotations

from typing import Any

import numpy as np

from epcy import reference
from mpi.cases import DTYPES, Sent, assert_bits, draw, draw_rows, mine, raised, to_device, to_host


def most_tokens(buf: Any) -> int:
    most: int = buf.options["num_max_low_latency_tokens_per_rank"]
    return most


def expected(buf: Any, sent: Sent, **casts: Any) -> tuple[reference.LowLatencyReceived, reference.Routing]:
    received, routing = reference.low_latency_dispatch(
        sent.xs,
        sent.idxs,
        num_experts=buf.num_local_experts * buf.size,
        num_max_tokens_per_rank=most_tokens(buf),
        **casts,
    )
    return received[buf.rank], routing


def compare_received(recv_x: Any, recv_count: Any, want: reference.LowLatencyReceived, rank: int = 0) -> None:
    assert_bits(recv_count, want.recv_count, "recv_count")
    got = recv_x if isinstance(recv_x, tuple) else (recv_x,)
    rows = want.recv_x if isinstance(want.recv_x, tuple) else (want.recv_x,)
    assert len(got) == len(rows)
    for part, (g, w) in enumerate(zip(got, rows, strict=True)):
        assert g.shape == w.shape and g.dtype == w.dtype, (g.shape, w.shape, g.dtype, w.dtype)
        for expert, count in enumerate(want.recv_count):
            assert_bits(g[expert, :count], w[expert, :count], f"recv_x part {part} expert {expert}")


def check_dispatch(
    buf: Any, sent: Sent, *, hook: bool = False, stats: Any = None, **casts: Any
) -> tuple[Any, reference.Routing]:
    """Dispatch, compare with the reference, and return the handle and the reference's routing. Collective."""
    x, idx, weights = mine(buf, sent)
    recv_x, recv_count, handle, _, call_hook = buf.low_latency_dispatch(
        x, idx, weights, stats=stats, return_recv_hook=hook, **casts
    )
    assert (call_hook is not None) == hook and handle.received == (not hook)
    if hook:
        call_hook()
    want, routing = expected(buf, sent, **casts)
    compare_received(recv_x, recv_count, want)
    assert handle.received and handle.num_tokens == len(x) and handle.layout == "low_latency"
    assert_bits(handle.num_tokens_per_expert, want.recv_count, "num_tokens_per_expert")
    assert int(handle.num_recv_tokens) == want.recv_count.sum() and not handle.overflow
    return handle, routing


def expert_rows(
    buf: Any, routing: reference.Routing, seed: int, dtype: str, special: bool = False
) -> list[Any]:
    """What the experts of all ranks give back, one entry a rank; rows that nobody reads hold NaN."""
    rng, out = np.random.default_rng([seed, 7]), []
    for rank in range(buf.size):
        y = np.full(
            (buf.num_local_experts, buf.size * most_tokens(buf), buf.options["hidden"]), np.nan, DTYPES[dtype]
        )
        for expert, count in enumerate(routing.num_tokens_per_expert[rank]):
            y[expert, :count] = draw_rows(rng, count, y.shape[2], dtype, special)
        out.append(y)
    return out


def check_combine(
    buf: Any,
    handle: Any,
    routing: reference.Routing,
    seed: int,
    *,
    dispatched: list[Any] | None = None,
    weights: list[Any] | None = None,
    dtype: str = "bfloat16",
    special: bool = False,
    zero_copy: bool = False,
    hook: bool = False,
    out: Any = None,
    idx: Any = None,
    **options: Any,
) -> Any:
    """Combine drawn rows, compare with the reference, and return the result. Collective.

    `dispatched` are the weights that the dispatch had, `weights` those given here: by source, or None.
    """
    ys = expert_rows(buf, routing, seed, dtype, special)
    y = to_device(buf, ys[buf.rank])
    if zero_copy:
        inside = buf.low_latency_combine_input(handle, DTYPES[dtype])
        assert inside.shape == y.shape and inside.dtype == y.dtype
        inside[...] = y
        y = inside
    given = None if weights is None else to_device(buf, weights[buf.rank])
    combined_x, _, call_hook = buf.low_latency_combine(
        y, idx, given, handle, zero_copy=zero_copy, return_recv_hook=hook, out=out, **options
    )
    assert (call_hook is not None) == hook and (out is None or combined_x is out)
    if hook:
        call_hook()
    applied = dispatched if weights is None else weights
    assert_bits(
        combined_x, reference.low_latency_combine(ys, routing, applied, **options)[buf.rank], "combined_x"
    )
    return combined_x


def late_error(buf: Any, call: Any) -> BaseException | None:
    """What a call raises at once, or leaves for check(): which of the two differs between backends."""
    return raised(call) or raised(buf.check)


def host_list(a: Any) -> list[int]:
    listed: list[int] = to_host(a).tolist()
    return listed


def works(buf: Any, seed: int = 0, **options: Any) -> None:
    """A legal dispatch and combine are right. Collective."""
    sent = draw(seed, buf.size, 6, num_experts=4 * buf.size, hidden=buf.options["hidden"])
    handle, routing = check_dispatch(buf, sent, **options)
    check_combine(buf, handle, routing, seed, dispatched=sent.weights)
