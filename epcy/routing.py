"""Where a row goes, over all ranks at once: the routing part of the specification (see epcy/reference.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from epcy.formats import Array


@dataclass(frozen=True, eq=False)
class Routing:
    """Hold what a handle knows, over all ranks.

    ``lane_row[s][t, k]`` is the row, at the rank that owns the expert, of lane k of token t of rank s; -1
    where the lane is unused or its row was clipped. In rank layout all lanes of a token on one rank name
    the same row. In low-latency layout the rows of the L local experts, R * M each, are counted through.
    """

    layout: str  # "rank", "expert", "low_latency"
    num_experts: int
    topk_idx: tuple[Array, ...]  # a source: (T, K) int64, bad ids already -1
    lane_row: tuple[Array, ...]  # a source: (T, K) int64
    counts: Array  # (R, R) int64: tokens that rank s sends to rank d, before clipping
    num_tokens_per_expert: tuple[Array, ...]  # a receiver: (L,) int64, no padding, before clipping
    expert_offsets: tuple[Array, ...] | None  # a receiver: (L + 1,) int64; expert layout
    num_recv_tokens: tuple[int, ...]  # a receiver: true count of rows (with padding), before clipping
    num_worst_tokens: tuple[int | None, ...]  # a receiver: its limit, None where the host waits for the count

    @property
    def num_ranks(self) -> int:
        return len(self.topk_idx)

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    def num_rows(self, rank: int) -> int:
        """Return N, the rows of the arrays that `rank` receives into."""
        limit = self.num_worst_tokens[rank]
        return self.num_recv_tokens[rank] if limit is None else limit

    def overflow(self, rank: int) -> bool:
        """Say whether rows for `rank` were clipped."""
        return self.num_recv_tokens[rank] > self.num_rows(rank)

    def lanes_at(self, source: int, rank: int) -> Array:
        """Return (T, K) bool: the lanes of `source` that have a row at `rank`."""
        mask: Array = (self.topk_idx[source] // self.num_local_experts == rank) & (self.lane_row[source] >= 0)
        return mask

    def rows_at(self, source: int, rank: int) -> tuple[Array, Array]:
        """Return (token, row), one pair for each distinct row that `source` has at `rank`, rows ascending."""
        token, lane = np.nonzero(self.lanes_at(source, rank))
        row, first = np.unique(self.lane_row[source][token, lane], return_index=True)
        return token[first], row


def get_dispatch_layout(
    topk_idx: Array, *, num_ranks: int, num_experts: int, ranks_per_node: int | None = None
) -> tuple[Array, Array, Array, Array]:
    """Count where the tokens of one rank go.

    Returns num_tokens_per_rank (R,), num_tokens_per_node (nodes,), num_tokens_per_expert (E,), all int64, and
    is_token_in_rank (T, R) bool. A token counts once a rank and once a node, but once a lane for an expert.
    """
    idx = _sanitised(topk_idx, num_experts)
    in_rank = tokens_in_group(idx, num_experts // num_ranks, num_ranks)
    per_node = num_ranks if ranks_per_node is None else ranks_per_node
    in_node = tokens_in_group(idx, num_experts // num_ranks * per_node, -(-num_ranks // per_node))
    return in_rank.sum(0), in_node.sum(0), np.bincount(idx[idx >= 0], minlength=num_experts), in_rank


def _sanitised(topk_idx: Array, num_experts: int) -> Array:
    """Return topk_idx as int64 with every bad id made -1."""
    if topk_idx.ndim != 2 or topk_idx.dtype not in (np.int32, np.int64):
        raise ValueError(f"topk_idx must be (T, K) int32 or int64, got {topk_idx.shape} {topk_idx.dtype}")
    idx = topk_idx.astype(np.int64)
    idx[(idx < 0) | (idx >= num_experts)] = -1
    return idx


def tokens_in_group(idx: Array, experts_per_group: int, num_groups: int) -> Array:
    """Return (T, groups) bool: True where a lane of the token names an expert of the group."""
    inside = np.zeros((len(idx), num_groups), dtype=bool)
    token, lane = np.nonzero(idx >= 0)
    inside[token, idx[token, lane] // experts_per_group] = True
    return inside


def rows_by_source(idxs: Sequence[Array], experts_per_group: int, num_groups: int) -> list[Array]:
    """Number the rows of each group from 0, one a (token, group), ordered by (source rank, source token).

    The base of source s is the number of rows of the sources before it; the place inside is the token's
    ordinal among those that the source sends to the group.
    """
    base = np.zeros(num_groups, dtype=np.int64)
    rows = []
    for idx in idxs:
        inside = tokens_in_group(idx, experts_per_group, num_groups)
        row = base + np.cumsum(inside, axis=0) - 1
        group = np.maximum(idx, 0) // experts_per_group  # a lane of -1 reads group 0 and is masked
        rows.append(np.where(idx >= 0, np.take_along_axis(row, group, axis=1), -1))
        base = base + inside.sum(0)
    return rows


def _rows_by_lane(idxs: Sequence[Array], num_experts: int) -> list[Array]:
    """Number the rows of each expert from 0, one a (token, lane), ordered by (source, token, lane)."""
    flat = np.concatenate([idx.ravel() for idx in idxs])
    used = np.flatnonzero(flat >= 0)
    # The sort is stable, so inside an expert the order stays that of `flat`: source, token, lane.
    by_expert = used[np.argsort(flat[used], kind="stable")]
    num = np.bincount(flat[used], minlength=num_experts)
    first = np.cumsum(num) - num
    rows = np.full(flat.shape, -1, dtype=np.int64)
    rows[by_expert] = np.arange(len(used)) - first[flat[by_expert]]
    ends = np.cumsum([idx.size for idx in idxs])[:-1]
    return [row.reshape(idx.shape) for row, idx in zip(np.split(rows, ends), idxs, strict=True)]


def route(
    topk_idxs: Sequence[Array],
    num_experts: int,
    layout: str,
    expert_alignment: int,
    num_worst_tokens: int | Sequence[int | None] | None,
) -> Routing:
    num_ranks = len(topk_idxs)
    if layout not in ("rank", "expert"):
        raise ValueError(f"layout must be 'rank' or 'expert', got {layout!r}")
    if expert_alignment < 1:
        raise ValueError(f"expert_alignment must be at least 1, got {expert_alignment}")
    limits = _limits(num_worst_tokens, num_ranks)
    num_local = num_experts // num_ranks
    idxs, counts, per_expert = counted(topk_idxs, num_ranks, num_experts)
    if layout == "rank":
        offsets = None
        rows = rows_by_source(idxs, num_local, num_ranks)
        num_recv = counts.sum(0)
    else:
        padded = -(-per_expert // expert_alignment) * expert_alignment
        offsets = np.zeros((num_ranks, num_local + 1), dtype=np.int64)
        np.cumsum(padded, axis=1, out=offsets[:, 1:])
        start = offsets[:, :-1].ravel()  # where the group of each of the E experts starts at its rank
        in_group = _rows_by_lane(idxs, num_experts)
        rows = [np.where(idx >= 0, start[idx] + row, -1) for idx, row in zip(idxs, in_group, strict=True)]
        num_recv = offsets[:, -1]

    # A row at or past the receiver's limit is not sent.
    limit = np.array([n if w is None else w for n, w in zip(num_recv, limits, strict=True)], dtype=np.int64)
    rows = [np.where(row < limit[idx // num_local], row, -1) for idx, row in zip(idxs, rows, strict=True)]
    return Routing(
        layout=layout,
        num_experts=num_experts,
        topk_idx=tuple(idxs),
        lane_row=tuple(rows),
        counts=counts,
        num_tokens_per_expert=tuple(per_expert),
        expert_offsets=None if offsets is None else tuple(offsets),
        num_recv_tokens=tuple(int(n) for n in num_recv),
        num_worst_tokens=limits,
    )


def _limits(num_worst_tokens: int | Sequence[int | None] | None, num_ranks: int) -> tuple[int | None, ...]:
    """Return a limit a rank; 0, which is how the Buffer says "no worst-case mode", becomes None."""
    if num_worst_tokens is None or isinstance(num_worst_tokens, int):
        num_worst_tokens = [num_worst_tokens] * num_ranks
    if len(num_worst_tokens) != num_ranks or any((limit or 0) < 0 for limit in num_worst_tokens):
        raise ValueError(f"num_worst_tokens must be one or {num_ranks} ints from 0, got {num_worst_tokens}")
    return tuple(int(limit) if limit else None for limit in num_worst_tokens)


def counted(topk_idxs: Sequence[Array], num_ranks: int, num_experts: int) -> tuple[list[Array], Array, Array]:
    """Return the sanitised ids, counts (R, R) of tokens and (R, L) of lanes."""
    if num_experts <= 0 or num_experts % num_ranks:
        raise ValueError(f"num_experts must be a positive multiple of {num_ranks} ranks, got {num_experts}")
    if len({idx.shape[1:] for idx in topk_idxs}) != 1:
        raise ValueError(f"topk_idxs must have one K, got shapes {[idx.shape for idx in topk_idxs]}")
    layouts = [get_dispatch_layout(idx, num_ranks=num_ranks, num_experts=num_experts) for idx in topk_idxs]
    counts = np.stack([per_rank for per_rank, _, _, _ in layouts]).astype(np.int64)
    per_expert = sum(per_expert for _, _, per_expert, _ in layouts)
    idxs = [_sanitised(idx, num_experts) for idx in topk_idxs]
    return idxs, counts, np.asarray(per_expert, dtype=np.int64).reshape(num_ranks, -1)
