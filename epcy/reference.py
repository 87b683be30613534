"""Dispatch and combine over all ranks at once, in plain NumPy: the specification that runs.

Every other path of epcy is compared with this file bit by bit. It is written to be checked against
docs/numerics.md line by line, so it prefers the obvious to the fast. All functions are local and
blocking, and take one entry a rank.

Why NumPy gives one answer everywhere: a ufunc rounds each float32 result to nearest even, and a product
and a sum are two ufuncs, so no multiply-add is ever fused and no sum is reassociated. (A process that
loaded a library built with -ffast-math may flush subnormals to zero; NumPy does not undo that, and such
a process is no oracle.)

Arguments that make no sense raise ValueError. An id outside -1..E-1 counts as -1 here: refusing it is
the Buffer's work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Payload: TypeAlias = "Array | tuple[Array, Array]"  # (T, H), or e4m3 bytes (T, H) with their scales

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)

# What a NaN that was computed is stored as.
CANONICAL_NAN = {BFLOAT16: 0x7FC0, FLOAT16: 0x7E00, FLOAT32: 0x7FC00000, E4M3: 0x7F}
GROUP = 128  # columns that share one scale
E4M3_MAX = np.float32(448)
AMAX_FLOOR = np.float32(1e-4)


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


@dataclass(frozen=True, eq=False)
class Received:
    """Hold what one rank receives in a dispatch; N rows.

    In worst-case mode the rows of `recv_x` past `num_recv_tokens` are unspecified (zeros here): whoever
    compares masks them. `recv_topk_idx` is -1 there and `recv_topk_weights` 0.
    """

    recv_x: Payload  # (N, H), or ((N, H) uint8, (N, ceil(H / 128)) float32)
    recv_topk_idx: Array  # int64 local expert ids: (N, K) in rank layout, (N,) in expert layout
    recv_topk_weights: Array | None  # float32, the shape of recv_topk_idx
    num_recv_tokens_per_expert: list[int] | None  # L counts; None in worst-case mode
    num_recv_tokens: int  # true count of rows, unclipped; padding included
    expert_offsets: Array | None  # (L + 1,) int64: where padded groups start; None in rank layout
    overflow: bool  # more rows were due than fit


@dataclass(frozen=True, eq=False)
class LowLatencyReceived:
    """Hold what one rank receives in a low-latency dispatch.

    Rows past ``recv_count[e]`` of expert e are unspecified (zeros here).
    """

    recv_x: Payload  # (L, R * M, H), or a pair of that in uint8 and scales (see cast_to_fp8)
    recv_count: Array  # (L,) int64


# ---------------------------------------------------------------- where a row goes


def get_dispatch_layout(
    topk_idx: Array, *, num_ranks: int, num_experts: int, ranks_per_node: int | None = None
) -> tuple[Array, Array, Array, Array]:
    """Count where the tokens of one rank go.

    Returns num_tokens_per_rank (R,), num_tokens_per_node (nodes,), num_tokens_per_expert (E,), all int64, and
    is_token_in_rank (T, R) bool. A token counts once a rank and once a node, but once a lane for an expert.
    """
    idx = _sanitised(topk_idx, num_experts)
    in_rank = _in_group(idx, num_experts // num_ranks, num_ranks)
    per_node = num_ranks if ranks_per_node is None else ranks_per_node
    in_node = _in_group(idx, num_experts // num_ranks * per_node, -(-num_ranks // per_node))
    return in_rank.sum(0), in_node.sum(0), np.bincount(idx[idx >= 0], minlength=num_experts), in_rank


def _sanitised(topk_idx: Array, num_experts: int) -> Array:
    """Return topk_idx as int64 with every bad id made -1."""
    if topk_idx.ndim != 2 or topk_idx.dtype not in (np.int32, np.int64):
        raise ValueError(f"topk_idx must be (T, K) int32 or int64, got {topk_idx.shape} {topk_idx.dtype}")
    idx = topk_idx.astype(np.int64)
    idx[(idx < 0) | (idx >= num_experts)] = -1
    return idx


def _in_group(idx: Array, experts_per_group: int, num_groups: int) -> Array:
    """Return (T, groups) bool: True where a lane of the token names an expert of the group."""
    inside = np.zeros((len(idx), num_groups), dtype=bool)
    token, lane = np.nonzero(idx >= 0)
    inside[token, idx[token, lane] // experts_per_group] = True
    return inside


def _rows_by_source(idxs: Sequence[Array], experts_per_group: int, num_groups: int) -> list[Array]:
    """Number the rows of each group from 0, one a (token, group), ordered by (source rank, source token).

    The base of source s is the number of rows of the sources before it; the place inside is the token's
    ordinal among those that the source sends to the group.
    """
    base = np.zeros(num_groups, dtype=np.int64)
    rows = []
    for idx in idxs:
        inside = _in_group(idx, experts_per_group, num_groups)
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


def _route(
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
    idxs, counts, per_expert = _counted(topk_idxs, num_ranks, num_experts)
    if layout == "rank":
        offsets = None
        rows = _rows_by_source(idxs, num_local, num_ranks)
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


def _counted(
    topk_idxs: Sequence[Array], num_ranks: int, num_experts: int
) -> tuple[list[Array], Array, Array]:
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


# ---------------------------------------------------------------- dispatch: bytes are copied


def dispatch(
    xs: Sequence[Payload],
    topk_idxs: Sequence[Array] | None,
    topk_weights: Sequence[Array] | None = None,
    *,
    num_experts: int,
    layout: str = "rank",
    expert_alignment: int = 1,
    num_worst_tokens: int | Sequence[int | None] | None = None,
    routing: Routing | None = None,
) -> tuple[list[Received], Routing]:
    """Send every token to the ranks of its experts; copied bytes never change.

    Parameters
    ----------
    xs
        One a rank: (T, H) bfloat16, float16 or float32, or a pair of e4m3 bytes (T, H) and float32 scales
        (T, ceil(H / 128)). T may differ between ranks.
    topk_idxs
        One a rank: (T, K) int32 or int64, -1 for an unused lane. None with `routing`.
    topk_weights
        None, or one a rank: (T, K) float32. Those of unused lanes are never read.
    layout
        "rank": a row a (token, rank), ordered by (source rank, token). "expert": a row a (token, lane),
        grouped by local expert, inside a group ordered by (source rank, token, lane), groups padded with
        zero rows (zero scales too) to a multiple of `expert_alignment`.
    num_worst_tokens
        None, an int, or one a rank (None or 0: that rank waits for its count). Rows at or past it are
        clipped. A smaller receive capacity clips in the same way.
    routing
        An earlier one, used again with its layout, alignment and limits.
    """
    if routing is None and topk_idxs is not None:
        routing = _route(topk_idxs, num_experts, layout, expert_alignment, num_worst_tokens)
    elif routing is None or topk_idxs is not None:
        raise ValueError("give either topk_idxs or routing")
    if routing.num_experts != num_experts:
        raise ValueError(f"routing has {routing.num_experts} experts, num_experts is {num_experts}")
    parts = [_parts(x) for x in xs]
    _check_parts(parts, routing)
    if topk_weights is not None:
        _check_weights(topk_weights, [idx.shape for idx in routing.topk_idx])
    return [_receive(rank, parts, topk_weights, routing) for rank in range(routing.num_ranks)], routing


def _receive(
    rank: int, parts: list[list[Array]], topk_weights: Sequence[Array] | None, routing: Routing
) -> Received:
    num_rows = routing.num_rows(rank)
    shape = (num_rows, routing.topk_idx[0].shape[1]) if routing.layout == "rank" else (num_rows,)
    recv = [np.zeros((num_rows, part.shape[1]), part.dtype) for part in parts[0]]
    recv_idx = np.full(shape, -1, dtype=np.int64)
    recv_weights = None if topk_weights is None else np.zeros(shape, dtype=np.float32)
    for source in range(routing.num_ranks):
        token, row = routing.rows_at(source, rank)
        for into, part in zip(recv, parts[source], strict=True):
            _bits(into)[row] = _bits(part)[token]
        token, lane = np.nonzero(routing.lanes_at(source, rank))
        row = routing.lane_row[source][token, lane]
        place = (row, lane) if routing.layout == "rank" else (row,)
        recv_idx[place] = routing.topk_idx[source][token, lane] - rank * routing.num_local_experts
        if topk_weights is not None and recv_weights is not None:
            _bits(recv_weights)[place] = _bits(topk_weights[source])[token, lane]
    waits = routing.num_worst_tokens[rank] is None
    return Received(
        recv_x=recv[0] if len(recv) == 1 else (recv[0], recv[1]),
        recv_topk_idx=recv_idx,
        recv_topk_weights=recv_weights,
        num_recv_tokens_per_expert=routing.num_tokens_per_expert[rank].tolist() if waits else None,
        num_recv_tokens=routing.num_recv_tokens[rank],
        expert_offsets=None if routing.expert_offsets is None else routing.expert_offsets[rank],
        overflow=routing.overflow(rank),
    )


def _parts(x: Payload) -> list[Array]:
    """Return the arrays of a payload that travel, each (T, columns); e4m3 as uint8."""
    if not isinstance(x, tuple):
        if x.ndim != 2 or x.dtype not in (BFLOAT16, FLOAT16, FLOAT32):
            raise ValueError(f"x must be (T, H) bfloat16, float16 or float32, got {x.shape} {x.dtype}")
        return [x]
    payload, scales = x
    if payload.ndim != 2 or payload.dtype not in (np.uint8, E4M3):
        raise ValueError(f"an e4m3 payload must be (T, H) uint8, got {payload.shape} {payload.dtype}")
    num_groups = -(-payload.shape[1] // GROUP)
    if scales.dtype != FLOAT32 or scales.shape != (len(payload), num_groups):
        want = (len(payload), num_groups)
        raise ValueError(f"scales must be {want} float32, got {scales.shape} {scales.dtype}")
    return [payload.view(np.uint8), scales]


def _check_parts(parts: list[list[Array]], routing: Routing) -> None:
    _check_lengths("xs", [len(part[0]) for part in parts], [len(idx) for idx in routing.topk_idx])
    kinds = {tuple((array.dtype, array.shape[1]) for array in part) for part in parts}
    if len(kinds) != 1:
        raise ValueError(f"xs must have one dtype and one H, got {sorted(map(str, kinds))}")


def _bits(x: Array) -> Array:
    """Return x as unsigned integers, so that moving it cannot touch a NaN; a view where x is contiguous."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


