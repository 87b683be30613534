"""The ways of rows through the machine: what each operation asks of SMs, NVLink and NICs, and in which order.

direct        a row goes from its rank to the destination rank, over NVLink inside a node, over the NIC between nodes.
hierarchical  between nodes a row goes once to the destination node, to the rank of the same place in it (the same
              rail), which forwards it over NVLink; combine is the mirror: that rank pulls and sums the node's rows, and
              one row returns.
expert        as direct, but one copy for each lane instead of one for each destination rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from epcy.simulate.engine import Simulation
from epcy.simulate.machines import LINE_BYTES, LINE_DATA, Machine
from epcy.simulate.traffic import Traffic

__all__ = ["PATHS", "Cluster", "combine", "dispatch", "low_latency_combine", "low_latency_dispatch"]

PATHS = ("direct", "hierarchical", "expert")


@dataclass(frozen=True)
class Rank:
    """The servers of a rank."""

    sms: int  # the SMs of a call
    memory: int  # all SMs together
    push: int  # NVLink: rows that leave by stores
    pull: int  # rows that leave by loads of the peers
    arrive: int
    send: int  # the NIC
    receive: int


class Cluster:
    """All ranks' servers in one simulation."""

    def __init__(self, machine: Machine, num_ranks: int, num_sms: int, is_in_lines: bool = True) -> None:
        self.line_share = LINE_BYTES / LINE_DATA if is_in_lines else 1.0
        self.simulation = simulation = Simulation()
        self.machine = machine
        most = max(machine.push_gbps, machine.pull_gbps)
        self.ranks = [
            Rank(
                sms=simulation.server(machine.sm_gbps, num_sms),
                memory=simulation.server(machine.copy_gbps),
                push=simulation.server(machine.push_gbps),
                pull=simulation.server(machine.pull_gbps),
                arrive=simulation.server(most),
                send=simulation.server(
                    machine.nic_gbps, delay_us=machine.nic_us, item_us=machine.message_ns / 1e3
                ),
                receive=simulation.server(machine.nic_gbps),
            )
            for _ in range(num_ranks)
        ]

    def add(
        self,
        way: tuple[int, ...],
        rows: int,
        row_bytes: float | tuple[float, ...],
        after: tuple[int, ...] = (),
    ) -> int:
        each = row_bytes if isinstance(row_bytes, tuple) else (row_bytes,) * len(way)
        return self.simulation.piece(way, tuple(round(rows * b) for b in each), rows, after)


def pairs(traffic: Traffic) -> Iterator[tuple[int, int, int]]:
    """Give (block, source, other rank), in the order in which ranks take them: the next rank first, oneself last."""
    for block in range(traffic.num_blocks):
        for ahead in [*range(1, traffic.num_ranks), 0]:
            for source in range(traffic.num_ranks):
                yield block, source, (source + ahead) % traffic.num_ranks


def rows_of(traffic: Traffic, path: str, source: int, block: int, rank: int) -> int:
    return int((traffic.lanes if path == "expert" else traffic.to_rank)[source, block, rank])


def rail(traffic: Traffic, rank: int, node: int) -> int:
    """The rank of `node` in the same place as `rank` in its own."""
    return node * traffic.ranks_per_node + rank % traffic.ranks_per_node


