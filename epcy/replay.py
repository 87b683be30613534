"""`python -m epcy replay`: a recording replayed in a job that is started for it, and shrunk by many such jobs."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from epcy.errors import ArgumentError
from epcy.info import find_mpiexec
from epcy.recording import Recording, read, spread, write
from epcy.recording.cut import keep_calls
from epcy.recording.shrink import describe, shrink

__all__ = ["Job", "main"]

# Variables by which a process knows its rank.
OUTER = ("PMI_", "PMIX_", "OMPI_", "HYDI_", "PALS_", "MPIEXEC_")


class Job:
    """Replays recordings in jobs of their own, each with a time limit.

    Parameters
    ----------
    launcher : list of str
        What starts ranks: the words before `-n`.
    backend : str, optional
    timeout : float
        Seconds that a call of the replay may wait for another rank.
    seconds : float
        That a job may take before it is ended as hanging.
    """

    def __init__(self, launcher: list[str], backend: str | None, timeout: float, seconds: float) -> None:
        self.launcher, self.backend, self.timeout, self.seconds = launcher, backend, timeout, seconds
        self.num_jobs = 0

    def command(self, path: str | os.PathLike[str], num_ranks: int) -> list[str]:
        backend = ["--backend", self.backend] if self.backend else []
        replay = [sys.executable, "-m", "mpi4py", "-m", "epcy.bench", "replay", os.fspath(path)]
        return [*self.launcher, "-n", str(num_ranks), *replay, "--timeout", f"{self.timeout:g}", *backend]

    def failure(self, recording: Recording) -> dict[str, Any] | None:
        """Replay; return how it failed ("kind", "call"), or None. Blocking.

        A job that does not end is of the kind "hang", one that ends without a word of the kind "crash".
        """
        self.num_jobs += 1
        with tempfile.TemporaryDirectory(prefix="epcy-replay-") as folder:
            path, out = Path(folder, "it.npz"), Path(folder, "out.json")
            write(path, recording)
            command = [*self.command(path, recording.num_ranks), "--json", os.fspath(out)]
            environ = {name: value for name, value in os.environ.items() if not name.startswith(OUTER)}
            with subprocess.Popen(
                command, env=environ, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, text=True,
            ) as process:  # fmt: skip
                try:
                    told = process.communicate(timeout=self.seconds)[1]
                except BaseException as error:
                    _end(process)
                    if isinstance(error, subprocess.TimeoutExpired):
                        return {"kind": "hang", "call": len(recording.calls) - 1}
                    raise
            if out.exists():
                failure: dict[str, Any] | None = json.loads(out.read_text())["failure"]
                return failure
            if process.returncode == 2:
                raise ArgumentError(f"recording: it cannot be replayed: {told.strip()}")
            return {"kind": "crash", "call": len(recording.calls) - 1} if process.returncode else None


def _end(process: subprocess.Popen[str]) -> None:
    """End a launcher, which ends its ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(2)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def main(arguments: argparse.Namespace) -> int:
    """Replay a file, or shrink it; return the exit status."""
    found = find_mpiexec()
    try:
        launcher = shlex.split(arguments.launcher) if arguments.launcher else [found] if found else []
    except ValueError as error:  # a quote that nothing closes
        raise ArgumentError(f"launcher: cannot be read as words ({error}): {arguments.launcher!r}") from None
    if not launcher:
        raise ArgumentError(
            f"launcher: found no mpiexec on PATH ({os.environ.get('PATH', '')}) or beside {sys.executable}; say with "
            "--launcher what starts ranks, such as 'srun'"
        )
    if shutil.which(launcher[0]) is None:
        raise ArgumentError(f"launcher: {launcher[0]!r} is no program on PATH ({os.environ.get('PATH', '')})")
    recording = read(arguments.file)
    num_ranks = arguments.ranks or recording.num_ranks
    job = Job(launcher, arguments.backend, arguments.timeout, arguments.timeout * 2 + 100)
    if not arguments.shrink:
        return subprocess.run(job.command(arguments.file, num_ranks)).returncode
    return _shrink(arguments, job, spread(recording, num_ranks))


def _shrink(arguments: argparse.Namespace, job: Job, recording: Recording) -> int:
    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    start = time.monotonic()
    say(f"whole: {describe(recording)}")
    first = job.failure(recording)
    if first is None:
        say("it does not fail here: nothing to shrink")
        return 1
    say(f"fails in call {first['call']}: {first['kind']}")
    recording = keep_calls(recording, range(first["call"] + 1))

    def fails(candidate: Recording) -> bool:
        found = job.failure(candidate)
        return found is not None and found["kind"] == first["kind"]

    if not fails(recording):
        say("it fails no more when replayed again: too unsteady to shrink")
        return 1
    smallest = shrink(
        recording, fails, seconds=arguments.seconds, say=lambda text: say(f"still fails: {text}")
    )
    path = arguments.output or os.fspath(Path(arguments.file).with_suffix("")) + ".shrunk.npz"
    write(path, smallest)
    say(f"{job.num_jobs} replays in {time.monotonic() - start:.0f} s; kept in {path}:")
    say(f"  {shlex.join(job.command(path, smallest.num_ranks))}")
    return 0
