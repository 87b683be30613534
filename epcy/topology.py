"""Which ranks share a node: the groups between which a token takes the fast way."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epcy.errors import ArgumentError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Topology", "available_cpus", "discover"]


@dataclass(frozen=True)
class Topology:
    """The nodes of a communicator, as one rank sees them.

    A node is a group of ranks that share memory (joined by NVLink on GPUs). With `num_max_nvl_peers` below
    the ranks of a machine, a machine holds several *virtual* nodes. Nodes are numbered by their lowest rank.

    Attributes
    ----------
    rank : int
        This rank.
    num_ranks, num_nodes : int
    node_of_rank : tuple of int
        The node of each rank, length num_ranks.
    hostnames : tuple of str
        The host of each node, length num_nodes; virtual nodes of one machine repeat it.
    cpus_per_node : tuple of int
        The cores that the ranks of each node may run on together; virtual nodes of one machine share them.
    is_virtual : bool
        Whether some machine holds several nodes.
    num_machines : int
    low_latency_transport : str, optional
        What carries the low-latency calls of the Buffer that this is of; None without the mode.
    transport : str, optional
        What carries rows between nodes, and on which path (nvshmem).
    """

    rank: int
    node_of_rank: tuple[int, ...]
    hostnames: tuple[str, ...]
    cpus_per_node: tuple[int, ...]
    is_virtual: bool = False
    num_machines: int = 1
    low_latency_transport: str | None = None
    transport: str | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.node_of_rank)

    @property
    def num_nodes(self) -> int:
        return len(self.hostnames)

    @property
    def node(self) -> int:
        """The node of this rank."""
        return self.node_of_rank[self.rank]

    @property
    def local_rank(self) -> int:
        """The place of this rank among the ranks of its node."""
        return self.ranks_of_node(self.node).index(self.rank)

    @property
    def ranks_per_node(self) -> tuple[int, ...]:
        """The number of ranks of each node, length num_nodes."""
        return tuple(self.node_of_rank.count(node) for node in range(self.num_nodes))

    @property
    def is_uniform(self) -> bool:
        """Whether every node has the same number of ranks."""
        return len(set(self.ranks_per_node)) == 1

    @property
    def is_oversubscribed(self) -> bool:
        """Whether some machine has more ranks than cores for them: waits had better yield soon."""
        ranks: dict[str, int] = {}
        cpus: dict[str, int] = {}
        for host, num_ranks, num_cpus in zip(
            self.hostnames, self.ranks_per_node, self.cpus_per_node, strict=True
        ):
            ranks[host] = ranks.get(host, 0) + num_ranks
            cpus[host] = num_cpus
        return any(ranks[host] > cpus[host] for host in ranks)

    def ranks_of_node(self, node: int) -> tuple[int, ...]:
        """Return the ranks of a node, ascending."""
        return tuple(rank for rank, its_node in enumerate(self.node_of_rank) if its_node == node)

    def __str__(self) -> str:
        kind = "virtual node" if self.is_virtual else "node"
        lines = [f"{self.num_ranks} ranks on {self.num_nodes} {kind}{'s' if self.num_nodes != 1 else ''}"]
        for node, (host, cpus) in enumerate(zip(self.hostnames, self.cpus_per_node, strict=True)):
            lines.append(f"  {kind} {node}: {host}, {cpus} cores, ranks {_ranges(self.ranks_of_node(node))}")
        if self.transport is not None:
            lines.append(f"  between nodes: {self.transport}")
        if self.low_latency_transport is not None:
            lines.append(f"  low-latency calls: {self.low_latency_transport}")
        return "\n".join(lines)


def _ranges(ranks: tuple[int, ...]) -> str:
    """Write ascending numbers briefly: 0-3, 8."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ", ".join("-".join(map(str, part)) for part in parts)


def available_cpus() -> frozenset[int]:
    """Return the numbers of the cores that this process may run on.

    Local, blocking.
    """
    return frozenset(os.sched_getaffinity(0))


def discover(comm: MPI.Intracomm, num_max_nvl_peers: int | None = None) -> Topology:
    """Find the nodes of a communicator.

    Collective over `comm`, blocking.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The communicator whose ranks are placed.
    num_max_nvl_peers : int, optional
        The most ranks of one node. A machine with more is cut, in rank order, into virtual nodes of this size
        (the last may be smaller). Must be equal on all ranks. By default a machine is a node.

    Returns
    -------
    Topology
        Equal on every rank but for `rank`.

    Raises
    ------
    ArgumentError
        When `num_max_nvl_peers` is below 1.
    """
    from mpi4py import MPI

    if num_max_nvl_peers is not None and num_max_nvl_peers < 1:
        raise ArgumentError(
            f"num_max_nvl_peers: expected at least 1, got {num_max_nvl_peers} (rank {comm.rank})"
        )
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    try:
        machine = shared.bcast(comm.rank)  # named by its lowest rank: host names need not be unique
    finally:
        shared.Free()
    places = comm.allgather((machine, socket.gethostname(), available_cpus()))

    node_of_rank: list[int] = []
    members: dict[tuple[int, int], int] = {}  # (machine, which group of it) -> node
    seen: dict[int, int] = {}  # machine -> its ranks so far
    hostnames: list[str] = []
    cpus: dict[int, frozenset[int]] = {}
    machine_of_node: list[int] = []
    for machine, host, its_cpus in places:
        ordinal = seen.get(machine, 0)
        seen[machine] = ordinal + 1
        key = (machine, ordinal // num_max_nvl_peers if num_max_nvl_peers else 0)
        if key not in members:
            members[key] = len(members)
            hostnames.append(host)
            machine_of_node.append(machine)
        node_of_rank.append(members[key])
        cpus[machine] = cpus.get(machine, frozenset()) | its_cpus
    return Topology(
        rank=comm.rank,
        node_of_rank=tuple(node_of_rank),
        hostnames=tuple(hostnames),
        cpus_per_node=tuple(len(cpus[machine]) for machine in machine_of_node),
        is_virtual=len(members) > len(seen),
        num_machines=len(seen),
    )
