"""Nodes in the specification: who crosses the network where, counted by hand and by listing tokens."""

import numpy as np
import pytest

from epcy import reference


def routed(idxs, num_experts, **options):
    xs = [np.zeros((len(idx), 1), np.float32) for idx in idxs]
    return reference.dispatch(xs, idxs, num_experts=num_experts, **options)[1]


def test_nodes_are_blocks_of_ranks_or_as_told():
    assert reference.ranks_by_node(4) == [[0, 1, 2, 3]]
    assert reference.ranks_by_node(5, 2) == [[0, 1], [2, 3], [4]]
    assert reference.ranks_by_node(4, node_of_rank=[1, 0, 1, 0]) == [[1, 3], [0, 2]]
    with pytest.raises(ValueError, match="3 entries, got 2"):
        reference.ranks_by_node(3, node_of_rank=[0, 1])
    with pytest.raises(ValueError, match="either"):
        reference.ranks_by_node(2, 1, [0, 1])


@pytest.mark.parametrize("node_of_rank", [[0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 2, 0, 1, 2, 0, 1, 2]])
def test_partners_are_each_other_s(node_of_rank):
    nodes = reference.ranks_by_node(9, node_of_rank=node_of_rank)
    for rank in range(9):
        for node, ranks in enumerate(nodes):
            other = reference.partner(nodes, rank, node)
            assert other in ranks and reference.partner(nodes, other, node_of_rank[rank]) == rank


def test_unequal_nodes_have_no_partners():
    with pytest.raises(ValueError, match=r"one size, got \[2, 1\]"):
        reference.partner([[0, 1], [2]], 0, 1)


def test_crossings_by_hand():
    # Four ranks of one expert in nodes {0, 1} and {2, 3}. Rank 0: a token to both ranks of the other node, one to a
    # rank there and its own, one at home, one nowhere. Rank 3: one to both ranks of node 0, twice to one of them.
    none = np.full((0, 3), -1)
    idxs = [np.array([[2, 3, -1], [3, 0, 3], [1, 0, -1], [-1, -1, -1]]), none, none, np.array([[1, 0, 1]])]
    nodes = reference.ranks_by_node(4, 2)
    for layout in ("rank", "expert"):
        routing = routed(idxs, 4, layout=layout)
        hierarchical = reference.crossings(routing, nodes, "hierarchical")
        assert hierarchical.tolist() == [[0, 0, 2, 0], [0] * 4, [0] * 4, [0, 1, 0, 0]]
        direct = reference.crossings(routing, nodes, "direct")
        assert direct.tolist() == [[0, 0, 1, 2], [0] * 4, [0] * 4, [1, 1, 0, 0]]
    with pytest.raises(ValueError, match="path"):
        reference.crossings(routing, nodes, "scenic")


def test_clipped_rows_do_not_cross():
    idxs = [np.array([[2, 3], [2, -1], [2, -1]]), np.array([[3, -1]])] + [np.full((0, 2), -1)] * 2
    clipped = routed(idxs, 4, num_worst_tokens=[9, 9, 1, 1])
    nodes = reference.ranks_by_node(4, 2)
    assert reference.crossings(clipped, nodes, "hierarchical")[:2].tolist() == [[0, 0, 1, 0], [0] * 4]
    assert reference.crossings(clipped, nodes, "direct")[:2].tolist() == [[0, 0, 1, 1], [0] * 4]


@pytest.mark.parametrize("node_of_rank", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 2, 3], [0, 0, 0, 0]])
def test_hierarchical_crossings_are_the_fewest(node_of_rank):
    rng = np.random.default_rng(7)
    idxs = [rng.integers(-1, 8, (20, 3)) for _ in range(4)]
    routing, nodes = routed(idxs, 8), reference.ranks_by_node(4, node_of_rank=node_of_rank)
    for source, idx in enumerate(idxs):
        pairs = {(t, node_of_rank[e // 2]) for t, row in enumerate(idx.tolist()) for e in row if e >= 0}
        fewest = len([1 for _, node in pairs if node != node_of_rank[source]])
        assert reference.crossings(routing, nodes, "hierarchical")[source].sum() == fewest
