"""Several nodes in the specification that runs: who is a rank's partner there, and what crosses the network.

A row is a token's on its way out, or a node's (or a rank's) sum of it on its way back. Rows that stay inside a node are
not counted here. All functions are local and blocking.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from epcy.formats import Array
from epcy.routing import Routing

__all__ = ["PATHS", "crossings", "partner", "ranks_by_node"]

PATHS = ("direct", "hierarchical")


def ranks_by_node(
    num_ranks: int, ranks_per_node: int | None = None, node_of_rank: Sequence[int] | None = None
) -> list[list[int]]:
    """Return the ranks of each node, ascending; nodes ascending.

    Without `node_of_rank` a node is `ranks_per_node` ranks that follow each other (default: all), the last one may be
    smaller.
    """
    if node_of_rank is None:
        per_node = num_ranks if ranks_per_node is None else ranks_per_node
        node_of_rank = [rank // per_node for rank in range(num_ranks)]
    elif ranks_per_node is not None:
        raise ValueError("give either ranks_per_node or node_of_rank")
    if len(node_of_rank) != num_ranks:
        raise ValueError(f"node_of_rank must have {num_ranks} entries, got {len(node_of_rank)}")
    return [[r for r in range(num_ranks) if node_of_rank[r] == node] for node in sorted(set(node_of_rank))]


def partner(nodes: Sequence[Sequence[int]], rank: int, node: int) -> int:
    """Return the rank of another node that what goes there from `rank`, or comes from there, passes through.

    It has the same place among the ranks of its node, so it is its partner's partner too.
    """
    mine = next(ranks for ranks in nodes if rank in ranks)
    if len(nodes[node]) != len(mine):
        raise ValueError(f"nodes must have one size, got {[len(ranks) for ranks in nodes]}")
    return nodes[node][list(mine).index(rank)]


def crossings(routing: Routing, nodes: Sequence[Sequence[int]], path: str) -> Array:
    """Return (R, R) int64: rows that go from rank s to rank q of another node in a dispatch.

    A combine sends as many from q to s. Hierarchical: one a token and node that it has a row in, the fewest that there
    can be. Direct: one a token and rank in the rank layout; in the expert layout too, since its lanes share a copy.
    Clipped rows do not travel.
    """
    if path not in PATHS:
        raise ValueError(f"path must be 'direct' or 'hierarchical', got {path!r}")
    rows = np.zeros((routing.num_ranks, routing.num_ranks), np.int64)
    for source in range(routing.num_ranks):
        for node, ranks in enumerate(nodes):
            if source in ranks:
                continue
            reached = np.stack([routing.lanes_at(source, rank).any(axis=1) for rank in ranks])
            if path == "hierarchical":
                rows[source, partner(nodes, source, node)] = reached.any(axis=0).sum()
            else:
                rows[source, list(ranks)] = reached.sum(axis=1)
    return rows
