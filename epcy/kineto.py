"""Times of single kernels: by CUPTI on a GPU, by epcy's own ring of spans on the host backend."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from epcy.backends.meter import Meter, meters
from epcy.errors import ArgumentError, StateError
from epcy.timeline import spans_as_events, write

__all__ = ["bench_kineto"]

Kernel = tuple[str, int, int]  # name, start_ns, end_ns
Times = float | list[float]


def bench_kineto(
    fn: Callable[[], object],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_output: bool = False,
    trace_path: str | os.PathLike[str] | None = None,
    barrier: Callable[[], object] | None = None,
    num_kernels_per_period: int = 1,
) -> Any:
    """Run a function and tell the mean time of the kernels that it launches.

    Local, blocking; collective if `fn` or `barrier` is. It runs `fn` once untimed, then num_tests times. On a GPU the
    times are those of CUPTI's activity records, which need the cupti extra (`pip install epcy[cupti]`); without it,
    with a RuntimeWarning, CUDA events around `fn` stand in for one kernel. On the host backend they come from the spans
    that Buffers keep: an operation ("dispatch") or a phase of one ("dispatch.send"; docs/seeing.md lists them).

    Parameters
    ----------
    fn : callable
        Without arguments.
    kernel_names : str or tuple of str
        On a GPU each is looked for in the kernels' names and must be in one alone; on the host each is a span's name.
    num_tests : int
    suppress_output : bool
        Send what this process prints meanwhile nowhere.
    trace_path : path, optional
        Write a Chrome trace of what ran. Where several ranks are given the same path, `.rankN` is put before the suffix
        on all but rank 0.
    barrier : callable, optional
        Called before each run, as `buf.barrier`.
    num_kernels_per_period : int
        How many kernels of that name one period launches: the means of the first, second, ... are told apart.

    Returns
    -------
    float, or list of float for num_kernels_per_period > 1; a tuple of them for a tuple of names
        Seconds.

    Raises
    ------
    ArgumentError
        A name that never ran, or that several kernels' names hold; the message lists what ran.
    StateError
        On the host backend: a ring does not hold num_tests runs, or every Buffer has `stats=False`.
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else tuple(kernel_names)
    for value, name in ((num_tests, "num_tests"), (num_kernels_per_period, "num_kernels_per_period")):
        if not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{name}: expected a positive whole number, got {value!r}")
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ArgumentError(f"kernel_names: expected a name, or a tuple of names, got {kernel_names!r}")

    def run() -> None:
        for _ in range(num_tests):
            if barrier is not None:
                barrier()
            fn()

    with _silence() if suppress_output else contextlib.nullcontext():
        fn()
        record = _on_gpu if _uses_gpu() else _on_host
        kernels = record(run, num_tests)
    found = [_means(kernels, name, num_kernels_per_period) for name in names]
    if trace_path is not None:
        events = spans_as_events([(start, end, 0, name) for name, start, end in kernels], _rank(), 1)
        first = min((event["ts"] for event in events), default=0)
        for event in events:
            event["ts"] = (event["ts"] - first) / 1e3
        write(_path_of(Path(trace_path)), {"traceEvents": events, "displayTimeUnit": "ns"})
    return found[0] if isinstance(kernel_names, str) else tuple(found)


def _uses_gpu() -> bool:
    found = meters()
    if found:
        return any(meter.backend == "nvshmem" for meter in found)
    return "cupy" in sys.modules


