"""What is timed: dispatch, combine and roundtrip, by epcy and by the baseline.

The experts of roundtrip do nothing: the rows that dispatch brought go back as they are (fp8 rows come back as bf16
rows prepared before). combine times combine alone, on rows written where ``combine_input`` says, as experts would.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import epcy
from epcy.bench.baseline import AlltoallvExchange
from epcy.bench.measure import Timed
from epcy.bench.workload import DTYPES, Inputs, Shape, draw_rows

Array = NDArray[Any]


def nothing() -> None:
    """Prepare nothing."""


def time_epcy(case: str, buf: epcy.Buffer, shape: Shape, inputs: Inputs, layout: str, cached: bool) -> Timed:
    """Return what to time of ``buf``. Collective, blocking: one dispatch makes the handle that cached runs use."""
    x, topk_idx, topk_weights = inputs.x, inputs.topk_idx, inputs.topk_weights
    handle = buf.dispatch(x, topk_idx, topk_weights, layout=layout).handle
    scale = topk_weights if layout == "expert" else None
    y = _expert_output(shape, int(handle.num_recv_tokens))
    out = np.empty((shape.num_tokens, shape.hidden), y.dtype)  # kept, as the baseline keeps its own

    def dispatch() -> Any:
        if cached:
            return buf.dispatch(x, handle=handle)
        return buf.dispatch(x, topk_idx, topk_weights, layout=layout)

    if case == "dispatch":
        return Timed(nothing, dispatch)
    if case == "combine":
        area: list[Array] = []

        def fill() -> None:
            area[:] = [buf.combine_input(handle)]
            np.copyto(area[0], y)

        return Timed(fill, lambda: buf.combine(area[0], handle, scale, out=out))

    def roundtrip() -> None:
        received = dispatch()
        buf.combine(y if shape.dtype == "fp8" else received.recv_x, received.handle, scale, out=out)

    return Timed(nothing, roundtrip)


def time_baseline(
    case: str, exchange: AlltoallvExchange, shape: Shape, inputs: Inputs, cached: bool
) -> Timed:
    """Return what to time of the baseline; the counterpart of ``time_epcy`` in the rank layout."""
    route = exchange.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)[3]
    known = route if cached else None
    y = _expert_output(shape, route.num_recv_tokens)

    def dispatch() -> Any:
        return exchange.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, known)

    if case == "dispatch":
        return Timed(nothing, dispatch)
    if case == "combine":
        return Timed(nothing, lambda: exchange.combine(y, route))

    def roundtrip() -> None:
        rows, _, _, made = dispatch()
        exchange.combine(y if shape.dtype == "fp8" else rows, made)

    return Timed(nothing, roundtrip)


def make_baseline(comm: MPI.Intracomm, shape: Shape) -> AlltoallvExchange:
    """Make the baseline for tokens of ``shape``; fp8 tokens come back as bf16."""
    return AlltoallvExchange(
        comm,
        num_max_tokens_per_rank=shape.num_tokens,
        hidden=shape.hidden,
        num_experts=shape.num_experts,
        num_topk=shape.num_topk,
        dtype=DTYPES["bf16" if shape.dtype == "fp8" else shape.dtype],
    )


def _expert_output(shape: Shape, num_rows: int) -> Array:
    return draw_rows(np.random.default_rng(num_rows), num_rows, shape.hidden, shape.dtype)
