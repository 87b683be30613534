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

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from epcy.formats import (
    AMAX_FLOOR,
    BFLOAT16,
    CANONICAL_NAN,
    E4M3,
    E4M3_MAX,
    FLOAT16,
    FLOAT32,
    GROUP,
    Array,
    Payload,
    bits_of,
    cast_from_fp8,
    cast_to_fp8,
    parts_of,
    round_to,
)
from epcy.logfmt import cast_from_logfmt, cast_to_logfmt
from epcy.reference_nodes import PATHS, crossings, partner, ranks_by_node
from epcy.routing import (
    Routing,
    counted,
    get_dispatch_layout,
    route,
    rows_by_source,
    tokens_in_group,
)

# Formats, routing and nodes belong to the specification: they are had from here too.
__all__ = [
    "dispatch",
    "combine",
    "get_dispatch_layout",
    "Routing",
    "crossings",
    "partner",
    "ranks_by_node",
    "Received",
    "low_latency_dispatch",
    "low_latency_combine",
    "LowLatencyReceived",
    "round_to",
    "cast_to_fp8",
    "cast_from_fp8",
    "cast_to_logfmt",
    "cast_from_logfmt",
    "CANONICAL_NAN",
    "BFLOAT16",
    "E4M3",
    "FLOAT16",
    "FLOAT32",
    "GROUP",
    "E4M3_MAX",
    "AMAX_FLOOR",
]


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
        routing = route(topk_idxs, num_experts, layout, expert_alignment, num_worst_tokens)
    elif routing is None or topk_idxs is not None:
        raise ValueError("give either topk_idxs or routing")
    if routing.num_experts != num_experts:
        raise ValueError(f"routing has {routing.num_experts} experts, num_experts is {num_experts}")
    parts = [parts_of(x) for x in xs]
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
            bits_of(into)[row] = bits_of(part)[token]
        token, lane = np.nonzero(routing.lanes_at(source, rank))
        row = routing.lane_row[source][token, lane]
        place = (row, lane) if routing.layout == "rank" else (row,)
        recv_idx[place] = routing.topk_idx[source][token, lane] - rank * routing.num_local_experts
        if topk_weights is not None and recv_weights is not None:
            bits_of(recv_weights)[place] = bits_of(topk_weights[source])[token, lane]
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


def _check_parts(parts: list[list[Array]], routing: Routing) -> None:
    _check_lengths("xs", [len(part[0]) for part in parts], [len(idx) for idx in routing.topk_idx])
    kinds = {tuple((array.dtype, array.shape[1]) for array in part) for part in parts}
    if len(kinds) != 1:
        raise ValueError(f"xs must have one dtype and one H, got {sorted(map(str, kinds))}")


# ---------------------------------------------------------------- combine: float32 sums in one order