# ---------------------------------------------------------------- combine: float32 sums in one order


def combine(
    ys: Sequence[Array],
    routing: Routing,
    topk_weights: Sequence[Array] | None = None,
    *,
    bias: Sequence[Array | tuple[Array, Array] | None] | None = None,
    ranks_per_node: int | None = None,
    path: str = "direct",
) -> list[tuple[Array, Array | None]]:
    """Bring rows back to their tokens and add them up.

    Parameters
    ----------
    ys
        One a rank: (N, H) bfloat16, float16 or float32, the rows it received, worked on by its experts.
    topk_weights
        Rank layout: None, or one a receiver, (N, K) float32, which scale nothing and come back as
        combined_topk_weights. Expert layout: None (1 everywhere), or one a source, (T, K) float32, applied.
    bias
        None, or one a rank: None, (T, H) of the type of ys, or a pair of them.
    ranks_per_node, path
        "hierarchical" rounds a sum for each node before the sum over nodes; on one node it is "direct".

    Returns
    -------
    One (combined_x (T, H), combined_topk_weights (T, K) float32 or None) a rank. Clipped rows add nothing.
    """
    if path not in ("direct", "hierarchical"):
        raise ValueError(f"path must be 'direct' or 'hierarchical', got {path!r}")
    per_node = routing.num_ranks if ranks_per_node is None else ranks_per_node
    dtype = _check_rows(ys, routing)
    by_rank = routing.layout == "rank"
    if topk_weights is not None:
        num_topk = routing.topk_idx[0].shape[1]
        received = [(routing.num_rows(rank), num_topk) for rank in range(routing.num_ranks)]
        _check_weights(topk_weights, received if by_rank else [idx.shape for idx in routing.topk_idx])
    combined: list[tuple[Array, Array | None]] = []
    for source, idx in enumerate(routing.topk_idx):
        scale = None if by_rank or topk_weights is None else topk_weights[source]
        with np.errstate(all="ignore"):
            acc = np.zeros((len(idx), ys[0].shape[1]), dtype=np.float32)
            for one in _biases(bias, source, acc.shape, dtype):
                acc += one.astype(np.float32)
            if path == "direct" or per_node >= routing.num_ranks:
                _add_ranks(acc, range(routing.num_ranks), ys, routing, source, scale)
            else:
                for first in range(0, routing.num_ranks, per_node):
                    node = np.zeros_like(acc)
                    ranks = range(first, min(first + per_node, routing.num_ranks))
                    _add_ranks(node, ranks, ys, routing, source, scale)
                    # A node that the token does not reach adds +0: acc is never -0, so that changes nothing.
                    acc += round_to(node, dtype).astype(np.float32)
            out = round_to(acc, dtype)
        returned = topk_weights if by_rank else None
        combined.append((out, None if returned is None else _returned_weights(returned, routing, source)))
    return combined