def _means(kernels: list[Kernel], name: str, num_kernels_per_period: int) -> Times:
    """Mean seconds of the kernels of a name."""
    ran = sorted({kernel for kernel, _, _ in kernels})
    matching = [kernel for kernel in ran if kernel == name] or [kernel for kernel in ran if name in kernel]
    if len(matching) != 1:
        what = "ran never" if not matching else f"is part of the names of {len(matching)} kernels"
        raise ArgumentError(
            f"kernel_names: {name!r} {what} (rank {_rank()}); what ran is {', '.join(matching or ran) or 'nothing'}"
        )
    seconds = [(end - start) * 1e-9 for kernel, start, end in kernels if kernel == matching[0]]
    if num_kernels_per_period == 1:
        return float(np.mean(seconds))
    if len(seconds) % num_kernels_per_period:
        raise ArgumentError(
            f"num_kernels_per_period: {name!r} ran {len(seconds)} times (rank {_rank()}), which is no multiple of "
            f"{num_kernels_per_period}"
        )
    return [float(np.mean(seconds[first::num_kernels_per_period])) for first in range(num_kernels_per_period)]


def _on_host(run: Callable[[], None], num_tests: int) -> list[Kernel]:
    """The spans of all Buffers of this process."""
    before: list[tuple[Meter, int]] = [(meter, meter.num_events) for meter in meters()]
    if not before:
        raise StateError(
            f"bench_kineto: no Buffer of this process counts anything (rank {_rank()}); construct one with stats=True "
            "and keep it while fn runs"
        )
    run()
    found: list[Kernel] = []
    for meter, first in before:
        events = meter.events(first)
        if len(events) < meter.num_events - first:
            raise StateError(
                f"num_tests: {meter.num_events - first} spans were recorded (rank {_rank()}), the ring of a Buffer has "
                f"room for {len(events)}; give fewer num_tests than {num_tests}"
            )
        found += [(name, start, end) for start, end, _, name in events]
    return sorted(found, key=lambda kernel: kernel[1])


def _on_gpu(run: Callable[[], None], num_tests: int) -> list[Kernel]:
    """The kernels that CUPTI saw; without it one that is everything between two CUDA events."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    try:
        from cupti import cupti
    except ImportError as error:
        warnings.warn(
            f"bench_kineto: cupti-python cannot be imported ({error}; pip install 'epcy[cupti]'): the time of fn "
            "between CUDA events stands in for its kernel's, and one name is all that can be told",
            RuntimeWarning,
            stacklevel=3,
        )
        return _between_events(cupy, run, stream, num_tests)
    kernels: list[Kernel] = []

    def completed(activities: list[Any]) -> None:
        for activity in activities:
            if activity.kind == cupti.ActivityKind.CONCURRENT_KERNEL:
                kernels.append((activity.name, activity.start, activity.end))

    stream.synchronize()
    cupti.activity_register_callbacks(lambda: (8 << 20, 0), completed)
    cupti.activity_enable(cupti.ActivityKind.CONCURRENT_KERNEL)
    try:
        run()
        cupy.cuda.runtime.deviceSynchronize()
    finally:
        cupti.activity_flush_all(1)
        cupti.activity_disable(cupti.ActivityKind.CONCURRENT_KERNEL)
    return sorted(kernels, key=lambda kernel: kernel[1])


def _between_events(cupy: Any, run: Callable[[], None], stream: Any, num_tests: int) -> list[Kernel]:
    """One kernel of whatever name for each run: the mean time between two events."""
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(stream)
    run()
    stop.record(stream)
    stop.synchronize()
    ns = int(cupy.cuda.get_elapsed_time(start, stop) * 1e6 / num_tests)
    return [(_ANY, i * ns, (i + 1) * ns) for i in range(num_tests)]


class _AnyName(str):
    """The name of a kernel that only events saw: every name is in it."""

    def __contains__(self, name: object) -> bool:
        return True


_ANY = _AnyName("fn, between CUDA events")


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Point the process's output nowhere, that of C libraries too."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(fd) for fd in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for fd in (1, 2):
            os.dup2(nowhere, fd)
        with (
            open(os.devnull, "w", encoding="utf-8") as file,
            contextlib.redirect_stdout(file),
            contextlib.redirect_stderr(file),
        ):
            yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, fd)
            os.close(copy)
        os.close(nowhere)


def _rank() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank if MPI.Is_initialized() and not MPI.Is_finalized() else 0


def _path_of(path: Path) -> Path:
    rank = _rank()
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path
