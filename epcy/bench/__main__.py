"""Measure; see ``python -m epcy.bench --help``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mpi4py import MPI

import epcy
from epcy import backends
from epcy.bench import (
    arguments,
    cases,
    checking,
    environment,
    first_call,
    measure,
    pictures,
    prediction,
    results,
    suites,
    table,
)
from epcy.bench.arguments import Arguments
from epcy.bench.workload import BUFFER_DTYPES, Shape, draw_inputs
from epcy.command_line import FAILURES, report

BASELINE = "mpi4py Alltoallv"


def measure_line(
    comm: MPI.Intracomm, given: Arguments, case: str, num_tokens: int, memcpy_gbps: float
) -> table.Row:
    """Time and check one case at one size. Collective, blocking."""
    shape = Shape(num_tokens, given.hidden, given.topk, given.experts, given.dtype)
    inputs = draw_inputs(shape, given.routing, given.seed, comm.rank)
    expected = None
    if given.check:
        expected = checking.Expected(shape, given.routing, given.seed + 1, comm.rank, comm.size, given.layout)
    moved = measure.count_bytes(case, shape, inputs.topk_idx, comm, given.layout)
    wrong = baseline_wrong = None
    beside: dict[str, Any] = {}
    with make_buffer(comm, given, shape) as buf:
        timed = cases.time_epcy(case, buf, shape, inputs, given.layout, given.cached)
        times = measure.time_runs(comm, buf.barrier, timed, given.runs, given.warmup)
        if expected is not None:
            wrong = comm.allreduce(checking.check_epcy(buf, expected, case, given.cached))
        if given.baseline:
            exchange = cases.make_baseline(comm, shape)
            timed = cases.time_baseline(case, exchange, shape, inputs, given.cached)
            baseline_times = measure.time_runs(comm, buf.barrier, timed, given.runs, given.warmup)
            beside = table.baseline_figures(BASELINE, baseline_times, times.us_p50)
            if expected is not None:
                baseline_wrong = comm.allreduce(checking.check_baseline(exchange, expected, case))
        if given.predict:
            beside |= prediction.predict(buf, given, case, num_tokens, times.us_p50)
        backend, num_sms = buf.backend, buf.num_sms
    return table.Row(
        case=case,
        mode=given.mode,
        backend=backend,
        ranks=comm.size,
        tokens=num_tokens,
        hidden=given.hidden,
        topk=given.topk,
        experts=given.experts,
        dtype=given.dtype,
        layout=given.layout,
        routing=os.path.basename(given.routing),
        cached=given.cached,
        graph=given.graph,
        num_sms=num_sms,
        runs=given.runs,
        wrong=wrong,
        baseline_wrong=baseline_wrong,
        **beside,
        **table.figures(times, moved, memcpy_gbps),
    )


def make_buffer(comm: MPI.Intracomm, given: Arguments, shape: Shape) -> epcy.Buffer:
    """Make the Buffer of one line, with room for whatever the routing sends. Collective, blocking."""
    num_max_recv_tokens = None
    if given.layout == "expert":
        lanes = min(shape.num_topk, shape.num_experts // comm.size) if given.routing != "one-hot" else 1
        num_max_recv_tokens = max(comm.size * shape.num_tokens * lanes, 1)
    return epcy.Buffer(
        comm,
        num_max_tokens_per_rank=shape.num_tokens,
        hidden=shape.hidden,
        num_experts=shape.num_experts,
        num_topk=shape.num_topk,
        dtype=BUFFER_DTYPES[shape.dtype],
        backend="host",
        num_sms=given.num_sms,
        num_max_recv_tokens=num_max_recv_tokens,
        check=given.inspect,
        preinitialize=True,
    )


def refuse_what_is_missing(given: Arguments, backend: str) -> None:
    """Raise NotSupportedError for what this build or this backend does not have."""
    if given.predict:
        prediction.refuse_what_has_none(given)
    if backend == "host" and (given.graph or (given.suite or "").startswith("figures")):
        option = "--graph" if given.graph else "--suite"
        raise epcy.NotSupportedError(
            f"{option}: CUDA graphs need the nvshmem backend, and this run is on host; leave {option} out"
        )
    for name in given.baselines(backend):
        if name not in arguments.BASELINES[backend]:
            raise epcy.NotSupportedError(
                f"--baseline: {name} is not for backend {backend}, "
                f"which has {', '.join(arguments.BASELINES[backend])}"
            )
    if backend == "host" and given.mode == "ll" and given.baseline:
        raise epcy.NotSupportedError("--baseline: none moves low-latency rows on host; leave --baseline out")


def run(comm: MPI.Intracomm, given: Arguments, backend: str, argv: Sequence[str]) -> int:
    """Print the table, write the files; return 1 where a row was wrong. Collective, blocking."""

    def say(text: str) -> None:
        if comm.rank == 0:
            sys.stdout.write(text)
            sys.stdout.flush()

    if backend == "nvshmem" or given.mode == "ll" or given.suite is not None:
        from epcy.bench import device_run

        lines = suites.expand(given, comm.size)
        return device_run.run(comm, given, lines, backend, argv, say)
    return run_on_host(comm, given, argv, say)


def run_on_host(
    comm: MPI.Intracomm, given: Arguments, argv: Sequence[str], say: Callable[[str], None]
) -> int:
    """Measure high throughput on the host backend. Collective, blocking."""
    env = environment.describe(argv, comm.size)
    memcpy_gbps = measure.measure_memcpy(comm)
    say(
        f"# {env['command']}\n# {env['date']}, {env['processor']}, {env['cores']} cores, {env['mpi']}\n"
        f"# {comm.size} ranks, H {given.hidden}, K {given.topk}, E {given.experts}, {given.dtype}, "
        f"{given.routing} routing, {given.layout} layout{', cached' if given.cached else ''}\n"
        f"# memcpy by all ranks at once: {memcpy_gbps:.1f} GB/s a rank, bytes read and bytes written counted\n"
    )
    drift = prediction.Drift(comm, "host", given.predict)
    drift.look()
    say(table.heading(bool(given.baseline)))
    rows = []
    for case in given.cases:
        for num_tokens in given.sizes:
            if case == "first-call":
                rows.append(first_call.measure(comm, given, "host", num_tokens))
            else:
                rows.append(measure_line(comm, given, case, num_tokens, memcpy_gbps))
                if given.check_cost:
                    again = replace(given, inspect=True, baseline=())
                    rows[-1] = rows[-1].with_check(measure_line(comm, again, case, num_tokens, memcpy_gbps))
            say(table.line(rows[-1]) + table.notes(rows[-1]))
    drift.look()
    say(prediction.summary(rows) + drift.text())
    if given.plot is not None:
        say(pictures.draw(comm, given, rows, {}))
    if comm.rank == 0:
        if given.json is not None:
            content = {"schema": 1, "env": env, "rows": [row.as_json() for row in rows]}
            results.write(given.json, content)
    return int(any((row.wrong or 0) + (row.baseline_wrong or 0) for row in rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line on rank 0, measure on all ranks; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "replay":
        from epcy.bench import replay

        return replay.main(argv[1:])
    comm = MPI.COMM_WORLD
    given: Arguments | None = None
    status, backend = 0, ""
    if comm.rank == 0:
        # Only here: one message instead of one a rank, and nobody leaves before it is written.
        try:
            given = arguments.parse(argv, comm.size)
            backend = backends.find(given.backend)[0]
            refuse_what_is_missing(given, backend)
            suites.expand(given, comm.size)
            if given.predict:
                prediction.refuse_without_constants(backend, comm.size)
        except SystemExit as exit_:
            given, status = None, int(exit_.code or 0)
        except (epcy.EpcyError, *FAILURES) as error:
            given, status = None, report("epcy.bench", error)
        sys.stdout.flush()
        sys.stderr.flush()
    given, backend, status = comm.bcast((given, backend, status))
    if given is None:
        return int(status)
    try:
        return run(comm, given, backend, argv)
    except (epcy.EpcyError, *FAILURES) as error:
        return report("epcy.bench", error, comm)


if __name__ == "__main__":
    sys.exit(main())