def _add_ranks(
    acc: Array, ranks: Iterable[int], ys: Sequence[Array], routing: Routing, source: int, scale: Array | None
) -> None:
    """Add to acc (T, H) float32 what the ranks, in their order, hold for the tokens of `source`."""
    for rank in ranks:
        if routing.layout == "rank":
            token, row = routing.rows_at(source, rank)
            acc[token] += ys[rank][row].astype(np.float32)
            continue
        partial = np.zeros_like(acc)
        lanes = routing.lanes_at(source, rank)
        for lane in range(lanes.shape[1]):
            _add_lane(partial, lanes[:, lane], lane, ys[rank], routing, source, scale)
        # One rounding where the partial leaves the rank; the source's own rank does the same.
        acc += round_to(partial, ys[rank].dtype).astype(np.float32)


def _add_lane(
    acc: Array, used: Array, lane: int, y: Array, routing: Routing, source: int, scale: Array | None
) -> None:
    """Add w_k * y_k to acc for the tokens whose lane k is used: the product is rounded, then the sum."""
    token = np.flatnonzero(used)
    product = y[routing.lane_row[source][token, lane]].astype(np.float32)
    if scale is not None:
        product = scale[token, lane][:, None] * product
    acc[token] += product


def _returned_weights(topk_weights: Sequence[Array], routing: Routing, source: int) -> Array:
    """Return (T, K) float32: each lane's value from the rank that owns it, bytes unchanged; 0 if unused."""
    out = np.zeros(routing.topk_idx[source].shape, dtype=np.float32)
    for rank in range(routing.num_ranks):
        token, lane = np.nonzero(routing.lanes_at(source, rank))
        _bits(out)[token, lane] = _bits(topk_weights[rank])[routing.lane_row[source][token, lane], lane]
    return out


