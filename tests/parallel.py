"""Tests that run on every rank at once: agreement on outcomes, and hypothesis over ranks.

One body runs on all ranks (``mpiexec -n N python -m pytest``). After each phase of a test the ranks exchange
what happened (`Agreement.exchange`), so that a failure anywhere fails the test everywhere and the ranks stay
together. A rank that does not arrive is named, where it stands is printed, and the job is aborted: no hang.

Property tests use `given` of this module in place of hypothesis': rank 0 draws and shrinks, the others do the
same examples. Tests of whole programs start them with `launch`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import inspect
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

try:
    from mpi4py import MPI
except (ImportError, RuntimeError):  # the unit tests need no MPI library
    MPI = None

# Seconds that a rank waits for the slowest one, when the test failed here, and when it did not.
GRACE = float(os.environ.get("EPCY_TEST_GRACE", 5.0))
LIMIT = float(os.environ.get("EPCY_TEST_LIMIT", 60.0))
TAG = 7
ROOT = Path(__file__).resolve().parent.parent


class Agreement:
    """What the ranks tell each other about the tests, on a communicator of its own."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD.Dup() if MPI is not None else None
        self.rank = self.comm.rank if self.comm is not None else 0
        self.size = self.comm.size if self.comm is not None else 1
        self.stderr = sys.stderr
        self.processes: list[tuple[str, int, str]] = []  # host, pid, the file for a stuck rank's stack

    def start(self, stderr_fd: int) -> None:
        """Learn every rank's process; from now on SIGUSR1 makes a rank write down where it stands."""
        self.stderr = os.fdopen(stderr_fd, "w")
        if self.size > 1:
            self.stack = tempfile.NamedTemporaryFile("w", prefix="epcy-test-stack-")
            # Unlike a handler in Python, this one answers inside an MPI call.
            faulthandler.register(signal.SIGUSR1, file=self.stack, all_threads=False)
            self.processes = self.comm.allgather((socket.gethostname(), os.getpid(), self.stack.name))

    def exchange(self, message: Any, what: str, hurry: bool = False, text: str = "") -> list[Any]:
        """Return every rank's message in rank order, or abort the job when a rank does not come.

        `hurry` says that this rank failed: the others have GRACE seconds. `text` is printed on an abort.
        """
        if self.size == 1:
            return [message]
        # Plain messages, not an allgather: after a time-out we know who is missing.
        others = [r for r in range(self.size) if r != self.rank]
        sends = [self.comm.isend((what, message), dest=r, tag=TAG) for r in others]
        got: dict[int, Any] = {self.rank: (what, message)}
        start, pause = time.monotonic(), 0.0
        while len(got) < self.size:
            for r in others:
                if r not in got and self.comm.iprobe(source=r, tag=TAG):
                    got[r] = self.comm.recv(source=r, tag=TAG)
            if time.monotonic() - start > (GRACE if hurry else LIMIT):
                self.abort(what, [r for r in others if r not in got], text)
            time.sleep(pause)
            pause = min(pause + 2e-5, 1e-3)
        MPI.Request.waitall(sends)
        if len({w for w, _ in got.values()}) > 1:
            stands = "".join(f"\n  [rank {r}] {got[r][0]}" for r in sorted(got))
            self.abort(what, [], f"the ranks are not at the same point:{stands}\n{text}")
        return [got[r][1] for r in range(self.size)]

    def abort(self, what: str, missing: list[int], text: str) -> None:
        """Say what this rank knows and where the missing ranks stand, and end the job."""
        lines = [f"\n[rank {self.rank}] {what}: ranks diverged, aborting the job", text]
        if missing:
            lines.append(f"[rank {self.rank}] ranks that did not come: {missing}")
            lines += [f"[rank {r}] {self.stands_at(r)}" for r in missing]
        self.stderr.write("\n".join([*lines, ""]))
        self.stderr.flush()
        time.sleep(0.2)  # the others' words before the launcher ends them
        self.comm.Abort(1)

    def stands_at(self, rank: int) -> str:
        """Return the innermost frames of a stuck rank of this host, pytest's own left out."""
        host, pid, path = self.processes[rank] if self.processes else ("", 0, "")
        if host != socket.gethostname():
            return "is on another host"
        try:
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.3)
            with open(path) as file:
                frames = file.read().splitlines()
        except OSError:
            return "has no process any more"
        end = next(
            (i for i, frame in enumerate(frames) if re.search("/_pytest/|/pluggy/|/hypothesis/", frame)),
            len(frames),
        )
        return "stands at:\n" + "\n".join(frames[1:end])


