"""One drawing of every rank's tokens and routing, and what this rank must get from it, in the Buffer's own memory.

Where rows lie is asked of epcy.reference, on the host and for rows without columns; the rows themselves are drawn
again where they are compared (see draws.py), and sums follow docs/numerics.md step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from epcy import reference
from epcy.bench import draws
from epcy.bench.workload import DTYPES, Shape, draw_topk_idx, num_scales
from epcy.logfmt import cast_from_logfmt, cast_to_logfmt

COMBINED = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "fp8": "bf16"}  # what comes back for each payload


@dataclass(frozen=True)
class Setting:
    """What all drawings of a line share."""

    xp: Any
    shape: Shape
    routing: str
    mode: str  # "ht" or "ll"
    layout: str
    alignment: int
    reduction: str  # of low latency: "rank" or "source"
    rank: int
    size: int
    round_scale: bool = False
    use_ue8m0: bool = False
    use_logfmt: bool = False

    @property
    def sent_row_bytes(self) -> int:
        """Return the bytes of a row that dispatch moves, scales included."""
        return self.shape.row_bytes - 3 * num_scales(self.shape.hidden) * self.use_ue8m0

    @property
    def returned_row_bytes(self) -> int:
        """Return the bytes of a row that combine moves; LogFMT: 10 bits an element, an exponent for each 128."""
        if self.use_logfmt:
            return self.shape.hidden * 10 // 8 + num_scales(self.shape.hidden)
        return self.shape.returned_row_bytes


@dataclass(frozen=True)
class Received:
    """What a dispatch must bring: rows ``where`` (None: 0, 1, ...) of each part of recv_x, and the lanes."""

    parts: list[Any]
    where: Any
    topk_idx: Any = None
    topk_weights: Any = None
    counts: Any = None


class DataSet:
    """All ranks' inputs of one call, by three seeds: of the routing, of the tokens, of the experts' output."""

    def __init__(self, setting: Setting, routing_seed: int, token_seed: int, output_seed: int) -> None:
        self.setting, self.token_seed, self.output_seed = setting, token_seed, output_seed
        xp, shape = setting.xp, setting.shape
        self.all_idx, self.all_weights = [], []
        for rank in range(setting.size):
            rng = np.random.default_rng([routing_seed, rank])
            self.all_idx.append(draw_topk_idx(rng, shape, setting.routing, rank))
            self.all_weights.append(rng.random(self.all_idx[-1].shape, np.float32))
        empty = [np.empty((shape.num_tokens, 0), np.float32)] * setting.size
        self.lanes: reference.Received | None = None
        if setting.mode == "ll":
            received, self.routing = reference.low_latency_dispatch(
                empty,
                self.all_idx,
                num_experts=shape.num_experts,
                num_max_tokens_per_rank=shape.num_tokens,
                use_fp8=False,
            )
            self.counts = received[setting.rank].recv_count
        else:
            lanes, self.routing = reference.dispatch(
                empty,
                self.all_idx,
                self.all_weights,
                num_experts=shape.num_experts,
                layout=setting.layout,
                expert_alignment=setting.alignment,
            )
            self.lanes = lanes[setting.rank]
        self.num_rows = self.routing.num_rows(setting.rank)
        self.topk_idx = xp.asarray(self.all_idx[setting.rank])
        self.topk_weights = xp.asarray(self.all_weights[setting.rank])
        self.x = self.input(setting.rank)

    # ---- rows drawn

    def input(self, source: int) -> tuple[Any, ...]:
        """Draw what ``source`` gives to dispatch: (x,), or (payload, scales) for fp8; low latency casts by itself."""
        xp, shape, seed = self.setting.xp, self.setting.shape, draws.seed_of(self.token_seed, source)
        tokens = xp.arange(shape.num_tokens)
        if shape.dtype != "fp8" or self.setting.mode == "ll":
            return (draws.draw_rows(xp, seed, tokens, shape.hidden, COMBINED[shape.dtype]),)
        return (
            draws.draw_rows(xp, seed, tokens, shape.hidden, "fp8"),
            draws.draw_scales(xp, seed, tokens, shape.hidden),
        )

    def sent(self, source: int) -> tuple[Any, ...]:
        """Return the parts that travel from ``source``."""
        parts = self.x if source == self.setting.rank else self.input(source)
        if self.setting.mode == "ht" or self.setting.shape.dtype != "fp8":
            return parts
        xp = self.setting.xp
        payload, scales = reference.cast_to_fp8(
            self._on_host(parts[0]), round_scale=self.setting.round_scale, use_ue8m0=self.setting.use_ue8m0
        )
        return xp.asarray(payload), xp.asarray(scales)

    def _on_host(self, rows: Any) -> Any:
        """Return bfloat16 rows as an array of NumPy."""
        bits = rows.view(np.uint16)
        return (bits if self.setting.xp is np else bits.get()).view(draws.BFLOAT16)

    def _arrived(self, rows: Any) -> Any:
        """Return what rows are, in float32, after the way that they travel in a combine."""
        if not self.setting.use_logfmt:
            return draws.to_float32(self.setting.xp, rows)
        return self.setting.xp.asarray(cast_from_logfmt(*cast_to_logfmt(self._on_host(rows)), draws.BFLOAT16))

    def output(self, rank: int, rows: Any) -> Any:
        """Draw what the experts of ``rank`` return for these rows."""
        setting = self.setting
        seed = draws.seed_of(self.output_seed, rank, 1)
        return draws.draw_rows(setting.xp, seed, rows, setting.shape.hidden, COMBINED[setting.shape.dtype])

    # ---- what must come

    @cached_property
    def rows_here(self) -> Any:
        """Return the numbers of the rows that hold a token here, ascending by source."""
        setting = self.setting
        return np.concatenate([self.routing.rows_at(s, setting.rank)[1] for s in range(setting.size)])

    @cached_property
    def received(self) -> Received:
        """Return what dispatch must bring to this rank."""
        setting, xp = self.setting, self.setting.xp
        places = [self.routing.rows_at(source, setting.rank) for source in range(setting.size)]
        if setting.mode == "ll":  # recv_x is mostly room: only the rows that hold a token are kept
            pieces = [
                [draws.words(xp, draws.take(xp, part, tokens)) for part in self.sent(source)]
                for source, (tokens, _) in enumerate(places)
            ]
            dtypes = [part.dtype for part in self.sent(setting.rank)]
            parts = [
                xp.ascontiguousarray(xp.concatenate(of_part)).view(dtype)
                for of_part, dtype in zip(zip(*pieces, strict=True), dtypes, strict=True)
            ]
            return Received(parts, xp.asarray(self.rows_here), counts=xp.asarray(self.counts))
        parts = [xp.zeros((self.num_rows, part.shape[1]), part.dtype) for part in self.x]
        for source, (tokens, rows) in enumerate(places):
            for into, part in zip(parts, self.sent(source), strict=True):
                draws.words(xp, into)[xp.asarray(rows)] = draws.words(xp, part)[xp.asarray(tokens)]
        assert self.lanes is not None  # noqa: S101  # of the other mode
        weights = xp.asarray(self.lanes.recv_topk_weights)
        return Received(parts, None, xp.asarray(self.lanes.recv_topk_idx), weights)

    @cached_property
    def sum_of_output(self) -> Any:
        """Return (T, H): what combine must give for the experts' output as ``output`` draws it."""
        return self._sum(lambda rank, tokens, rows: self.output(rank, self.setting.xp.asarray(rows)))

    @cached_property
    def sum_of_tokens(self) -> Any:
        """Return (T, H): what combine must give where the experts return the rows as they came."""
        return self._sum(lambda rank, tokens, rows: draws.take(self.setting.xp, self.x[0], tokens))

    def _sum(self, returned: Callable[[int, Any, Any], Any]) -> Any:
        """Add what ``returned(rank, tokens, rows)`` says came back, in the order of docs/numerics.md."""
        setting, xp, me = self.setting, self.setting.xp, self.setting.rank
        dtype = DTYPES[COMBINED[setting.shape.dtype]]
        total = xp.zeros((setting.shape.num_tokens, setting.shape.hidden), np.float32)
        if setting.mode == "ll" and setting.reduction == "source":
            for lane in range(setting.shape.num_topk):
                for rank in range(setting.size):
                    self._add_lane(total, rank, lane, returned, self._arrived)
            return draws.round_to(xp, total, dtype)

        def partial_of(rows: Any) -> Any:
            return draws.to_float32(xp, rows)

        for rank in range(setting.size):
            if setting.mode == "ht" and setting.layout == "rank":
                tokens, rows = self.routing.rows_at(me, rank)
                total[xp.asarray(tokens)] += draws.to_float32(xp, returned(rank, tokens, rows))
                continue
            partial = xp.zeros_like(total)
            for lane in range(setting.shape.num_topk):
                self._add_lane(partial, rank, lane, returned, partial_of)
            total += self._arrived(draws.round_to(xp, partial, dtype))
        return draws.round_to(xp, total, dtype)

    def _add_lane(
        self,
        total: Any,
        rank: int,
        lane: int,
        returned: Callable[[int, Any, Any], Any],
        in_float32: Callable[[Any], Any],
    ) -> None:
        xp, me = self.setting.xp, self.setting.rank
        tokens = np.flatnonzero(self.routing.lanes_at(me, rank)[:, lane])
        if len(tokens) == 0:
            return
        rows = in_float32(returned(rank, tokens, self.routing.lane_row[me][tokens, lane]))
        rows *= self.topk_weights[:, lane][xp.asarray(tokens)][:, None]
        total[xp.asarray(tokens)] += rows

    # ---- bytes

    def rows_between(self, source: int, rank: int, every_lane: bool = False) -> int:
        """Count the rows that travel from ``source`` to ``rank``: one for each token, or for each expert of each."""
        if every_lane:
            return len(np.unique(self.routing.lane_row[source][self.routing.lanes_at(source, rank)]))
        return int(self.routing.counts[source, rank])


def draw_sets(
    setting: Setting, seed: int, num_generations: int, num_slots: int, fixed_routing: bool
) -> list[list[DataSet]]:
    """Draw ``[generation][slot]`` data sets; all differ, but the experts' output is one a generation."""
    return [
        [
            DataSet(
                setting,
                routing_seed=draws.seed_of(seed, 0 if fixed_routing else generation, slot, 1),
                token_seed=draws.seed_of(seed, generation, slot, 2),
                output_seed=draws.seed_of(seed, generation, 3),
            )
            for slot in range(num_slots)
        ]
        for generation in range(num_generations)
    ]
