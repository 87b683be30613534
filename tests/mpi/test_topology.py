"""topology.discover on any number of ranks of one machine."""

import pytest

from epcy import ArgumentError
from epcy.topology import discover


def test_one_machine(comm):
    t = discover(comm)
    assert (t.rank, t.num_ranks, t.num_nodes) == (comm.rank, comm.size, 1)
    assert t.local_rank == comm.rank
    assert t.cpus_per_node[0] >= 1
    assert not t.is_virtual


@pytest.mark.parametrize("peers", [1, 2, 3, 100])
def test_virtual_nodes(comm, peers):
    t = discover(comm, num_max_nvl_peers=peers)
    assert t.node_of_rank == tuple(r // peers for r in range(comm.size))
    assert t.is_virtual == (comm.size > peers)
    assert t.local_rank == comm.rank % peers
    assert max(t.ranks_per_node) <= peers
    assert all(reply == t.node_of_rank for reply in comm.allgather(t.node_of_rank))


def test_sub_communicator(comm, subcomm):
    part = subcomm((comm.size + 1) // 2)
    if part:
        assert discover(part).num_ranks == (comm.size + 1) // 2


def test_no_peers_is_refused_on_every_rank(comm):
    with pytest.raises(ArgumentError, match="num_max_nvl_peers.*at least 1.*0"):
        discover(comm, num_max_nvl_peers=0)