def merge(texts: list[str | None]) -> str:
    """Join the ranks' failure texts; equal ones (addresses and rank numbers apart) are told once."""
    groups: dict[str, tuple[list[int], str]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            key = re.sub(r"0x[0-9a-fA-F]+|rank[ =]+\d+", "", text)
            groups.setdefault(key, ([], text))[0].append(rank)
    parts = []
    for ranks, text in groups.values():
        name = f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
        parts.append(f"[{name}] {text}" if "\n" not in text else f"[{name}]\n{text}")
    return "\n".join(parts)


AGREEMENT = Agreement()


def mpiexec() -> str | None:
    """Find the launcher that belongs to this python, else the one on PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    return beside if os.access(beside, os.X_OK) else shutil.which("mpiexec")


def launch(
    num_ranks: int,
    args: list[str],
    *,
    timeout: float = 60.0,
    env: dict[str, str] | None = None,
    options: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGS` on a number of ranks in a job of its own, all of which ends with the time limit.

    `options` go to mpiexec (MPICH: ``-disable-auto-cleanup`` lets survivors outlive a killed rank). Returns
    what subprocess.run would, stdout and stderr as text; raises subprocess.TimeoutExpired.
    """
    launcher = mpiexec()
    if launcher is None:
        pytest.skip("no mpiexec")
    # A job inside a job: by the outer launcher's variables every process would take itself for its rank.
    outer = ("PMI_", "PMIX_", "OMPI_COMM", "HYDI_", "PALS_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    command = [launcher, *options, "-n", str(num_ranks), sys.executable, *args]
    with subprocess.Popen(
        command,
        env={**inherited, **(env or {})},
        cwd=ROOT,
        start_new_session=True,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)  # hydra ends its ranks, which are in sessions of their own
            time.sleep(0.5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


class RankFailure(AssertionError):
    """An example failed on some rank; the message holds each rank's traceback."""


def given(max_examples: int = 100, **strategies: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test body on all ranks for examples that hypothesis draws, and shrinks, on rank 0.

    >>> @given(max_examples=50, case=routings())
    ... def test_dispatch(comm, case): ...

    Collective. Rank 0 runs hypothesis and broadcasts each example; every rank runs the body; the ranks
    exchange the outcomes, and a failure on any of them fails the example on rank 0, which then shrinks as
    usual. Drawn values must pickle. Fixtures are made once, not once an example. Filter in the strategy:
    `assume` and `data()` have no meaning in a body that runs on several ranks.
    """
    import hypothesis

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def example(fixtures: dict[str, Any], drawn: dict[str, Any]) -> None:
            text = error = None
            try:
                body(**fixtures, **drawn)
            except Exception as e:
                error, text = e, traceback.format_exc()
            what = f"{body.__name__} on {drawn!r}"[:2000]
            texts = AGREEMENT.exchange(text, what, hurry=text is not None, text=text or "")
            if any(t is not None for t in texts):
                if AGREEMENT.size == 1:
                    raise error
                raise RankFailure(merge(texts)) from None

        @functools.wraps(body)
        def test(**fixtures: Any) -> None:
            comm = AGREEMENT.comm
            if AGREEMENT.rank:
                while (drawn := comm.bcast(None)) is not None:
                    try:
                        example(fixtures, drawn)
                    except RankFailure:
                        pass  # rank 0 has it too: it shrinks, and reports the smallest
                if comm.bcast(None):
                    pytest.fail("rank 0 tells of an example that fails", pytrace=False)
                return

            @hypothesis.settings(
                max_examples=max_examples,
                deadline=None,
                database=None,
                derandomize=bool(os.environ.get("CI")),
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            @hypothesis.given(**strategies)
            def draw(**drawn: Any) -> None:
                if comm is not None:
                    comm.bcast(drawn)
                example(fixtures, drawn)

            failed = True
            try:
                draw()
                failed = False
            finally:
                if comm is not None:
                    comm.bcast(None)
                    comm.bcast(failed)

        signature = inspect.signature(body)
        test.__signature__ = signature.replace(  # pytest shall pass the fixtures alone
            parameters=[p for name, p in signature.parameters.items() if name not in strategies]
        )
        return test

    return decorate
