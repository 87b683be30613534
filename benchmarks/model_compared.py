"""Put what `buf.explain` would say beside what was measured on two H200s, without a GPU.

    python benchmarks/model_compared.py           # a Markdown table, as in docs/tuning.md

The constants: the link's rates of the recorded file's own header; memory, launch, words and counting from
epcy/simulate/machines.py; the low-latency mode's call without work from the file's lines of one token in bf16, which
stand in for what `python -m epcy calibrate` measures and are not compared. None is of another line.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from epcy.model import load_of, predict, subject_of
from epcy.simulate.machines import MACHINES, Machine, constants_from

FILE = Path(__file__).parent / "gpu-2-ranks-2026-11-30.json"
WITHIN = 0.15
Row = dict[str, Any]


def is_fixed(row: Row) -> bool:
    """Whether a line stands in for calibrate's point of no tokens."""
    plain = row["mode"] == "ll" and row["graph"] and row["tokens"] == 1 and row["dtype"] == "bf16"
    return plain and row["case"] != "roundtrip" and row["reduction"] != "source" and not row["use_logfmt"]


def machine_of_file(content: Row) -> Machine:
    links = content["links"]
    fixed = {row["case"]: row["us_p50"] for row in content["rows"] if is_fixed(row)}
    return replace(
        MACHINES["h200"], push_gbps=links["push_all_ranks_gbps"], pull_gbps=links["pull_all_ranks_gbps"],
        dispatch_us=fixed["dispatch"], combine_us=fixed["combine"],
    )  # fmt: skip


def predicted_us(machine: Machine, row: Row, name: str) -> float:
    """Microseconds of a dispatch or combine of a line."""
    op = name if row["mode"] == "ht" else f"low_latency_{name}"
    hidden = row["hidden"]
    is_fp8 = row["dtype"] == "fp8" and name == "dispatch"
    row_bytes = hidden + hidden // 128 * 4 if is_fp8 else hidden * 2
    subject = subject_of(op, row["layout"])
    shape = row["tokens"], row["ranks"], row["experts"], row["topk"], row_bytes
    staged = row["combine_from"] == "array" and row["mode"] == "ht"
    load = load_of(subject, *shape, is_staged=staged)
    terms = predict(constants_from(machine, subject, load), load)
    if row["cached"]:
        terms["lanes"] = 0.0
    return sum(terms.values())


def compared(content: Row) -> list[tuple[Row, float]]:
    """The lines that the model describes, with what it says."""
    machine = machine_of_file(content)
    found = []
    for row in content["rows"]:
        known = row["case"] in ("dispatch", "combine", "roundtrip") and row["reduction"] != "source"
        # An eager low-latency call takes what the host takes: 12 to 25 us in this file, for one and the same.
        if not known or row["use_logfmt"] or is_fixed(row) or (row["mode"] == "ll" and not row["graph"]):
            continue
        # From an array low latency reads in place; the line of 128 tokens without a case of its own is LogFMT's.
        names = ("dispatch", "combine") if row["case"] == "roundtrip" else (row["case"],)
        found.append((row, sum(predicted_us(machine, row, name) for name in names)))
    return found


def main() -> None:
    """Print the table."""
    lines = compared(json.loads(FILE.read_text(encoding="utf-8")))
    print(
        "| two H200s | tokens | dtype | measured us | predicted us |  |\n| --- | --- | --- | --- | --- | --- |"
    )
    for row, us in lines:
        what = ("low latency " if row["mode"] == "ll" else "") + row["case"]
        for name, is_so in (
            ("graph", row["graph"] and row["mode"] == "ht"),
            ("cached", row["cached"]),
            ("expert layout", row["layout"] == "expert"),
            ("from an array", row["combine_from"] == "array"),
            (f"E {row['experts']}", row["experts"] != 256),
        ):
            what += f", {name}" if is_so else ""
        measured, error = row["us_p50"], us / row["us_p50"] - 1
        print(f"| {what} | {row['tokens']} | {row['dtype']} | {measured:.1f} | {us:.1f} | {error:+.0%} |")
    good = sum(abs(us / row["us_p50"] - 1) <= WITHIN for row, us in lines)
    print(f"\n{good} of {len(lines)} lines within {WITHIN:.0%}")


if __name__ == "__main__":
    main()
