"""How many rows go where: the routing of all ranks, cut into blocks of tokens, counted by rank and by node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from epcy.errors import ArgumentError, EpcyError
from epcy.routing import tokens_in_group

__all__ = ["Traffic", "count", "draw", "recorded"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Traffic:
    """Rows by source rank s, block c of its tokens, and destination.

    Attributes
    ----------
    to_rank : (R, C, R) int64
        Tokens, once for each destination rank.
    to_node : (R, C, nodes) int64
        Tokens, once for each destination node.
    lanes : (R, C, R) int64
        Lanes: a token as often as it has experts at the rank.
    num_tokens : (R,) int64
    """

    to_rank: Array
    to_node: Array
    lanes: Array
    num_tokens: Array

    @property
    def num_ranks(self) -> int:
        return int(self.to_rank.shape[0])

    @property
    def num_nodes(self) -> int:
        return int(self.to_node.shape[2])

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.num_nodes

    @property
    def num_blocks(self) -> int:
        return int(self.to_rank.shape[1])


def draw(
    num_tokens: int, num_experts: int, num_topk: int, seed: int, rank: int, num_groups: int, most_groups: int
) -> Array:
    """Draw topk_idx (T, K) of a rank: distinct experts by the largest of independent scores. Local.

    With `most_groups` below `num_groups` they are from the so many groups of neighbouring experts (the nodes) that have
    the largest scores of a token, as group-limited gating does it.
    """
    rng = np.random.default_rng([seed, rank])
    scores = rng.random((num_tokens, num_experts), np.float32)
    if most_groups < num_groups:
        by_group = scores.reshape(num_tokens, num_groups, -1)
        best = by_group.max(2)
        low = np.argpartition(best, num_groups - most_groups - 1, axis=1)[:, : num_groups - most_groups]
        np.put_along_axis(by_group, low[:, :, None], -1.0, axis=1)
    if num_topk == num_experts:
        return np.broadcast_to(np.arange(num_experts), scores.shape)
    chosen: Array = np.argpartition(scores, num_experts - num_topk, axis=1)[:, -num_topk:]
    return chosen


def recorded(path: Path, num_ranks: int, is_low_latency: bool) -> tuple[list[Array], int]:
    """Read topk_idx of each rank, and the number of experts, out of the first dispatch of a recording. Local.

    A recording of another number of ranks is spread over so many.

    Raises
    ------
    ArgumentError
        The file is no recording, has no such call, or its experts do not divide among the ranks.
    """
    from epcy import recording

    try:
        found = recording.spread(recording.read(path), num_ranks)
    except OSError as error:
        raise ArgumentError(f"routing: {str(path)!r} cannot be read: {error.strerror}") from None
    except EpcyError as error:
        raise ArgumentError(f"routing: {error}") from None
    op = "low_latency_dispatch" if is_low_latency else "dispatch"
    for wanted in (op, "dispatch", "low_latency_dispatch"):  # the other mode's routing is better than none
        for call in found.calls:
            if call.op == wanted and call.refers is None and max(call.routing) >= 0:
                num_experts = int(found.buffers[call.buffer].options["num_experts"])
                if found.buffers[call.buffer].num_ranks == num_ranks:
                    return [found.routing_of(call, rank) for rank in range(num_ranks)], num_experts
    raise ArgumentError(
        f"routing: {str(path)!r} has no dispatch with a routing of its own on {num_ranks} ranks"
    )


def count(topk_idx: list[Array], num_experts: int, num_nodes: int, num_blocks: int) -> Traffic:
    """Count rows; ids outside of 0..E-1 are unused lanes, and a repeated expert is a lane more. Local."""
    num_ranks = len(topk_idx)
    local, per_node = num_experts // num_ranks, num_experts // num_nodes
    shape = (num_ranks, num_blocks)
    to_rank, lanes = np.zeros((*shape, num_ranks), np.int64), np.zeros((*shape, num_ranks), np.int64)
    to_node = np.zeros((*shape, num_nodes), np.int64)
    for source, idx in enumerate(topk_idx):
        clean = np.where((idx >= 0) & (idx < num_experts), idx, -1)
        edges = np.linspace(0, len(idx), num_blocks + 1).astype(np.int64)
        in_rank, in_node = (
            tokens_in_group(clean, local, num_ranks),
            tokens_in_group(clean, per_node, num_nodes),
        )
        for block, (first, end) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
            to_rank[source, block] = in_rank[first:end].sum(0)
            to_node[source, block] = in_node[first:end].sum(0)
            used = clean[first:end][clean[first:end] >= 0]
            lanes[source, block] = np.bincount(used // local, minlength=num_ranks)
    return Traffic(to_rank, to_node, lanes, np.array([len(idx) for idx in topk_idx], np.int64))
