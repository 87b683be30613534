"""The case first-call: what the first dispatch and combine of a Buffer cost, prepared or not, beside any later one.

Buffers after one another: one used as it is (cold), then by turns five after `warmup()` and five made with
`preinitialize=True`: the median of each counts. On the last one the steady calls are timed too. Wall time of the host,
until the rows are there: on a GPU the stream is waited for. Code that a process loads once is loaded for its first
Buffer: where other cases, or the links' rates, were measured before, cold has less to do.
"""

from __future__ import annotations

import gc
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

import epcy
from epcy.bench import table
from epcy.bench.arguments import Arguments
from epcy.bench.clocks import Measured
from epcy.bench.datasets import DataSet, draw_sets
from epcy.bench.figures import count_bytes, figures
from epcy.bench.measure import summarize
from epcy.bench.settings import buffer_options, calls_of, setting_of, shape_of, what_of
from epcy.bench.works import Roundtrip

TURNS = 5
WAYS = ("cold", *("warmed", "preinitialized") * TURNS)


def measure(comm: MPI.Intracomm, given: Arguments, backend: str, num_tokens: int) -> table.Row:
    """Time and check first and steady calls at one size. Collective, blocking."""
    shape = shape_of(given, num_tokens)
    options = buffer_options(given, shape, comm.size)
    fields: dict[str, Any] = {}
    sets: list[list[DataSet]] = []
    wrong, us = 0, np.empty(given.runs)
    first_us: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn, way in enumerate(WAYS):
        with epcy.Buffer(comm, backend=backend, preinitialize=way == "preinitialized", **options) as buf:
            if not sets:
                setting = setting_of(given, shape, buf, comm)
                sets = draw_sets(setting, given.seed, num_generations=2, num_slots=1, fixed_routing=False)
            if way == "warmed":
                fields["warmup_us"] = comm.allreduce(wall_us(buf, buf.warmup), MPI.MAX)
            work = work_of(given, buf, sets)
            first_us[way].append(comm.allreduce(run(buf, work, 0), MPI.MAX))
            wrong += work.wrong() if given.check else 0
            if turn == len(WAYS) - 1:
                for index in range(-given.warmup, given.runs):
                    took = run(buf, work, index % 2)
                    if index >= 0:
                        us[index] = took
                    wrong += work.wrong() if given.check else 0
            buf.check()
            num_sms = buf.num_sms if backend == "host" or given.mode == "ht" else given.num_sms
            del work
    fields |= {f"{way}_us": float(np.median(found)) for way, found in first_us.items()}
    times = summarize(np.array(comm.allgather(us)))
    total = comm.allreduce(wrong) if given.check else None
    measured = Measured(times, times.us_p50, None, total)
    moved = count_bytes("roundtrip", sets)
    return table.Row(
        **what_of(given, "first-call", num_tokens, backend, comm.size),
        num_sms=num_sms,
        wrong=total,
        combine_from="array" if given.mode == "ll" or given.dtype == "fp8" else "heap",
        host_us_p50=times.us_p50,
        **fields,
        **figures(measured, moved, None, given.floor_gbps),
    )


def work_of(given: Arguments, buf: epcy.Buffer, sets: list[list[DataSet]]) -> Roundtrip:
    """Return one dispatch and one combine, with all memory of the user's own taken before. Local."""
    gives_back = given.mode == "ht" and given.dtype != "fp8"
    work = Roundtrip(calls_of(given, buf, False, 0), sets, gives_back=gives_back)
    if not gives_back:
        slots = given.experts * (buf.options["num_max_low_latency_tokens_per_rank"] or 0)
        work.take_array(max(slots, work.most_rows))
    return work


def run(buf: epcy.Buffer, work: Roundtrip, generation: int) -> float:
    """Return the microseconds of one dispatch and combine. Collective, blocking."""
    work.load(generation)
    collecting = gc.isenabled()
    gc.disable()
    try:
        return wall_us(buf, work.issue)
    finally:
        if collecting:
            gc.enable()
        work.collect()


def wall_us(buf: epcy.Buffer, function: Any) -> float:
    """Return the host's microseconds until what `function` began has ended, from a barrier on. Collective, blocking."""
    wait = (lambda: None) if buf.xp is np else buf.xp.cuda.get_current_stream().synchronize
    wait()
    buf.comm.Barrier()  # not the Buffer's: nothing of it shall be warm
    start = perf_counter()
    function()
    wait()
    return (perf_counter() - start) * 1e6
