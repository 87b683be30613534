"""What the command lines share: options that are numbers within bounds, and errors told in one line."""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from epcy.errors import BackendError, PeerError, PeerTimeoutError, StateError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["FAILURES", "parse", "positive", "report", "whole"]

# What a command's arguments can lead to, besides what argparse finds; anything else is a mistake of ours.
FAILURES = (MemoryError, OSError)
MOST = 2**31 - 1
TELLING_SECONDS = 2.0  # that a rank waits to learn whether the others ran into the same


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """Return an argparse type: a whole number from `least` to `most`. Local."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {text!r}")
        return value

    return read


def positive(what: str, most: float) -> Callable[[str], float]:
    """Return an argparse type: `what`, a number above 0 and at most `most`; neither NaN nor infinite. Local."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value <= most:
            raise argparse.ArgumentTypeError(f"expected {what}, above 0 and at most {most:g}, got {text!r}")
        return value

    return read


def _place() -> tuple[int, int]:
    """The rank and the number of ranks, by the launcher's variables: MPI is not started for it."""
    from epcy.doctor.facts import launched

    launch = launched(os.environ)
    return (0, 1) if launch is None else (launch["rank"], launch["size"] or 1)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line that every rank of a job has: what is wrong with it rank 0 alone tells.

    Local, blocking. MPI is not started for it; the other ranks leave a second later, since a launcher ends the job with
    the first rank that fails.

    Raises
    ------
    SystemExit
        As argparse does.
    """
    rank, _ = _place()
    if rank == 0:
        return parser.parse_args(argv)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return parser.parse_args(argv)
    except SystemExit as left:
        if left.code:
            time.sleep(1.0)
        raise


def report(program: str, error: BaseException, comm: MPI.Intracomm | None = None) -> int:
    """Write an error on stderr, in one line, and return the exit status: 2 for arguments (wrong,
    or more than there is room for), 1 for what failed.

    Collective over `comm`, blocking for at most two seconds: what all ranks ran into is told once, by rank 0; what some
    ran into, by each of these with its rank. Whoever only heard of it is silent where the others are heard.
    """
    text = " ".join((str(error) or type(error).__name__).split())
    only_heard = isinstance(error, PeerError) and not isinstance(error, PeerTimeoutError)
    failed = isinstance(error, (BackendError, StateError, OSError)) and not only_heard
    rank, size = _place()
    name = f"rank {rank}: " if size > 1 else ""
    if comm is not None and comm.size > 1:
        from epcy.backends import bootstrap

        same = re.sub(r" ?\(rank \d+\)", "", text)
        name = f"rank {comm.rank}: "
        with contextlib.suppress(PeerTimeoutError):
            all_told = bootstrap.allgather(comm, (same, only_heard), TELLING_SECONDS, "the error")
            culprits = [rank for rank, (_, heard) in enumerate(all_told) if not heard]
            if len(set(all_told)) == 1:
                text, name = ("" if comm.rank else same), ""
            elif only_heard and culprits:
                text = ""
    if text:
        sys.stdout.flush()
        sys.stderr.write(f"{program}: {name}{text}\n")
        sys.stderr.flush()
    return 1 if failed else 2
