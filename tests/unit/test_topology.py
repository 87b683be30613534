"""Topology's arithmetic, without MPI."""

import pytest

from epcy.topology import Topology


def make(node_of_rank, hosts, cpus, rank=0):
    return Topology(rank, tuple(node_of_rank), tuple(hosts), tuple(cpus))


def test_counts():
    t = make([0, 1, 0, 1, 1], ["a", "b"], [2, 8], rank=3)
    assert (t.num_ranks, t.num_nodes, t.node, t.local_rank) == (5, 2, 1, 1)
    assert t.ranks_per_node == (2, 3)
    assert t.ranks_of_node(1) == (1, 3, 4)
    assert not t.is_uniform


@pytest.mark.parametrize(
    "nodes, hosts, cpus, crowded",
    [
        ([0, 0], ["a"], [2], False),
        ([0, 0, 0], ["a"], [2], True),
        ([0, 0, 1, 1], ["a", "a"], [3, 3], True),  # two virtual nodes share three cores
        ([0, 0, 1, 1], ["a", "b"], [2, 2], False),
    ],
)
def test_oversubscribed(nodes, hosts, cpus, crowded):
    assert make(nodes, hosts, cpus).is_oversubscribed is crowded


def test_str_is_short():
    text = str(make([0, 0, 0, 1, 0], ["a", "b"], [2, 8]))
    assert text == "5 ranks on 2 nodes\n  node 0: a, 2 cores, ranks 0-2, 4\n  node 1: b, 8 cores, ranks 3"
