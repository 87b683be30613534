"""What crosses which kind of link: inside a node memory or NVLink, between nodes the network; and how fast that is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import comb
from typing import TYPE_CHECKING

import numpy as np

from epcy import measured
from epcy.errors import ArgumentError

if TYPE_CHECKING:
    from mpi4py import MPI

    from epcy.topology import Topology

__all__ = [
    "Crossing", "Network", "Nodes", "keep", "measure", "network_term_us", "num_latencies", "of_data_sheet",
    "rows_by_link", "stored",
]  # fmt: skip

MESSAGE_BYTES, NUM_MESSAGES = (
    1 << 18,
    2,
)  # as the host backend sends them: `node_chunk_tokens`, `num_node_buffers`


@dataclass(frozen=True)
class Nodes:
    """Where the ranks of a Buffer are, as far as the model goes by it.

    Attributes
    ----------
    num_nodes, ranks_per_node : int
        The latter of this rank's node.
    path : str
        "hierarchical" or "direct": of dispatch and combine; low-latency calls go directly.
    backend : str
    """

    num_nodes: int
    ranks_per_node: int
    path: str
    backend: str

    @property
    def inside(self) -> str:
        """Name what joins the ranks of a node."""
        return "shared memory" if self.backend == "host" else "NVLink"


@dataclass(frozen=True)
class Network:
    """The network of one rank: GB/s of payload that it sends, while others send to it; and a message's way."""

    gbps: float
    latency_us: float
    source: str


@dataclass(frozen=True)
class Crossing:
    """What a call of one rank sends over one kind of link.

    Attributes
    ----------
    kind : str
        "shared memory", "NVLink" or "network".
    num_rows, num_bytes : float
        Payload, on average over random routing.
    floor_us : float or None
        What the bytes take at the link's rate; inside a node what all rows take that the rank writes or sums, its own
        among them. None where no rate is known.
    gbps : float or None
    source : str
        Where the rate is from.
    """

    kind: str
    num_rows: float
    num_bytes: float
    floor_us: float | None
    gbps: float | None
    source: str


def rows_by_link(
    subject: str, num_tokens: int, num_ranks: int, num_experts: int, num_topk: int, nodes: Nodes
) -> tuple[float, float]:
    """Count the rows of random routing that a rank sends to others of its node, and to other nodes. Local.

    On the hierarchical path those that it passes on for its partners are among the former. A low-latency combine of the
    host backend sends a row a lane, since the source does the whole sum.
    """
    here, away = nodes.ranks_per_node - 1, num_ranks - nodes.ranks_per_node
    lanes = min(num_topk, num_experts)

    def reached(num_there: int) -> float:
        """Tokens with an expert among so many."""
        return num_tokens * (1 - comb(num_experts - num_there, lanes) / comb(num_experts, lanes))

    local = num_experts // num_ranks
    to_peer = reached(local)
    if subject == "low_latency_combine" and nodes.backend == "host":
        a_rank = num_tokens * lanes / num_ranks
        return here * a_rank, away * a_rank
    if subject.startswith("low_latency") or nodes.path == "direct":
        return here * to_peer, away * to_peer
    to_node = reached(local * nodes.ranks_per_node)
    return nodes.num_nodes * here * to_peer, (nodes.num_nodes - 1) * to_node


def num_latencies(subject: str) -> int:
    """Count the messages that a call waits for one after another: record, rows, end; low latency has one. Local."""
    return 1 if subject.startswith("low_latency") else 3


def network_term_us(nodes: Nodes, network: Network, num_bytes: float, rows_us: float) -> float:
    """Return what the network adds to `rows_us`: on the host backend all, on a GPU what outlasts it. Local."""
    us = num_bytes / network.gbps / 1e3
    return us if nodes.backend == "host" else max(0.0, us - rows_us)


# ---- constants


def of_data_sheet() -> Network:
    """Return the constants of a NIC that nobody measured here. Local."""
    from epcy.simulate.machines import MACHINES

    machine = MACHINES["h200"]
    return Network(machine.nic_gbps, machine.nic_us, "data sheet of a NIC of 400 Gb/s, nothing measured")


def stored(backend: str, num_ranks: int, num_nodes: int) -> Network | None:
    """Find what `python -m epcy calibrate` measured of this topology's network, or None. Local.

    Raises
    ------
    ArgumentError
        The file is not what calibrate writes.
    """
    key = measured.key_of(backend, num_ranks, num_nodes, "network")
    entry = measured.get("calibration", key, {"gbps": float, "latency_us": float})
    if entry is None:
        return None
    if not entry["gbps"] > 0 or not entry["latency_us"] >= 0:
        raise ArgumentError(
            f"EPCY_CACHE_DIR: calibration of {key!r}: expected a positive rate and a latency, got {entry['gbps']} and "
            f"{entry['latency_us']}; run python -m epcy calibrate again"
        )
    return Network(entry["gbps"], entry["latency_us"], "measured by calibrate")


def keep(backend: str, num_ranks: int, num_nodes: int, network: Network) -> None:
    """Keep what was measured for `stored`. Local."""
    key = measured.key_of(backend, num_ranks, num_nodes, "network")
    measured.put("calibration", key, asdict(network))


def measure(comm: MPI.Intracomm, topology: Topology, seconds: float = 1.0) -> Network:
    """Measure MPI messages between nodes, as the host backend sends them: filled, then sent, two on their way.

    Collective, blocking, for about `seconds`. All ranks send at once, each to one of the next node, so the rate is what
    a rank has when all use the network; the slowest rank's, in the middle one of several rounds.
    """
    from mpi4py import MPI

    place, num_nodes = topology.local_rank, topology.num_nodes
    ranks = [topology.ranks_of_node((topology.node + step) % num_nodes) for step in (1, -1)]
    takes_part = place < min(topology.ranks_per_node)
    to, source = (of[place] if takes_part else MPI.PROC_NULL for of in ranks)
    one = np.zeros(8, np.uint8)
    rows = np.ones(MESSAGE_BYTES, np.uint8)
    out, into = (np.zeros((NUM_MESSAGES, MESSAGE_BYTES), np.uint8) for _ in range(2))

    def ping(num_times: int) -> None:
        got = np.empty_like(one)
        for _ in range(num_times):
            comm.Sendrecv(one, to, 8, got, source, 8)

    def stream(num_times: int) -> None:
        sends, receives = ([MPI.REQUEST_NULL] * NUM_MESSAGES for _ in range(2))
        for n in range(num_times + NUM_MESSAGES):
            i = n % NUM_MESSAGES
            MPI.Request.Waitall([sends[i], receives[i]])
            if n < num_times:
                receives[i] = comm.Irecv(into[i], source, 9)
                out[i] = rows
                sends[i] = comm.Issend(out[i], to, 9)

    def us_of_one(run: Callable[[int], None], num_times: int) -> float:
        found = []
        start = time.monotonic()
        while True:
            comm.Barrier()
            begun = time.perf_counter()
            run(num_times)
            us = (time.perf_counter() - begun) * 1e6 / num_times if takes_part else 0.0
            found.append(comm.allreduce(us, MPI.MAX))
            if comm.bcast(len(found) >= 5 and time.monotonic() - start > seconds / 2):
                return float(np.median(found))

    latency_us = us_of_one(ping, 200)
    return Network(MESSAGE_BYTES / us_of_one(stream, 32) / 1e3, latency_us, "measured by calibrate")