def other_nodes(traffic: Traffic) -> Iterator[tuple[int, int, int]]:
    """Give (block, source, other node)."""
    for block in range(traffic.num_blocks):
        for ahead in range(1, traffic.num_nodes):
            for source in range(traffic.num_ranks):
                yield block, source, (source // traffic.ranks_per_node + ahead) % traffic.num_nodes


def dispatch(cluster: Cluster, traffic: Traffic, path: str, row_bytes: int) -> None:
    """Add the pieces of a high-throughput dispatch."""
    ranks, per_node = cluster.ranks, traffic.ranks_per_node
    if path == "hierarchical":  # the network first: its rows have the longer way
        for block, source, node in other_nodes(traffic):
            rows, via = int(traffic.to_node[source, block, node]), rail(traffic, source, node)
            if not rows:
                continue
            come = cluster.add((ranks[source].send, ranks[via].receive), rows, row_bytes)
            for place in range(per_node):
                rank = node * per_node + (via + 1 + place) % per_node
                forwarded = int(traffic.to_rank[source, block, rank])
                if forwarded:
                    cluster.add(inside(cluster, via, rank), forwarded, row_bytes, (come,))
    for block, source, rank in pairs(traffic):
        rows, is_near = rows_of(traffic, path, source, block, rank), source // per_node == rank // per_node
        if rows and is_near:
            cluster.add(inside(cluster, source, rank), rows, row_bytes)
        elif rows and path != "hierarchical":
            cluster.add((ranks[source].send, ranks[rank].receive), rows, row_bytes)


def inside(cluster: Cluster, source: int, rank: int) -> tuple[int, ...]:
    """Return the way of a row that is pushed inside a node."""
    if source == rank:
        return (cluster.ranks[source].sms,)
    return cluster.ranks[source].sms, cluster.ranks[source].push, cluster.ranks[rank].arrive


def pulled(cluster: Cluster, owner: int, rank: int) -> tuple[int, ...]:
    """Return the way of a row that `rank` pulls from `owner` and sums."""
    if owner == rank:
        return (cluster.ranks[rank].sms,)
    return cluster.ranks[owner].pull, cluster.ranks[rank].arrive, cluster.ranks[rank].sms


def combine(cluster: Cluster, traffic: Traffic, path: str, row_bytes: int) -> None:
    """Add the pieces of a high-throughput combine."""
    ranks, per_node = cluster.ranks, traffic.ranks_per_node
    if path == "hierarchical":
        for block, source, node in other_nodes(traffic):
            rows, via = int(traffic.to_node[source, block, node]), rail(traffic, source, node)
            partial = tuple(
                cluster.add(
                    pulled(cluster, owner, via), int(traffic.to_rank[source, block, owner]), row_bytes
                )
                for owner in (node * per_node + (via + 1 + place) % per_node for place in range(per_node))
                if traffic.to_rank[source, block, owner]
            )
            if rows:
                way = ranks[via].send, ranks[source].receive, ranks[source].sms
                cluster.add(way, rows, row_bytes, partial)
    for block, source, owner in pairs(traffic):
        rows = rows_of(traffic, path, source, block, owner)
        if rows and source // per_node == owner // per_node:
            cluster.add(pulled(cluster, owner, source), rows, row_bytes)
        elif rows and path != "hierarchical":
            way = ranks[owner].send, ranks[source].receive, ranks[source].sms
            cluster.add(way, rows, row_bytes)


def low_latency_dispatch(cluster: Cluster, traffic: Traffic, path: str, row_bytes: int) -> None:
    """Add the pieces of a low-latency dispatch: rows that come are written once for each of their lanes."""
    ranks, per_node = cluster.ranks, traffic.ranks_per_node
    line_bytes = row_bytes * cluster.line_share
    for block, source, rank in pairs(traffic):
        rows, lanes = rows_of(traffic, path, source, block, rank), int(traffic.lanes[source, block, rank])
        if not rows:
            continue
        fan_bytes = lanes * row_bytes / rows
        if source == rank:
            cluster.add((ranks[rank].memory,), rows, fan_bytes)
        elif source // per_node == rank // per_node:
            way = ranks[source].push, ranks[rank].arrive, ranks[rank].memory
            cluster.add(way, rows, (line_bytes, line_bytes, fan_bytes))
        else:
            way = ranks[source].send, ranks[rank].receive, ranks[rank].memory
            cluster.add(way, rows, (row_bytes, row_bytes, fan_bytes))


def low_latency_combine(cluster: Cluster, traffic: Traffic, path: str, row_bytes: int) -> None:
    """Add the pieces of a low-latency combine: every lane's row is read, what comes back is read and summed.

    What is read and goes to no memory here costs half of what a copy of as many bytes does.
    """
    ranks, per_node = cluster.ranks, traffic.ranks_per_node
    line_bytes = row_bytes * cluster.line_share
    for block, source, owner in pairs(traffic):
        rows, lanes = rows_of(traffic, path, source, block, owner), int(traffic.lanes[source, block, owner])
        if not rows:
            continue
        read_bytes, sum_bytes = lanes * row_bytes / rows / 2, row_bytes / 2
        if source == owner:
            cluster.add((ranks[owner].memory, ranks[owner].memory), rows, (read_bytes, sum_bytes))
        elif source // per_node == owner // per_node:
            way = ranks[owner].memory, ranks[owner].push, ranks[source].arrive, ranks[source].memory
            cluster.add(way, rows, (read_bytes, line_bytes, line_bytes, sum_bytes))
        else:
            way = ranks[owner].memory, ranks[owner].send, ranks[source].receive, ranks[source].memory
            cluster.add(way, rows, (read_bytes, row_bytes, row_bytes, sum_bytes))