def combine(
    ys: Sequence[Array],
    routing: Routing,
    topk_weights: Sequence[Array] | None = None,
    *,
    bias: Sequence[Array | tuple[Array, Array] | None] | None = None,
    ranks_per_node: int | None = None,
    node_of_rank: Sequence[int] | None = None,
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
    ranks_per_node, node_of_rank, path
        "hierarchical" rounds a sum for each node before the sum over nodes; on one node it is "direct". Nodes are
        `ranks_per_node` ranks that follow each other, or as `node_of_rank` says.

    Returns
    -------
    One (combined_x (T, H), combined_topk_weights (T, K) float32 or None) a rank. Clipped rows add nothing.
    """
    if path not in PATHS:
        raise ValueError(f"path must be 'direct' or 'hierarchical', got {path!r}")
    nodes = ranks_by_node(routing.num_ranks, ranks_per_node, node_of_rank)
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
            if path == "direct" or len(nodes) == 1:
                _add_ranks(acc, range(routing.num_ranks), ys, routing, source, scale)
            else:
                for ranks in nodes:
                    node = np.zeros_like(acc)
                    _add_ranks(node, ranks, ys, routing, source, scale)
                    # A node that the token does not reach adds +0: acc is never -0, so that changes nothing.
                    acc += round_to(node, dtype).astype(np.float32)
            out = round_to(acc, dtype)
        returned = topk_weights if by_rank else None
        combined.append((out, None if returned is None else _returned_weights(returned, routing, source)))
    return combined


def _add_ranks(
    acc: Array,
    ranks: Iterable[int],
    ys: Sequence[Array],
    routing: Routing,
    source: int,
    scale: Array | None,
    use_logfmt: bool = False,
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
        acc += _arrived(round_to(partial, ys[rank].dtype), use_logfmt)


def _arrived(rows: Array, use_logfmt: bool) -> Array:
    """Return rows as float32, after their way in LogFMT if `use_logfmt`."""
    return cast_from_logfmt(*cast_to_logfmt(rows), rows.dtype) if use_logfmt else rows.astype(np.float32)


def _add_lane(
    acc: Array,
    used: Array,
    lane: int,
    y: Array,
    routing: Routing,
    source: int,
    scale: Array | None,
    use_logfmt: bool = False,
) -> None:
    """Add w_k * y_k to acc for the tokens whose lane k is used: the product is rounded, then the sum."""
    token = np.flatnonzero(used)
    product = _arrived(y[routing.lane_row[source][token, lane]], use_logfmt)
    if scale is not None:
        product = scale[token, lane][:, None] * product
    acc[token] += product


def _returned_weights(topk_weights: Sequence[Array], routing: Routing, source: int) -> Array:
    """Return (T, K) float32: each lane's value from the rank that owns it, bytes unchanged; 0 if unused."""
    out = np.zeros(routing.topk_idx[source].shape, dtype=np.float32)
    for rank in range(routing.num_ranks):
        token, lane = np.nonzero(routing.lanes_at(source, rank))
        bits_of(out)[token, lane] = bits_of(topk_weights[rank])[routing.lane_row[source][token, lane], lane]
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
    if any(len(parts_of(y)) != 1 for y in ys):
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
    masked: Sequence[Collection[int]] | None = None,
) -> tuple[list[LowLatencyReceived], Routing]:
    """Send every token to each of its experts, into R * M rows an expert.

    The rows of an expert are ordered by (source rank, source token). An expert that a token names twice
    gets the token once; both lanes refer to that row. `masked` are the ranks that each rank goes on without: where
    one of two has masked the other, nothing goes between them, and those lanes have no row.
    """
    num_ranks, slots = len(xs), len(xs) * num_max_tokens_per_rank
    num_local = num_experts // num_ranks
    for rank, x in enumerate(xs):
        if len(x) > num_max_tokens_per_rank:
            most = num_max_tokens_per_rank
            raise ValueError(f"rank {rank} has {len(x)} tokens, num_max_tokens_per_rank is {most}")
    given, counts, _ = counted(topk_idxs, num_ranks, num_experts)
    idxs = given
    if masked is not None:
        idxs = [_without(idx, s, masked, num_local) for s, idx in enumerate(given)]
        _, counts, _ = counted(idxs, num_ranks, num_experts)
    in_expert = rows_by_source(idxs, 1, num_experts)
    base = [idx % num_local * slots for idx in idxs]
    rows = [np.where(row >= 0, at + row, -1) for at, row in zip(base, in_expert, strict=True)]
    recv_count = sum(tokens_in_group(idx, 1, num_experts).sum(0) for idx in idxs)
    recv_count = np.asarray(recv_count, dtype=np.int64).reshape(num_ranks, num_local)
    routing = Routing(
        layout="low_latency",
        num_experts=num_experts,
        topk_idx=tuple(given),
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
        parts = [parts_of(x) for x in xs]
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


def _without(idx: Array, source: int, masked: Sequence[Collection[int]], num_local: int) -> Array:
    """Return topk_idx with -1 for the lanes that a mask drops."""
    kept: Array = idx.copy()
    for rank in range(len(masked)):
        if rank in masked[source] or source in masked[rank]:
            kept[idx // num_local == rank] = -1
    return kept


def low_latency_combine(
    ys: Sequence[Array],
    routing: Routing,
    topk_weights: Sequence[Array] | None,
    *,
    reduction: str = "rank",
    use_logfmt: bool = False,
    renormalize: bool = False,
) -> list[Array]:
    """Bring the experts' rows (L, R * M, H) back; the weights (T, K) float32 of each source are applied.

    "rank": each rank sums its lanes and rounds, the source sums over ranks and rounds: the rule of expert
    layout. "source": the source sums w_k * y_k over all K lanes ascending and rounds once. With `use_logfmt` the
    rows that travel, rounded sums of a rank or the experts' own, are cast to LogFMT-10 and back before they are
    added, those of the source's own rank too. Lanes that a mask dropped add nothing; with `renormalize` the weights of
    such a token's other lanes are multiplied by (sum of all) / (sum of those that are left): float32, lanes in order.
    """
    flat = [y.reshape(-1, y.shape[-1]) for y in ys]
    if reduction not in ("rank", "source"):
        raise ValueError(f"reduction must be 'rank' or 'source', got {reduction!r}")
    dtype = _check_rows(flat, routing)
    if topk_weights is not None:
        _check_weights(topk_weights, [idx.shape for idx in routing.topk_idx])
    combined = []
    for source, idx in enumerate(routing.topk_idx):
        acc = np.zeros((len(idx), flat[0].shape[1]), dtype=np.float32)
        scale = None if topk_weights is None else topk_weights[source]
        if renormalize:
            scale = _renormalized(idx >= 0, routing.lane_row[source] >= 0, scale)
        with np.errstate(all="ignore"):
            if reduction == "rank":
                _add_ranks(acc, range(routing.num_ranks), flat, routing, source, scale, use_logfmt)
            for lane in range(idx.shape[1] if reduction == "source" else 0):
                for rank in range(routing.num_ranks):  # a lane lives on one rank: this order decides nothing
                    used = routing.lanes_at(source, rank)[:, lane]
                    _add_lane(acc, used, lane, flat[rank], routing, source, scale, use_logfmt)
            combined.append(round_to(acc, dtype))
    return combined


def _renormalized(used: Array, left: Array, weights: Array | None) -> Array:
    """Return weights (T, K) float32 that make up for lanes that are used and not left."""
    out = np.ones(used.shape, FLOAT32) if weights is None else weights.astype(FLOAT32)
    total, kept = np.zeros(len(used), FLOAT32), np.zeros(len(used), FLOAT32)
    with np.errstate(all="ignore"):
        for lane in range(used.shape[1]):
            total = np.where(used[:, lane], total + out[:, lane], total)
            kept = np.where(left[:, lane], kept + out[:, lane], kept)
        scaled = out * (total / kept)[:, None]
    lost = (used & ~left).any(1) & (kept != 0)
    result: Array = np.where(lost[:, None] & left, scaled, out)
    return result
