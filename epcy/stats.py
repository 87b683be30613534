"""What `Buffer.stats()` returns: memory, tokens, waits and times of one rank's Buffer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["SPANS", "Distribution", "Region", "Stats", "imbalance"]

# enum epcy_span of epcy/meter.h: a whole call, and the phases of one
SPANS = ("call", "count", "exchange", "send", "wait", "fan_out", "reduce")


@dataclass(frozen=True)
class Distribution:
    """Times of one kernel, in microseconds; percentiles are within 3.2 %, the others exact."""

    count: int
    mean_us: float
    min_us: float
    p50_us: float
    p95_us: float
    p99_us: float
    max_us: float


@dataclass(frozen=True)
class Region:
    """Bytes of a region of the heap, and how many of them ever held something (its high-water mark)."""

    num_bytes: int
    high_water_bytes: int

    @property
    def fullness(self) -> float:
        """The share of the region that was ever in use."""
        return self.high_water_bytes / self.num_bytes if self.num_bytes else 0.0


@dataclass(frozen=True)
class Stats:
    """One rank's numbers since its Buffer was made, or since the last `stats(reset=True)`.

    Attributes
    ----------
    rank, num_ranks : int
    backend : str
    seconds : float
        That the numbers are of.
    heap : dict of str to Region
        "control", "receive", "combine", "low_latency": as in `Buffer.size_hint`.
    num_calls : int
    tokens_to_rank, tokens_from_rank : tuple of int
        (R,) tokens that were dispatched to, and that came from, each rank. A token counts once for each rank that it
        goes to; in low-latency calls once for each expert.
    tokens_per_expert : tuple of int
        (L,) tokens that came for each local expert.
    bytes_moved : int
        Payload bytes that crossed between ranks, those of combine included, as this rank sent or fetched them.
    busy_us, wait_us : float
        Time inside of calls, and the part of it that was spent waiting for other ranks.
    wait_us_per_peer : tuple of float
        (R,) the same by rank. Ranks are waited for in ascending order: two that are late together share the time, the
        lower one has what both are late.
    kernels : dict of str to Distribution
        By operation ("dispatch") and phase of one ("dispatch.send"): on the host backend what the C code did, on a GPU
        what block 0 of the kernel did.
    bytes_between_nodes : int
        Rows, with their scales, that this rank sent to ranks of other nodes: dispatched ones and sums that go back.
    metadata_bytes_between_nodes : int
        What went with them: where rows lie, weights, the heads of messages.
    """

    rank: int
    num_ranks: int
    backend: str
    seconds: float
    heap: dict[str, Region]
    num_calls: int
    tokens_to_rank: tuple[int, ...]
    tokens_from_rank: tuple[int, ...]
    tokens_per_expert: tuple[int, ...]
    bytes_moved: int
    busy_us: float
    wait_us: float
    wait_us_per_peer: tuple[float, ...]
    kernels: dict[str, Distribution]
    bytes_between_nodes: int = 0
    metadata_bytes_between_nodes: int = 0

    @property
    def num_tokens_sent(self) -> int:
        return sum(self.tokens_to_rank)

    @property
    def num_tokens_received(self) -> int:
        return sum(self.tokens_from_rank)

    @property
    def imbalance(self) -> float:
        """The busiest local expert's tokens over the mean; 1 is balanced, 0: no token came."""
        return imbalance(self.tokens_per_expert)

    @property
    def wait_share(self) -> float:
        """The part of the time inside of calls that was spent waiting for other ranks."""
        return self.wait_us / self.busy_us if self.busy_us else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON takes them. Local."""
        derived = {"imbalance": self.imbalance, "wait_share": self.wait_share}
        return {**asdict(self), **derived}

    def __str__(self) -> str:
        lines = [f"rank {self.rank} of {self.num_ranks}, {self.backend}, {self.seconds:.1f} s"]
        for name, region in self.heap.items():
            if region.num_bytes:
                lines.append(
                    f"  heap {name:<12} {region.num_bytes:>13} bytes, {region.fullness:6.1%} ever in use"
                )
        lines.append(
            f"  tokens sent {self.num_tokens_sent}, received {self.num_tokens_received}, "
            f"imbalance {self.imbalance:.2f}"
        )
        if self.metadata_bytes_between_nodes:
            lines.append(
                f"  to other nodes {self.bytes_between_nodes} bytes of rows, "
                f"{self.metadata_bytes_between_nodes} bytes of what goes with them"
            )
        waits = ", ".join(f"{us:.0f}" for us in self.wait_us_per_peer)
        lines.append(f"  waiting {self.wait_share:.1%} of the time in calls; us for each rank: {waits}")
        width = max((len(name) for name in self.kernels), default=0)
        lines.append(f"  {'us':<{width}} {'count':>9} {'min':>9} {'p50':>9} {'p95':>9} {'p99':>9} {'max':>9}")
        for name, d in self.kernels.items():
            times = " ".join(f"{us:9.1f}" for us in (d.min_us, d.p50_us, d.p95_us, d.p99_us, d.max_us))
            lines.append(f"  {name:<{width}} {d.count:>9} {times}")
        return "\n".join(lines)


def imbalance(counts: Iterable[int]) -> float:
    """Return the largest count over the mean; 0 where nothing was counted. Local."""
    counts = tuple(counts)
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 0.0
