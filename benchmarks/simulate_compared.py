"""Put what `epcy.simulate` says beside what was measured: our two H200s, and tables that others published.

    python benchmarks/simulate_compared.py           # Markdown tables, as in docs/simulate.md

The constants are those of epcy/simulate/machines.py, the same for every line; a line says only which machine, how many
ranks, which path (what that library sends) and which routing its test draws.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from epcy.simulate import MACHINES, Prediction, Workload, simulate

OURS = Path(__file__).parent / "gpu-2-ranks-2026-11-30.json"

# DeepEP V1, docs/legacy.md: H800, one ConnectX-7 of 400 Gb/s each. 4096 tokens, H 7168, top 8 of at most 4 nodes, fp8
# there and bf16 back, the best of its chunk sizes on a cached handle, 24 SMs. Bytes as its tests count them: between
# nodes a row for each destination node, inside one node a row for each destination rank, one's own included in both.
V1_THROUGHPUT = (  # ranks, dispatch GB/s, combine GB/s
    (8, 153.0, 158.0),
    (16, 43.0, 43.0),
    (32, 58.0, 57.0),
    (64, 51.0, 50.0),
)
# The same page: 128 tokens, H 7168, top 8, fp8 there and bf16 back; one copy for each lane, NVLink inside a node.
V1_LOW_LATENCY = (  # ranks, dispatch us, combine us
    (8, 77.0, 114.0),
    (16, 118.0, 195.0),
    (32, 155.0, 273.0),
    (64, 173.0, 314.0),
    (128, 192.0, 369.0),
    (256, 194.0, 360.0),
)
# DeepEP V2, README: SM90 and ConnectX-7, 8192 tokens, H 7168, top 8, fp8 there and bf16 back, logical bandwidth with
# the rows that stay in the node.
V2_THROUGHPUT = ((2, 12, 90.0, 81.0), (4, 6, 61.0, 61.0))  # nodes, SMs, dispatch GB/s, combine GB/s


def line(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |")


def percent(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.0%}"


def us_of(gbps: float, one: Prediction, rows: float, row_bytes: int) -> float:
    return rows * row_bytes / gbps / 1e3


def ours() -> None:
    """Print each line of our two-GPU measurements that the simulator has a model of: rank layout, output in place."""
    line("two H200s", "tokens", "dtype", "SMs", "measured us", "predicted us", "")
    line(*["---"] * 7)
    seen = set()
    rows: list[dict[str, Any]] = json.loads(OURS.read_text(encoding="utf-8"))["rows"]
    for row in rows:
        is_ht = row["mode"] == "ht"
        if (
            row["case"] not in ("dispatch", "combine")
            or row["layout"] != "rank"
            or row["combine_from"] == "array"
            or row["use_logfmt"]
            or row["graph"] == is_ht
        ):
            continue
        by_lane = row["reduction"] == "source"
        key = (row["mode"], row["case"], row["tokens"], row["experts"], row["dtype"], row["cached"], by_lane)
        if key in seen:
            continue
        seen.add(key)
        work = Workload(
            1, 2, row["tokens"], row["hidden"], row["experts"], row["topk"], row["dtype"],
            "expert" if by_lane else "direct", row["num_sms"] or 24, bool(row["cached"]),
        )  # fmt: skip
        name = row["case"] if is_ht else f"low_latency_{row['case']}"
        one = simulate(name, work, MACHINES["h200"])
        what = name.replace("_", " ") + (", cached" if row["cached"] else "")
        what += ", summed at the source" if by_lane else ""
        what += f", E {row['experts']}" if row["experts"] != 256 else ""
        line(
            what, row["tokens"], row["dtype"], row["num_sms"] or "", f"{row['us_p50']:.1f}", f"{one.us:.1f}",
            percent(one.us, row["us_p50"]),
        )  # fmt: skip


def throughput(machine: str, work: Workload, operation: str, gbps: float, name: str) -> None:
    one = simulate(operation, work, MACHINES[machine])
    has = one.rank_gbps if work.num_nodes == 1 else one.node_gbps
    published_us = has / gbps * one.us
    line(
        name, operation, f"{gbps:.0f}", f"{published_us:.0f}", f"{has:.0f}", f"{one.us:.0f}",
        percent(one.us, published_us), f"{one.bottleneck} {one.busy[one.bottleneck]:.0%}",
    )  # fmt: skip


def published() -> None:
    """Print the published tables."""
    head = ("published", "", "GB/s", "that is us", "predicted GB/s", "us", "time", "most busy")
    line(*head)
    line(*["---"] * len(head))
    for num_ranks, there, back in V1_THROUGHPUT:
        nodes = num_ranks // 8
        path = "direct" if nodes == 1 else "hierarchical"
        work = Workload(nodes, 8, 4096, dtype="fp8", path=path, is_cached=True, num_groups=min(4, nodes))
        throughput("h800", work, "dispatch", there, f"V1 EP{num_ranks}")
        throughput("h800", work, "combine", back, f"V1 EP{num_ranks}")
    for nodes, num_sms, there, back in V2_THROUGHPUT:
        work = Workload(nodes, 8, 8192, dtype="fp8", num_sms=num_sms, is_cached=True)
        throughput("h100", work, "dispatch", there, f"V2 EP8x{nodes}, {num_sms} SMs")
        throughput("h100", work, "combine", back, f"V2 EP8x{nodes}, {num_sms} SMs")
    print()
    line("low latency", "", "published us", "predicted us", "", "most busy", "our path us")
    line(*["---"] * 7)
    for num_ranks, there, back in V1_LOW_LATENCY:
        for name, us in (("dispatch", there), ("combine", back)):
            found = [
                simulate(
                    f"low_latency_{name}",
                    Workload(num_ranks // 8, 8, 128, dtype="fp8", path=path, is_in_lines=path == "direct"),
                    MACHINES["h800"],
                )
                for path in ("expert", "direct")
            ]  # fmt: skip
            one = found[0]
            line(
                f"V1 EP{num_ranks}", name, f"{us:.0f}", f"{one.us:.0f}", percent(one.us, us),
                f"{one.bottleneck} {one.busy[one.bottleneck]:.0%}", f"{found[1].us:.0f}",
            )  # fmt: skip


if __name__ == "__main__":
    ours()
    print()
    published()
