"""What the arguments of a line mean: its shape, its Buffer, its calls, and the words of its row."""

from __future__ import annotations

import os
from typing import Any

from mpi4py import MPI

import epcy
from epcy.bench.arguments import Arguments
from epcy.bench.calls import Calls, HighThroughput, LowLatency
from epcy.bench.datasets import Setting
from epcy.bench.workload import BUFFER_DTYPES, Shape


def shape_of(given: Arguments, num_tokens: int) -> Shape:
    return Shape(num_tokens, given.hidden, given.topk, given.experts, given.dtype)


def setting_of(given: Arguments, shape: Shape, buf: epcy.Buffer, comm: MPI.Intracomm) -> Setting:
    """Return what the drawings of a line share."""
    return Setting(
        buf.xp, shape, given.routing, given.mode, given.layout, given.expert_alignment, given.reduction,
        comm.rank, comm.size, given.round_scale, given.use_ue8m0, given.use_logfmt,
    )  # fmt: skip


def calls_of(given: Arguments, buf: epcy.Buffer, zero_copy: bool, num_worst_tokens: int) -> Calls:
    """Return the calls of a line's mode, with its options."""
    if given.mode == "ht":
        return HighThroughput(buf, given.layout, given.expert_alignment, num_worst_tokens)
    casts = {"use_fp8": given.dtype == "fp8", "round_scale": given.round_scale, "use_ue8m0": given.use_ue8m0}
    ways = {"reduction": given.reduction, "use_logfmt": given.use_logfmt, "zero_copy": zero_copy}
    return LowLatency(buf, casts, ways)


def what_of(given: Arguments, case: str, num_tokens: int, backend: str, num_ranks: int) -> dict[str, Any]:
    """Return the fields of a row that say what was measured."""
    is_ll = given.mode == "ll"
    casts, combines = is_ll and given.dtype == "fp8" and case != "combine", is_ll and case != "dispatch"
    return {
        "case": case,
        "mode": given.mode,
        "backend": backend,
        "ranks": num_ranks,
        "tokens": num_tokens,
        "hidden": given.hidden,
        "topk": given.topk,
        "experts": given.experts,
        "dtype": given.dtype,
        "layout": given.layout,
        "routing": os.path.basename(given.routing),
        "cached": given.cached,
        "graph": given.graph,
        "runs": given.runs,
        "expert_alignment": given.expert_alignment if given.layout == "expert" else None,
        "reduction": given.reduction if combines else None,
        "round_scale": given.round_scale if casts else None,
        "use_ue8m0": given.use_ue8m0 if casts else None,
        "use_logfmt": given.use_logfmt if combines else None,
    }


def buffer_options(given: Arguments, shape: Shape, num_ranks: int) -> dict[str, Any]:
    """Return the options of a line's Buffer, with room for whatever the routing sends."""
    options = {
        "num_max_tokens_per_rank": shape.num_tokens,
        "hidden": shape.hidden,
        "num_experts": shape.num_experts,
        "num_topk": shape.num_topk,
        "dtype": BUFFER_DTYPES[shape.dtype],
        "num_sms": given.num_sms,
        "num_max_recv_tokens": max(num_ranks * shape.num_tokens, 1),
    }
    if given.inspect is not None:
        options["check"] = given.inspect
    if given.mode == "ll":
        return options | {"low_latency_mode": True, "num_max_low_latency_tokens_per_rank": shape.num_tokens}
    if given.layout == "expert":
        local = shape.num_experts // num_ranks
        lanes = min(shape.num_topk, local) if given.routing in ("random", "skewed") else shape.num_topk
        rows = num_ranks * shape.num_tokens * lanes + local * (given.expert_alignment - 1)
        options["num_max_recv_tokens"] = max(rows, 1)
    return options
