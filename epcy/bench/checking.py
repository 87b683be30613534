"""``#wrong``: every row that arrived, compared bit by bit with ``epcy.reference`` on fresh data.

A rank knows the seed of every other, so it draws all inputs and works out alone what it should hold. Where rows lie
and what combine adds up is asked of the reference; the tokens themselves are copies of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import epcy
from epcy import reference
from epcy.bench.baseline import AlltoallvExchange
from epcy.bench.workload import Inputs, Shape, draw_inputs, draw_rows

Array = NDArray[Any]

COLUMNS = 512  # combine is checked this many columns at a time, which bounds the memory


class Expected:
    """What the reference says about one line of the table; local to a rank."""

    def __init__(self, shape: Shape, routing_name: str, seed: int, rank: int, size: int, layout: str) -> None:
        self.shape, self.seed, self.rank, self.size, self.layout = shape, seed, rank, size, layout
        self.routing_name = routing_name
        self.inputs = draw_inputs(shape, routing_name, seed, rank)
        # Rows without columns: this asks for places, ids and weights only.
        drawn = [self.inputs if source == rank else self._draw(source) for source in range(size)]
        self.weights = [one.topk_weights for one in drawn]
        empty = [np.empty((shape.num_tokens, 0), np.float32)] * size
        received, self.routing = reference.dispatch(
            empty, [one.topk_idx for one in drawn], self.weights, num_experts=shape.num_experts, layout=layout
        )
        self.received = received[rank]
        self.num_rows = self.received.num_recv_tokens

    def _draw(self, source: int) -> Inputs:
        return draw_inputs(self.shape, self.routing_name, self.seed, source)

    def wrong_rows(self, recv_x: Array | tuple[Array, Array]) -> Array:
        """Return (N,) bool: which rows differ from the tokens that belong there."""
        parts = recv_x if isinstance(recv_x, tuple) else (recv_x,)
        if any(len(part) != self.num_rows for part in parts):
            return np.ones(max(self.num_rows, *(len(part) for part in parts)), np.bool_)
        wrong = np.ones(self.num_rows, np.bool_)
        for source in range(self.size):
            x = self.inputs.x if source == self.rank else self._draw(source).x
            sent = x if isinstance(x, tuple) else (x,)
            tokens, rows = self.routing.rows_at(source, self.rank)
            wrong[rows] = False
            for part, original in zip(parts, sent, strict=True):
                wrong[rows] |= differ(part[rows], original[tokens])
        return wrong

    def wrong_lanes(self, recv_topk_idx: Array, recv_topk_weights: Array) -> Array:
        """Return (N,) bool: which rows have other ids or weights than the reference."""
        return differ(recv_topk_idx, self.received.recv_topk_idx) | differ(
            recv_topk_weights, self.received.recv_topk_weights
        )

    def expert_output(self, rank: int, first_column: int) -> Array:
        """Draw the columns from ``first_column`` on of what the experts of ``rank`` return."""
        rng = np.random.default_rng([self.seed, rank, first_column])
        num_columns = min(COLUMNS, self.shape.hidden - first_column)
        return draw_rows(rng, self.routing.num_rows(rank), num_columns, self.shape.dtype)

    def fill(self, y: Array) -> Array:
        """Write this rank's expert output into ``y`` (N, H); with a wrong N there is nothing right to write."""
        if len(y) != self.num_rows:
            y[...] = 0
            return y
        for first in range(0, self.shape.hidden, COLUMNS):
            y[:, first : first + COLUMNS] = self.expert_output(self.rank, first)
        return y

    def wrong_tokens(
        self, combined_x: Array, path: str = "direct", node_of_rank: Sequence[int] | None = None
    ) -> Array:
        """Return (T,) bool: which tokens differ from the sum of what the reference says came back by that path."""

        def only_here(of: Sequence[Array]) -> tuple[Array, ...]:
            return tuple(one if source == self.rank else one[:0] for source, one in enumerate(of))

        # The reference works for all ranks; with the other ranks' tokens left out it computes what is compared.
        routing = replace(
            self.routing, topk_idx=only_here(self.routing.topk_idx), lane_row=only_here(self.routing.lane_row)
        )
        scale = only_here(self.weights) if self.layout == "expert" else None
        wrong = np.zeros(self.shape.num_tokens, np.bool_)
        if len(combined_x) != len(wrong):
            return ~wrong
        for first in range(0, self.shape.hidden, COLUMNS):
            ys = [self.expert_output(rank, first) for rank in range(self.size)]
            expected = reference.combine(ys, routing, scale, path=path, node_of_rank=node_of_rank)[self.rank][
                0
            ]
            wrong |= differ(combined_x[:, first : first + COLUMNS], expected)
        return wrong


def differ(got: Array, expected: Array | None) -> Array:
    """Return for each row whether any bit of it differs; all do where the shape or type does."""
    if expected is None or got.shape != expected.shape or got.dtype.itemsize != expected.dtype.itemsize:
        return np.ones(len(got), np.bool_)
    bits = np.dtype(f"u{expected.dtype.itemsize}")
    unequal = np.ascontiguousarray(got).view(bits) != np.ascontiguousarray(expected).view(bits)
    rows: Array = unequal.any(axis=1) if unequal.ndim > 1 else unequal
    return rows


def check_epcy(buf: epcy.Buffer, expected: Expected, case: str, cached: bool) -> int:
    """Return the rows of this rank that are wrong, by the same calls that are timed. Collective, blocking."""
    inputs, layout = expected.inputs, expected.layout
    first = received = buf.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, layout=layout)
    wrong = expected.wrong_lanes(first.recv_topk_idx, first.recv_topk_weights)
    if cached:
        received = buf.dispatch(inputs.x, handle=first.handle)
    wrong = _either(wrong, expected.wrong_rows(received.recv_x))
    if case == "dispatch":
        return int(wrong.sum())
    if case == "roundtrip" and expected.shape.dtype != "fp8":
        y = received.recv_x
    else:
        y = buf.combine_input(received.handle)
    scale = inputs.topk_weights if layout == "expert" else None
    combined = buf.combine(expected.fill(y), received.handle, scale).combined_x
    unequal = expected.wrong_tokens(combined, buf.options["path"], buf.topology.node_of_rank)
    return int(wrong.sum()) + int(unequal.sum())


def check_baseline(exchange: AlltoallvExchange, expected: Expected, case: str) -> int:
    """Return the rows of this rank that the baseline gets wrong. Collective, blocking."""
    inputs = expected.inputs
    rows, topk_idx, topk_weights, route = exchange.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
    wrong = _either(expected.wrong_lanes(topk_idx, topk_weights), expected.wrong_rows(rows))
    if case == "dispatch":
        return int(wrong.sum())
    y = expected.fill(np.empty((route.num_recv_tokens, expected.shape.hidden), exchange.dtype))
    return int(wrong.sum()) + int(expected.wrong_tokens(exchange.combine(y, route)).sum())


def _either(wrong_lanes: Array, wrong_rows: Array) -> Array:
    if len(wrong_lanes) != len(wrong_rows):
        return np.ones(max(len(wrong_lanes), len(wrong_rows)), np.bool_)
    return wrong_lanes | wrong_rows
