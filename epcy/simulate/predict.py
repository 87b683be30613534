"""Microseconds of an operation on so many nodes, and what they are spent on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from epcy.errors import ArgumentError
from epcy.simulate import paths
from epcy.simulate.machines import Machine
from epcy.simulate.paths import Cluster
from epcy.simulate.traffic import Array, Traffic, count, draw, recorded

__all__ = ["OPERATIONS", "Prediction", "Workload", "routing_of", "simulate"]

OPERATIONS: dict[str, Callable[[Cluster, Traffic, str, int], None]] = {
    "dispatch": paths.dispatch,
    "combine": paths.combine,
    "low_latency_dispatch": paths.low_latency_dispatch,
    "low_latency_combine": paths.low_latency_combine,
}
MOST_RANKS = 1024
MOST_PIECES, MOST_BLOCKS = 300_000, 512  # of an operation; of a rank's tokens
COUNTED_LANES = 4096 * 8  # to which a machine's `count_us` refers


@dataclass(frozen=True)
class Workload:
    """What is simulated: the ranks, the shape of a call, and where tokens go.

    Attributes
    ----------
    num_nodes, gpus_per_node : int
    num_tokens, hidden, num_experts, num_topk : int
        Tokens of each rank, and experts of all ranks.
    dtype : str
        Of rows that are dispatched: "bf16", "fp16", "fp32", or "fp8" (with scales; rows come back as bf16).
    path : str
        Of the high-throughput mode: "direct", "hierarchical", "expert"; the low-latency mode has no hierarchical one.
    num_sms : int
        Of a high-throughput call.
    is_cached : bool
        Whether the routing is known: nothing is counted.
    routing : str
        "random", or the name of a recording's file, whose first dispatch gives tokens, experts and lanes.
    num_groups : int or None
        From how many nodes a token's experts are at most; drawn routing alone.
    seed : int
    is_in_lines : bool
        Whether low-latency rows take NVLink in lines of 128 bytes that hold 112, as epcy's do, or as they are.
    """

    num_nodes: int
    gpus_per_node: int
    num_tokens: int
    hidden: int = 7168
    num_experts: int = 256
    num_topk: int = 8
    dtype: str = "bf16"
    path: str = "hierarchical"
    num_sms: int = 24
    is_cached: bool = False
    routing: str = "random"
    num_groups: int | None = None
    seed: int = 0
    is_in_lines: bool = True

    def __post_init__(self) -> None:
        for name in (
            "num_nodes",
            "gpus_per_node",
            "num_tokens",
            "hidden",
            "num_experts",
            "num_topk",
            "num_sms",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{name}: expected a whole number from 1, got {value!r}")
        if self.num_ranks > MOST_RANKS:
            raise ArgumentError(
                f"num_nodes: {self.num_nodes} nodes of {self.gpus_per_node} are {self.num_ranks} ranks, and at most "
                f"{MOST_RANKS} are simulated; memory and queue pairs of more are in the table of --footprint"
            )
        if self.num_experts % self.num_ranks and self.routing == "random":
            raise ArgumentError(
                f"num_experts: expected a multiple of the {self.num_ranks} ranks, got {self.num_experts}"
            )
        if self.num_topk > self.num_experts:
            raise ArgumentError(
                f"num_topk: expected at most the {self.num_experts} experts, got {self.num_topk}"
            )
        if self.dtype not in ("bf16", "fp16", "fp32", "fp8"):
            raise ArgumentError(f"dtype: expected bf16, fp16, fp32 or fp8, got {self.dtype!r}")
        if self.path not in paths.PATHS:
            raise ArgumentError(f"path: expected one of {', '.join(paths.PATHS)}, got {self.path!r}")
        groups = self.num_groups
        if groups is not None and not 1 <= groups <= self.num_nodes:
            raise ArgumentError(
                f"num_groups: expected 1 to {self.num_nodes}, the number of nodes, got {groups}"
            )
        if groups is not None and self.num_topk > groups * (self.num_experts // self.num_nodes):
            raise ArgumentError(
                f"num_groups: {groups} nodes have fewer than num_topk={self.num_topk} experts"
            )
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ArgumentError(f"seed: expected a whole number from 0, got {self.seed!r}")

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.gpus_per_node

    def row_bytes(self, operation: str) -> int:
        """Return the bytes of a row that travels, scales included. Local."""
        if self.dtype == "fp8":
            is_there = operation.endswith("dispatch")
            return self.hidden + -(-self.hidden // 128) * 4 if is_there else self.hidden * 2
        return self.hidden * (4 if self.dtype == "fp32" else 2)


@dataclass(frozen=True)
class Prediction:
    """What an operation takes.

    Attributes
    ----------
    operation, path : str
    us : float
        Until the slowest rank has finished.
    fixed_us : float
        Of that, what a call without rows takes.
    floor_us : float
        `fixed_us`, and what the server with the most work is busy for: no order of the pieces is faster.
    bottleneck : str
        That server: "SMs", "NVLink", "NIC" or "memory".
    busy : dict of str to float
        The share of the time after `fixed_us` that the busiest of each kind works.
    nic_bytes, nvlink_bytes : int
        Of all ranks, leaving them.
    nic_bytes_most : int
        Of the rank that sends most.
    rank_gbps, node_gbps, lane_gbps : float
        A rank's rows over `us`: one for each destination rank, for each destination node, for each lane, including
        those that stay. What others publish as logical or bottleneck bandwidth is one of these.
    num_rows, num_rows_to_node : float
        Of a rank, on average: tokens once for each destination rank, and once for each destination node.
    """

    operation: str
    path: str
    us: float
    fixed_us: float
    floor_us: float
    bottleneck: str
    busy: dict[str, float]
    nic_bytes: int
    nic_bytes_most: int
    nvlink_bytes: int
    num_rows: float
    num_rows_to_node: float
    rank_gbps: float
    node_gbps: float
    lane_gbps: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON takes them. Local."""
        return asdict(self)


