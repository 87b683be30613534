"""A run on the nvshmem backend, or of low latency on any: links first, then every line; the file grows with each."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mpi4py import MPI

import epcy
from epcy.bench import device_table, environment, links, nccl, pictures, prediction, results, table
from epcy.bench.arguments import CASES, Arguments
from epcy.bench.lines import Bench


def run(
    comm: MPI.Intracomm,
    given: Arguments,
    lines: Sequence[Arguments],
    backend: str,
    argv: Sequence[str],
    say: Callable[[str], None],
) -> int:
    """Print the table, write the file; return 1 where a row was wrong. Collective, blocking."""
    env = environment.describe(argv, comm.size)
    bench = Bench(comm, backend)
    with contextlib.ExitStack() as stack:
        rates = None
        if backend == "nvshmem":
            rates = start_on_device(comm, bench, env, lines, stack, say)
        say_heading(env, rates, given, say)
        names = tuple(dict.fromkeys(name for one in lines for name in one.baselines(backend)))
        names = names if bench.nccl is not None else ()
        drift = prediction.Drift(comm, backend, given.predict)
        drift.look()
        say(device_table.heading(names))
        rows: list[table.Row] = []
        missing = set() if hasattr(epcy.Buffer, "low_latency_dispatch") else {"ll"}  # modes
        if missing & {one.mode for one in lines}:
            say("# --mode ll is left out: this build has no low-latency calls\n")
        for one in lines:
            for case, num_tokens in ((case, size) for case in one.cases for size in one.sizes):
                if one.mode in missing:
                    continue
                try:
                    rows.append(bench.measure(one, case, num_tokens))
                    if one.check_cost and case in CASES:
                        again = replace(one, inspect=True, baseline=())
                        rows[-1] = rows[-1].with_check(bench.measure(again, case, num_tokens))
                except NotImplementedError as error:  # on all ranks alike
                    if given.suite is None or one.mode != "ll" or any(row.mode == "ll" for row in rows):
                        raise
                    missing.add(one.mode)
                    say(f"# --mode ll is left out: {error or 'this backend does not have it yet'}\n")
                    continue
                say(device_table.line(rows[-1], names) + table.notes(rows[-1]))
                if comm.rank == 0 and given.json is not None:
                    write(given.json, env, rates, rows)
                free_pool(backend)
        drift.look()
        say(prediction.summary(rows) + drift.text())
        bench.close()  # after an exception the other ranks may be anywhere: nothing collective then
        if given.plot is not None:
            say(pictures.draw(comm, given, rows, bench.timeline))
        return int(any((row.wrong or 0) + (row.baseline_wrong or 0) for row in rows))


def start_on_device(
    comm: MPI.Intracomm,
    bench: Bench,
    env: dict[str, Any],
    lines: Sequence[Arguments],
    stack: contextlib.ExitStack,
    say: Callable[[str], None],
) -> dict[str, float] | None:
    """Take this rank's GPU and a stream of our own for the whole run, measure links, start NCCL; fill `env`."""
    import cupy

    # It chooses the GPU.
    with epcy.Buffer(
        comm, num_max_tokens_per_rank=1, hidden=512, num_experts=comm.size, num_topk=1, backend="nvshmem"
    ) as first:
        device = first.options["device"]
    stack.enter_context(cupy.cuda.Device(device))
    stack.enter_context(cupy.cuda.Stream(non_blocking=True))
    env.update(environment.describe_devices(comm, device))
    rates = links.measure(comm)
    if rates is not None:  # between nodes: at the first line's row size
        rates |= links.measure_puts(comm, lines[0].hidden)
    bench.peer_copy_gbps = None if rates is None else rates["copy_one_way_gbps"]
    env["nccl"] = None
    if any(one.baselines("nvshmem") for one in lines):
        bench.nccl, text = nccl.start(comm)
        if bench.nccl is None:
            say(f"# baselines are left out: {text}\n")
        else:
            env["nccl"] = text
    return rates


def say_heading(
    env: dict[str, Any], rates: dict[str, float] | None, given: Arguments, say: Callable[[str], None]
) -> None:
    """Say what runs on what, and how the columns count."""
    say(f"# {env['command']}\n# {env['date']}, {env['processor']}, {env['cores']} cores, {env['mpi']}\n")
    if "devices" in env:
        devices = ", ".join(
            f"{name} ({sms} SMs)" for name, sms in zip(env["devices"], env["device_sms"], strict=True)
        )
        say(
            f"# {devices}; driver {env['driver']}, CUDA {env['cuda_runtime']}, NVSHMEM {env['nvshmem']}, "
            f"CuPy {env['cupy']}, NCCL {env['nccl']}\n"
        )
        if env["ranks_share_a_device"]:
            say("# ranks share a GPU: these times say nothing\n")
    if rates is not None:
        text = ", ".join(
            f"{name.removesuffix('_gbps').replace('_', ' ')} {rate:.0f}" for name, rate in rates.items()
        )
        floor = f"{given.floor_gbps} GB/s, as given" if given.floor_gbps else "copy one way"
        say(
            f"# links, GB/s a rank (push and pull: TMA on {links.SMS} SMs): {text}\n# floor: wire bytes at {floor}\n"
        )


def write(path: str, env: dict[str, Any], rates: dict[str, float] | None, rows: Sequence[table.Row]) -> None:
    """Write the file anew. Local."""
    shown = (
        None
        if rates is None
        else {"sms": links.SMS, **{name: round(rate, 1) for name, rate in rates.items()}}
    )
    content = {"schema": 1, "env": env, "links": shown, "rows": [row.as_json() for row in rows]}
    results.write(path, content)


def free_pool(backend: str) -> None:
    """Give CuPy's unused memory back: a Buffer looks for free memory."""
    gc.collect()
    if backend == "nvshmem":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
