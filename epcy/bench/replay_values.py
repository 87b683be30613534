"""What a replay sends, and what must come of it: rows that any rank can make for any other, without talking to it.

Rows are taken from a small table by call, rank and row; where a recording has payload, from there.
"""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

from epcy import reference
from epcy.logfmt import cast_from_logfmt, cast_to_logfmt
from epcy.recording import Call, Recording
from epcy.recording.calls import Array
from epcy.routing import Routing

__all__ = ["DTYPES", "Values"]

DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
NUM_ROWS = 251  # of the table: a prime, so that steps through it meet every row
SENT, RETURNED, BIAS = 1, 2, 3


class Values:
    """The values of a recording's calls, on the ranks that replay it."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.routing = lru_cache(maxsize=64)(self._routing)

    # ---- rows

    @cache  # noqa: B019 - lives as long as its replay
    def _table(self, hidden: int, kind: str) -> tuple[Array, ...]:
        rng = np.random.default_rng(hidden)
        rows = rng.random((NUM_ROWS, hidden), np.float32) - np.float32(0.5)
        if kind == "fp8":
            return reference.cast_to_fp8(rows) if hidden % 128 == 0 else _loose_fp8(rng, hidden)
        return (rows.astype(DTYPES[kind]),)

    def _rows(self, number: int, what: int, kind: str, rank: int, at: Array) -> tuple[Array, ...]:
        hidden = self.recording.buffers[self.recording.calls[number].buffer].options["hidden"]
        places = (number * 97 + what * 31 + rank * 59 + at * 17) % NUM_ROWS
        return tuple(part[places] for part in self._table(hidden, kind))

    def _payload(self, call: Call, name: str, rank: int) -> Array | None:
        place = call.payload.get(name, [-1] * len(call.num_tokens))[rank]
        return None if place < 0 else self.recording.payloads[place]

    def sent(self, number: int, rank: int, at: Array | None = None) -> tuple[Array, ...]:
        """Return the rows `at` (default all) that a dispatch of `rank` sends: (x,), or (payload, scales)."""
        call = self.recording.calls[number]
        kind, num_tokens = call.args[rank]["dtype"], max(call.num_tokens[rank], 0)
        at = np.arange(num_tokens) if at is None else at
        x, scales = self._payload(call, "x", rank), self._payload(call, "scales", rank)
        if x is None or len(x) != num_tokens or (kind == "fp8") != (scales is not None):
            return self._rows(number, SENT, kind, rank, at)
        if scales is not None:
            return x[at].view(np.uint8), scales[at].view(np.float32)
        if x.dtype.itemsize != DTYPES[kind].itemsize:
            return self._rows(number, SENT, kind, rank, at)
        return (x[at].view(DTYPES[kind]),)

    def returned(self, number: int, rank: int, rows: Array) -> Array:
        """Return rows of the experts of `rank` that a combine brings back."""
        call = self.recording.calls[number]
        kind, x = call.args[rank]["dtype"], self._payload(call, "x", rank)
        if x is not None and x.dtype.itemsize == DTYPES[kind].itemsize and rows.max(initial=-1) < len(x):
            found: Array = x[rows].view(DTYPES[kind])
            return found
        return self._rows(number, RETURNED, kind, rank, rows)[0]

    def bias(self, number: int, rank: int) -> list[Array]:
        call = self.recording.calls[number]
        at = np.arange(max(self.tokens_of(number)[rank], 0))
        kind, count = call.args[rank]["dtype"], call.args[rank]["num_biases"]
        return [self._rows(number, BIAS + which, kind, rank, at)[0] for which in range(count)]

    def weights(self, number: int, rank: int, num_rows: int) -> Array:
        """Return (num_rows, K) weights that a rank gives to a call."""
        call = self.recording.calls[number]
        recorded = self._payload(call, "topk_weights", rank)
        if recorded is not None and len(recorded) == num_rows and recorded.dtype == np.float32:
            return recorded
        num_topk = self.recording.buffers[call.buffer].options["num_topk"]
        return np.random.default_rng([number, rank]).random((num_rows, num_topk), np.float32)

    # ---- routing

    def root(self, number: int) -> int:
        """Return the dispatch whose routing a call uses: its own, or that of the handle it was given."""
        refers = self.recording.calls[number].refers
        return number if refers is None else self.root(refers)

    def tokens_of(self, number: int) -> list[int]:
        return self.recording.calls[self.root(number)].num_tokens

    def idx_of(self, number: int) -> list[Array]:
        """Return topk_idx of all ranks."""
        call = self.recording.calls[self.root(number)]
        return [self.recording.routing_of(call, rank) for rank in range(len(call.num_tokens))]

    def _routing(self, root: int) -> Routing:
        call, idxs = self.recording.calls[root], self.idx_of(root)
        options = self.recording.buffers[call.buffer].options
        empty = [np.empty((len(idx), 0), np.float32) for idx in idxs]
        if call.op == "low_latency_dispatch":
            return reference.low_latency_dispatch(
                empty, idxs, num_experts=options["num_experts"], use_fp8=False,
                num_max_tokens_per_rank=options["num_max_low_latency_tokens_per_rank"],
            )[1]  # fmt: skip
        return reference.dispatch(
            empty, idxs, num_experts=options["num_experts"], layout=call.args[0].get("layout") or "rank",
            expert_alignment=call.args[0].get("expert_alignment") or 1,
            num_worst_tokens=[args.get("num_worst_tokens") or None for args in call.args],
        )[1]  # fmt: skip

    # ---- sums

    def sum_of(self, number: int, rank: int) -> Array:
        """Return (T, H): what combine must give to a rank, step by step as docs/numerics.md has it."""
        call, routing = self.recording.calls[number], self.routing(self.root(number))
        args = call.args[rank]
        dtype, idx = DTYPES[args["dtype"]], routing.topk_idx[rank]
        hidden = self.recording.buffers[call.buffer].options["hidden"]
        total = np.zeros((len(idx), hidden), np.float32)
        for one in self.bias(number, rank) if call.op == "combine" else ():
            total += one.astype(np.float32)
        weights = self._weights_applied(number, rank)
        use_logfmt, ranks = bool(args.get("use_logfmt")), range(routing.num_ranks)
        with np.errstate(all="ignore"):
            for lane, other in (
                product(range(idx.shape[1]), ranks) if args.get("reduction") == "source" else ()
            ):
                self._add(total, lane, number, other, rank, weights, use_logfmt)
            for other in ranks if args.get("reduction") != "source" else ():
                if routing.layout == "rank":
                    tokens, rows = routing.rows_at(rank, other)
                    total[tokens] += self.returned(number, other, rows).astype(np.float32)
                    continue
                partial = np.zeros_like(total)
                for lane in range(idx.shape[1]):
                    self._add(partial, lane, number, other, rank, weights, False)
                total += _arrived(reference.round_to(partial, dtype), use_logfmt)
        return reference.round_to(total, dtype)

    def _weights_applied(self, number: int, rank: int) -> Array | None:
        """Return the (T, K) weights of a sum: given to the combine, or in low latency to its dispatch; None: 1."""
        call, root = self.recording.calls[number], self.root(number)
        num_tokens = max(self.tokens_of(number)[rank], 0)
        if call.args[rank]["has_weights"]:
            return self.weights(number, rank, num_tokens)
        if call.op == "low_latency_combine" and self.recording.calls[root].args[rank]["has_weights"]:
            return self.weights(root, rank, num_tokens)
        return None

    def _add(
        self,
        into: Array,
        lane: int,
        number: int,
        other: int,
        rank: int,
        weights: Array | None,
        use_logfmt: bool,
    ) -> None:
        routing = self.routing(self.root(number))
        tokens = np.flatnonzero(routing.lanes_at(rank, other)[:, lane])
        rows = _arrived(self.returned(number, other, routing.lane_row[rank][tokens, lane]), use_logfmt)
        if weights is not None:
            rows = weights[tokens, lane][:, None] * rows
        into[tokens] += rows


def _arrived(rows: Array, use_logfmt: bool) -> Array:
    """Return rows in float32, after their way in LogFMT if that is how they travel."""
    return cast_from_logfmt(*cast_to_logfmt(rows), rows.dtype) if use_logfmt else rows.astype(np.float32)


def _loose_fp8(rng: np.random.Generator, hidden: int) -> tuple[Array, Array]:
    """Any (e4m3, scales) rows of a hidden size that is no multiple of a group."""
    payload = rng.integers(0, 0x7F, (NUM_ROWS, hidden), np.uint8)
    return payload, rng.random((NUM_ROWS, -(-hidden // 128)), np.float32)