def routing_of(work: Workload, is_low_latency: bool = False) -> tuple[list[Array], int]:
    """Return topk_idx (T, K) of each rank, and the number of experts. Local.

    Raises
    ------
    ArgumentError
        A file that is no recording, or does not go with the ranks.
    """
    if work.routing != "random":
        return recorded(Path(work.routing), work.num_ranks, is_low_latency)
    groups = work.num_nodes if work.num_groups is None else work.num_groups
    shape = work.num_tokens, work.num_experts, work.num_topk
    return [
        draw(*shape, work.seed, rank, work.num_nodes, groups) for rank in range(work.num_ranks)
    ], work.num_experts


def fixed_us(operation: str, work: Workload, machine: Machine, num_lanes: float) -> float:
    """Return what a call without rows takes: launch, counting, and the words that ranks exchange first. Local."""
    if operation.startswith("low_latency"):
        return machine.dispatch_us if operation.endswith("dispatch") else machine.combine_us
    counting = 0.0
    if operation == "dispatch" and not work.is_cached:
        counting = machine.count_us * num_lanes / COUNTED_LANES
    meeting = machine.flag_us if work.num_nodes == 1 else machine.nic_us
    return machine.launch_us + counting + meeting + machine.flag_us


def simulate(
    operation: str, work: Workload, machine: Machine, topk_idx: tuple[list[Array], int] | None = None
) -> Prediction:
    """Predict an operation. Local, blocking: seconds for hundreds of ranks.

    Parameters
    ----------
    operation : str
        "dispatch", "combine", "low_latency_dispatch" or "low_latency_combine".
    work : Workload
    machine : Machine
    topk_idx : optional
        What `routing_of` returned, to draw only once.

    Raises
    ------
    ArgumentError
        An operation that is none of these, hierarchical low latency, more SMs than there are, or a recording that does
        not go with the ranks.
    """
    if operation not in OPERATIONS:
        raise ArgumentError(f"operation: expected one of {', '.join(OPERATIONS)}, got {operation!r}")
    is_low_latency = operation.startswith("low_latency")
    if is_low_latency and work.path == "hierarchical":
        raise ArgumentError(f"path: expected direct or expert in the low-latency mode, got {work.path!r}")
    if work.num_sms > machine.num_sms:
        raise ArgumentError(
            f"num_sms: expected at most the {machine.num_sms} of {machine.name}, got {work.num_sms}"
        )
    ids, num_experts = routing_of(work, is_low_latency) if topk_idx is None else topk_idx
    if num_experts % work.num_ranks:
        raise ArgumentError(
            f"num_experts: expected a multiple of the {work.num_ranks} ranks, got {num_experts}"
        )
    most_tokens = max(1, *(len(idx) for idx in ids))
    blocks = max(1, min(most_tokens, MOST_BLOCKS, MOST_PIECES // work.num_ranks**2))
    traffic = count(ids, num_experts, work.num_nodes, blocks)
    cluster = Cluster(machine, work.num_ranks, work.num_sms, work.is_in_lines)
    row_bytes = work.row_bytes(operation)
    OPERATIONS[operation](cluster, traffic, work.path, row_bytes)
    fixed = fixed_us(operation, work, machine, float(traffic.lanes.sum()) / work.num_ranks)
    return _summed(operation, work, cluster, traffic, row_bytes, fixed, cluster.simulation.run())


def _summed(
    operation: str,
    work: Workload,
    cluster: Cluster,
    traffic: Traffic,
    row_bytes: int,
    fixed: float,
    took_us: float,
) -> Prediction:
    ranks, busy_us, num_bytes = cluster.ranks, cluster.simulation.busy_us, cluster.simulation.num_bytes
    kinds = {
        "SMs": [busy_us[rank.sms] / work.num_sms for rank in ranks],
        "NVLink": [busy_us[server] for rank in ranks for server in (rank.push, rank.pull, rank.arrive)],
        "NIC": [busy_us[server] for rank in ranks for server in (rank.send, rank.receive)],
        "memory": [busy_us[rank.memory] for rank in ranks],
    }
    most = {kind: max(values) for kind, values in kinds.items()}
    bottleneck = max(most, key=lambda kind: most[kind])
    sent = [num_bytes[rank.send] for rank in ranks]
    us = fixed + took_us
    rows, to_node, lanes = (
        float(part.sum()) / work.num_ranks for part in (traffic.to_rank, traffic.to_node, traffic.lanes)
    )
    return Prediction(
        operation, work.path, us, fixed, fixed + most[bottleneck], bottleneck,
        {kind: value / took_us if took_us else 0.0 for kind, value in most.items()},
        sum(sent), max(sent), sum(num_bytes[server] for rank in ranks for server in (rank.push, rank.pull)),
        rows, to_node, *(part * row_bytes / us / 1e3 for part in (rows, to_node, lanes)),
    )  # fmt: skip
