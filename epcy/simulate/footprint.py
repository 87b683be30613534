"""What a Buffer takes of memory and queue pairs as the ranks grow, and which of it outgrows what."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from epcy.errors import ArgumentError

__all__ = ["Footprint", "footprints"]

MOST_RANKS = 2048
QP_BYTES = 1024 * 64  # NVSHMEM_QP_DEPTH of 1024 work requests of 64 bytes


@dataclass(frozen=True)
class Footprint:
    """One number of ranks.

    Attributes
    ----------
    num_ranks, num_experts : int
    control, receive, combine, low_latency, total : int
        Bytes a rank: `Buffer.size_hint` of the nvshmem backend.
    bounded_total : int
        The total with `num_max_recv_tokens` of twice a balanced load.
    num_qps : int
        Queue pairs of a rank to all others: NVSHMEM connects each pair of ranks.
    num_used_qps : int
        Of those, to ranks of other nodes on the same rail, which are all that the hierarchical path uses.
    qp_bytes : int
        The send queues of all of them.
    """

    num_ranks: int
    num_experts: int
    control: int
    receive: int
    combine: int
    low_latency: int
    total: int
    bounded_total: int
    num_qps: int
    num_used_qps: int
    qp_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON takes them. Local."""
        return asdict(self)


def footprints(
    *,
    gpus_per_node: int = 8,
    num_tokens: int = 4096,
    hidden: int = 7168,
    num_experts: int = 256,
    num_topk: int = 8,
    num_low_latency_tokens: int = 128,
    num_qps_per_rank: int = 2,
    most_ranks: int = MOST_RANKS,
) -> list[Footprint]:
    """Return memory and queue pairs of 2, 4, 8 ... `most_ranks` ranks; bfloat16. Local.

    Where there are more ranks than experts, each has one.

    Raises
    ------
    ArgumentError
        More than 2048 ranks, or sizes that a Buffer would refuse.
    """
    from epcy import Buffer

    if not 2 <= most_ranks <= MOST_RANKS:
        raise ArgumentError(f"most_ranks: expected 2 to {MOST_RANKS}, got {most_ranks}")
    sizes = {"gpus_per_node": gpus_per_node, "num_qps_per_rank": num_qps_per_rank, "num_experts": num_experts}
    for name, value in sizes.items():
        if value < 1:
            raise ArgumentError(f"{name}: expected at least 1, got {value}")
    found = []
    num_ranks = 2
    while num_ranks <= most_ranks:
        experts = -(-max(num_experts, num_ranks) // num_ranks) * num_ranks

        def hint_of(
            num_rows: int | None, num_ranks: int = num_ranks, experts: int = experts
        ) -> dict[str, int]:
            return Buffer.size_hint(
                num_ranks, num_max_tokens_per_rank=num_tokens, hidden=hidden, num_experts=experts, num_topk=num_topk,
                num_max_recv_tokens=num_rows, low_latency_mode=True,
                num_max_low_latency_tokens_per_rank=num_low_latency_tokens, backend="nvshmem",
            )  # fmt: skip

        hint = hint_of(None)
        bounded = hint_of(min(num_ranks * num_tokens, 2 * num_tokens * num_topk))
        num_nodes = -(-num_ranks // gpus_per_node)
        num_qps = num_qps_per_rank * (num_ranks - 1)
        found.append(
            Footprint(
                num_ranks,
                experts,
                hint["control"],
                hint["receive"],
                hint["combine"],
                hint["low_latency"],
                hint["total"],
                bounded["total"],
                num_qps,
                num_qps_per_rank * (num_nodes - 1),
                num_qps * QP_BYTES,
            )  # fmt: skip
        )
        num_ranks *= 2
    return found
