"""Sets of lines that are measured by one command: `make bench-gpu` runs figures, or by `SUITE=figures-ll` those of low
latency alone; `make bench` decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from epcy.bench import arguments
from epcy.bench.arguments import Arguments

PREFILL = "-b 4096 -e 4096 --hidden 7168 --topk 8 --experts 256"
DECODE = "--mode ll --hidden 7168 --topk 8"
ALL = "--baseline cupy,nccl-alltoall"
BARE = "--baseline nccl-alltoall"

# Neighbours that need an equal Buffer share it. First calls come first: code is loaded once a process.
HIGH_THROUGHPUT = (
    f"first-call {PREFILL}",
    f"dispatch {PREFILL} {ALL}",
    f"dispatch {PREFILL} --cached {ALL}",
    f"dispatch {PREFILL} --dtype fp8 {ALL}",
    f"dispatch {PREFILL} --dtype fp8 --cached {ALL}",
    f"combine {PREFILL} --combine-from heap {ALL}",
    f"combine {PREFILL} --combine-from array {ALL}",
    f"roundtrip {PREFILL} {ALL}",
    f"dispatch {PREFILL} --graph {BARE}",
    f"dispatch {PREFILL} --graph --cached {BARE}",
    f"combine {PREFILL} --graph {BARE}",
    f"dispatch combine {PREFILL} --num-sms 24",
    f"dispatch {PREFILL} --dtype fp8 --num-sms 24",
    f"dispatch combine {PREFILL} --layout expert --expert-alignment 128 {BARE}",
)
LOW_LATENCY = (
    f"first-call -b 128 -e 128 --experts 256 --dtype fp8 {DECODE}",
    *(
        f"{what} -b {tokens} -e {tokens} --experts {experts} {DECODE} {graph}"
        for tokens, experts in ((1, 256), (8, 256), (128, 256), (128, 288), (256, 256))
        for what in (
            "dispatch --dtype fp8",
            "dispatch --dtype bf16",
            "combine --dtype bf16",
            "combine --dtype bf16 --combine-from array",
            "combine --dtype bf16 --reduction source",
            "roundtrip --dtype fp8",
        )
        for graph in ("--graph " + BARE, "")
    ),
    f"dispatch -b 128 -e 128 --experts 256 --dtype fp8 --use-ue8m0 {DECODE} --graph",
    f"combine -b 128 -e 128 --experts 256 --use-logfmt {DECODE} --graph",
    f"overlap -b 128 -e 128 --experts 256 --dtype fp8 {DECODE}",  # not in a graph: CuPy captures no products
    f"overlap -b 128 -e 128 --experts 256 --dtype bf16 {DECODE}",
)

# What `make bench` measures of low latency: both backends have it.
SMALL = "--mode ll --hidden 2048 --topk 8 --experts 64 -b 8 -e 128 -f 16"
DECODING = (
    "first-call --hidden 2048 --topk 8 --experts 64 -b 128 -e 128",
    f"first-call --dtype fp8 {SMALL}",
    f"dispatch combine roundtrip --dtype bf16 {SMALL}",
    f"dispatch --dtype fp8 {SMALL}",
    f"dispatch --dtype fp8 --use-ue8m0 {SMALL}",
    f"combine --reduction source {SMALL}",
    f"combine --use-logfmt {SMALL}",
    f"overlap --dtype bf16 --calls 4 {SMALL}",
)
SETS = {
    "figures": (*HIGH_THROUGHPUT, *LOW_LATENCY),
    "figures-ht": HIGH_THROUGHPUT,
    "figures-ll": LOW_LATENCY,
    "decoding": DECODING,
}


def expand(given: Arguments, num_ranks: int) -> Sequence[Arguments]:
    """Return the lines' arguments: one for the command line itself, or those of its suite."""
    if given.suite is None:
        return (given,)
    return tuple(
        replace(
            arguments.parse(line.split(), num_ranks),
            backend=given.backend,
            runs=given.runs,
            warmup=given.warmup,
            check=given.check,
            seed=given.seed,
            floor_gbps=given.floor_gbps,
        )
        for line in SETS[given.suite]
    )