def _biases(
    bias: Sequence[Array | tuple[Array, Array] | None] | None,
    rank: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
) -> tuple[Array, ...]:
    entry = None if bias is None else bias[rank]
    entries = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    for one in entries:
        if one.shape != shape or one.dtype != dtype:
            raise ValueError(f"bias of rank {rank} must be {shape} {dtype}, got {one.shape} {one.dtype}")
    return entries


def _check_rows(ys: Sequence[Array], routing: Routing) -> np.dtype[Any]:
    if any(len(_parts(y)) != 1 for y in ys):
        raise ValueError("combine takes bfloat16, float16 or float32, not e4m3 bytes with scales")
    dtypes = {y.dtype for y in ys}
    if len(dtypes) != 1:
        raise ValueError(f"ys must have one dtype, got {sorted(map(str, dtypes))}")
    _check_lengths("ys", [len(y) for y in ys], [routing.num_rows(rank) for rank in range(routing.num_ranks)])
    dtype: np.dtype[Any] = ys[0].dtype
    return dtype


def _check_lengths(name: str, got: list[int], expected: list[int]) -> None:
    if got != expected:
        raise ValueError(f"{name} must have {expected} rows by rank, got {got}")


def _check_weights(topk_weights: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> None:
    for rank, (weights, shape) in enumerate(zip(topk_weights, shapes, strict=True)):
        if weights.shape != shape or weights.dtype != FLOAT32:
            raise ValueError(
                f"topk_weights of rank {rank} must be {shape} float32, got {weights.shape} {weights.dtype}"
            )


# ---------------------------------------------------------------- low latency: fixed slots


def low_latency_dispatch(
    xs: Sequence[Array],
    topk_idxs: Sequence[Array],
    *,
    num_experts: int,
    num_max_tokens_per_rank: int,
    use_fp8: bool = True,
    round_scale: bool = False,
    use_ue8m0: bool = False,
) -> tuple[list[LowLatencyReceived], Routing]:
    """Send every token to each of its experts, into R * M rows an expert.

    The rows of an expert are ordered by (source rank, source token). An expert that a token names twice
    gets the token once; both lanes refer to that row.
    """
    num_ranks, slots = len(xs), len(xs) * num_max_tokens_per_rank
    num_local = num_experts // num_ranks
    for rank, x in enumerate(xs):
        if len(x) > num_max_tokens_per_rank:
            most = num_max_tokens_per_rank
            raise ValueError(f"rank {rank} has {len(x)} tokens, num_max_tokens_per_rank is {most}")
    idxs, counts, _ = _counted(topk_idxs, num_ranks, num_experts)
    in_expert = _rows_by_source(idxs, 1, num_experts)
    base = [idx % num_local * slots for idx in idxs]
    rows = [np.where(row >= 0, at + row, -1) for at, row in zip(base, in_expert, strict=True)]
    recv_count = sum(_in_group(idx, 1, num_experts).sum(0) for idx in idxs)
    recv_count = np.asarray(recv_count, dtype=np.int64).reshape(num_ranks, num_local)
    routing = Routing(
        layout="low_latency",
        num_experts=num_experts,
        topk_idx=tuple(idxs),
        lane_row=tuple(rows),
        counts=counts,
        num_tokens_per_expert=tuple(recv_count),
        expert_offsets=None,
        num_recv_tokens=(num_local * slots,) * num_ranks,
        num_worst_tokens=(None,) * num_ranks,
    )
    if use_fp8:
        parts = [list(cast_to_fp8(x, round_scale=round_scale, use_ue8m0=use_ue8m0)) for x in xs]
    else:
        parts = [_parts(x) for x in xs]
    _check_parts(parts, routing)
    received = []
    for rank in range(num_ranks):
        flat = _receive(rank, parts, None, routing).recv_x
        arrays = [
            a.reshape(num_local, slots, a.shape[1]) for a in (flat if isinstance(flat, tuple) else (flat,))
        ]
        recv_x: Payload = arrays[0] if len(arrays) == 1 else (arrays[0], arrays[1])
        received.append(LowLatencyReceived(recv_x, recv_count[rank]))
    return received, routing


def low_latency_combine(
    ys: Sequence[Array], routing: Routing, topk_weights: Sequence[Array] | None, *, reduction: str = "rank"
) -> list[Array]:
    """Bring the experts' rows (L, R * M, H) back; the weights (T, K) float32 of each source are applied.

    "rank": each rank sums its lanes and rounds, the source sums over ranks and rounds: the rule of expert
    layout. "source": the source sums w_k * y_k over all K lanes ascending and rounds once.
    """
    flat = [y.reshape(-1, y.shape[-1]) for y in ys]
    if reduction == "rank":
        return [x for x, _ in combine(flat, routing, topk_weights)]
    if reduction != "source":
        raise ValueError(f"reduction must be 'rank' or 'source', got {reduction!r}")
    dtype = _check_rows(flat, routing)
    if topk_weights is not None:
        _check_weights(topk_weights, [idx.shape for idx in routing.topk_idx])
    combined = []
    for source, idx in enumerate(routing.topk_idx):
        acc = np.zeros((len(idx), flat[0].shape[1]), dtype=np.float32)
        scale = None if topk_weights is None else topk_weights[source]
        with np.errstate(all="ignore"):
            for lane in range(idx.shape[1]):
                for rank in range(routing.num_ranks):  # a lane lives on one rank: this order decides nothing
                    used = routing.lanes_at(source, rank)[:, lane]
                    _add_lane(acc, used, lane, flat[rank], routing, source, scale)
            combined.append(round_to(acc, dtype))
    return combined


# ---------------------------------------------------------------- formats


def round_to(acc_float32: Array, dtype: npt.DTypeLike) -> Array:
    """Round float32 once, to nearest even; a NaN becomes the canonical one of `dtype`.

    What is too large becomes an infinity, except in e4m3, which has none: there it becomes +-448.
    """
    dtype = np.dtype(dtype)
    if acc_float32.dtype != FLOAT32 or dtype not in CANONICAL_NAN:
        got = f"{acc_float32.dtype} to {dtype}"
        raise ValueError(f"round_to takes float32 to bfloat16, float16, float32 or e4m3, got {got}")
    with np.errstate(all="ignore"):
        value = np.clip(acc_float32, -E4M3_MAX, E4M3_MAX) if dtype == E4M3 else acc_float32
        out = value.astype(dtype, order="C")  # a copy, also from float32 to float32
    _bits(out)[np.isnan(acc_float32)] = CANONICAL_NAN[dtype]
    return out


def cast_to_fp8(x: Array, *, round_scale: bool = False, use_ue8m0: bool = False) -> tuple[Array, Array]:
    """Cast (T, H) to e4m3 with a scale for each 128 columns.

    Returns the payload (T, H) uint8 and the scales: (T, H / 128) float32, or with `use_ue8m0`
    (T, H / 512) int32 that hold the biased exponents of the scales of groups 4i..4i+3 in bytes 0..3, low
    first.
    """
    if use_ue8m0 and not round_scale:
        raise ValueError("use_ue8m0 needs round_scale: only a power of two has no mantissa to lose")
    (x,) = _parts(x)
    multiple = 4 * GROUP if use_ue8m0 else GROUP
    if x.shape[1] % multiple:
        raise ValueError(f"hidden must be a multiple of {multiple} for this cast, got {x.shape[1]}")
    groups = x.astype(np.float32).reshape(len(x), x.shape[1] // GROUP, GROUP)
    with np.errstate(all="ignore"):
        # np.max and np.maximum hand a NaN on, as the rule wants.
        amax = np.maximum(np.max(np.abs(groups), axis=2), AMAX_FLOOR)
        scales = amax / E4M3_MAX
        if round_scale:
            scales = _power_of_two_at_least(scales)
            inverse = np.float32(1) / scales
        else:
            inverse = E4M3_MAX / amax
        payload = round_to(groups * inverse[:, :, None], E4M3).view(np.uint8).reshape(x.shape)
    scales = round_to(scales, np.float32)
    if not use_ue8m0:
        return payload, scales
    exponents = (_bits(scales) >> 23).astype(np.uint8)  # the scale is positive: no sign bit
    return payload, exponents.view("<i4").astype(np.int32)


def _power_of_two_at_least(scale: Array) -> Array:
    """Return the smallest power of two >= scale, for normal scale > 0; infinity and NaN stay.

    The floor of amax keeps scale above 2e-7, and scale <= max / 448 leaves room above: nothing is lost.
    """
    bits = _bits(scale)
    # The sum carries into the exponent unless the mantissa is 0.
    up = (bits + np.uint32(0x007FFFFF)) & np.uint32(0xFF800000)
    power: Array = np.where(np.isfinite(scale), up.view(np.float32), scale)
    return power


def cast_from_fp8(payload: Array, scales: Array, dtype: npt.DTypeLike) -> Array:
    """Undo the cast: float32(payload) * scale, rounded to float32 and then once to `dtype`.

    Takes (..., H) uint8 or float8_e4m3fn, with scales (..., ceil(H / 128)) float32 or, as ue8m0,
    (..., H / 512) int32.
    """
    hidden = payload.shape[-1]
    if scales.dtype == np.int32:
        exponents = np.ascontiguousarray(scales.astype("<i4")).view(np.uint8)
        scales = (exponents.astype(np.uint32) << 23).view(np.float32)
    value = payload.view(E4M3).astype(np.float32)
    with np.errstate(all="ignore"):
        return round_to(value * np.repeat(scales, GROUP, axis=-1)[..., :hidden], dtype)
