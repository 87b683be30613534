"""The same tests on every rank: agreement on each outcome (see parallel.py), and the fixtures.

EPCY_TEST_BACKENDS  comma-separated backends that the `backend` fixture runs over (default "host")
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from parallel import AGREEMENT, MPI, merge

FAILED = pytest.StashKey[bool]()
BACKENDS = os.environ.get("EPCY_TEST_BACKENDS", "host").split(",")


# ---- one outcome for all ranks


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if AGREEMENT.size > 1:
        text = report.longreprtext if report.failed else None
        replies = AGREEMENT.exchange(
            (report.outcome, text), f"{item.nodeid} ({call.when})", hurry=report.failed, text=text or ""
        )
        outcomes = [outcome for outcome, _ in replies]
        if "failed" in outcomes:
            report.outcome, report.longrepr = "failed", merge([t for _, t in replies])
        elif len(set(outcomes)) > 1:
            report.outcome, report.longrepr = "failed", f"skipped on some ranks only: {outcomes}"
    if report.failed:
        item.stash[FAILED] = True
    return report


ERRORS: list[str] = []


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        ERRORS.append(report.longreprtext)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    items = [item.nodeid for item in session.items]
    replies = AGREEMENT.exchange((items, session.testsfailed), "collection")
    if any(reply != replies[0] for reply in replies):
        counts = "".join(
            f"\n  [rank {r}] {len(found)} tests, {errors} errors" for r, (found, errors) in enumerate(replies)
        )
        AGREEMENT.abort(
            "collection", [], "\n".join([f"the ranks collected different tests:{counts}", *ERRORS])
        )


class Quiet:
    """Where the reporter of a rank other than 0 writes: nowhere, until pytest-timeout dumps stacks."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.loud = stream, False

    def write(self, text: str) -> int:
        if " Timeout " in text and "++" in text:
            self.loud = True
            self.stream.write(f"\n[rank {AGREEMENT.rank}]\n")
        return self.stream.write(text) if self.loud else len(text)

    def flush(self) -> None:
        self.stream.flush()

    def isatty(self) -> bool:
        return False


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    AGREEMENT.start(os.dup(sys.__stderr__.fileno()))
    if AGREEMENT.rank:
        config.get_terminal_writer()._file = Quiet(AGREEMENT.stderr)


def pytest_report_header(config: pytest.Config) -> str:
    library = MPI.Get_library_version().splitlines()[0].strip("\0") if MPI is not None else "no MPI library"
    return f"ranks: {AGREEMENT.size}; {library}; backends: {', '.join(BACKENDS)}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(item.config.rootpath).parts[1:2]
        for name in {"mpi": ["mpi"], "property": ["mpi"], "gpu": ["mpi", "gpu"]}.get(*folder or ("",), []):
            item.add_marker(name)


# ---- fixtures


@pytest.fixture
def failed(request: pytest.FixtureRequest) -> Callable[[], bool]:
    """Tell a fixture's teardown whether the test failed on any rank: nothing collective may follow."""
    return lambda: request.node.stash.get(FAILED, False)


@pytest.fixture
def comm(failed: Callable[[], bool]) -> Iterator[Any]:
    """A duplicate of COMM_WORLD of this test's own."""
    if MPI is None:
        pytest.skip("no MPI library")
    duplicate = MPI.COMM_WORLD.Dup()
    yield duplicate
    if not failed():
        duplicate.Free()


@pytest.fixture
def subcomm(comm: Any, failed: Callable[[], bool]) -> Iterator[Callable[[int], Any]]:
    """A function `subcomm(size)`, collective: the first `size` ranks get a communicator, others COMM_NULL."""
    made = []

    def split(size: int) -> Any:
        part = comm.Split(0 if comm.rank < size else MPI.UNDEFINED, comm.rank)
        made.append(part)
        return part

    yield split
    for part in made:
        if part != MPI.COMM_NULL and not failed():
            part.Free()


@pytest.fixture
def same(comm: Any) -> Callable[[Any], Any]:
    """A function `same(obj)`: rank 0's object on every rank; a callable is called on rank 0 alone."""

    def draw(obj: Any) -> Any:
        return comm.bcast((obj() if callable(obj) else obj) if comm.rank == 0 else None)

    return draw


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend in turn; `host_only("why")` on a test, or on a case of it, leaves the others out."""
    only = request.node.get_closest_marker("host_only")
    if only is not None and request.param != "host":
        pytest.skip(only.args[0])
    if request.param == "nvshmem":
        request.getfixturevalue("gpu")
    return request.param


@pytest.fixture(scope="session")
def gpu() -> None:
    """This rank's GPU is the current one, and Buffers of a part of the ranks find memory."""
    import cupy

    import epcy

    cupy.cuda.Device(MPI.COMM_WORLD.rank % cupy.cuda.runtime.getDeviceCount()).use()
    epcy.init(MPI.COMM_WORLD, heap_bytes=256 << 20)


@pytest.fixture
def one_rank(comm: Any, backend: str) -> None:
    """For tests that start jobs of their own, on the host backend."""
    if comm.size > 1:
        pytest.skip("these start jobs of their own: run with one rank")
    if backend != "host":
        pytest.skip("the host backend's jobs")


@pytest.fixture
def make_buffer(comm: Any, backend: str, failed: Callable[[], bool]) -> Iterator[Callable[..., Any]]:
    """A function `make_buffer(comm=..., **options)` that builds an `epcy.Buffer` for this test.

    Small sizes are filled in, and its GPU becomes the current one: tests make arrays there. The Buffers are freed
    after the test, last made first, unless a rank failed.
    """
    import epcy

    made = []

    def make(comm: Any = comm, **options: Any) -> Any:
        sizes = {"num_max_tokens_per_rank": 16, "hidden": 512, "num_experts": 4 * comm.size, "num_topk": 2}
        buffer = epcy.Buffer(comm, **{**sizes, "backend": backend, **options})
        made.append(buffer)
        if buffer.backend == "nvshmem":
            buffer.xp.cuda.Device(buffer.options["device"]).use()
        return buffer

    yield make
    if not failed():
        for buffer in reversed(made):
            buffer.free()
