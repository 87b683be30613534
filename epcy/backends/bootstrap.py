"""MPI before there is shared memory: non-blocking collectives with a limit, and who the ranks are.

Used while a Buffer is made and never on the data path. Every wait is bounded, lets other threads run and answers
Ctrl-C; a rank whose arguments are wrong still takes part, so that the others learn of it.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from epcy.backends import verdicts
from epcy.errors import ArgumentError, EpcyError, MismatchError, PeerError, PeerTimeoutError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Identity", "agree", "allgather", "check", "compare", "duplicate", "exchange", "meet", "tell"]

E = TypeVar("E", bound=BaseException)


@dataclass(frozen=True)
class Identity:
    """A process, so that others can tell whether it still lives."""

    host: str
    pid: int
    start_time: str  # field 22 of /proc/PID/stat: a pid that is used again has another one

    @classmethod
    def mine(cls) -> Identity:
        """Name this process."""
        return cls(socket.gethostname(), os.getpid(), _start_time(os.getpid())[1])

    def is_dead(self) -> bool:
        """Tell whether the process has ended; meaningful where it once was visible."""
        state, start_time = _start_time(self.pid)
        return state in ("", "Z", "X") or start_time != self.start_time

    def is_visible(self) -> bool:
        """Tell whether this process can see that one at all (same host and pid namespace)."""
        return self.host == socket.gethostname() and self.start_time != "" and not self.is_dead()


def _start_time(pid: int) -> tuple[str, str]:
    """State and start time of a process, or empty strings."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


def _wait(request: MPI.Request, timeout: float, what: str, longest_nap: float = 1e-3) -> None:
    deadline, nap = time.monotonic() + timeout, 0.0
    while not request.Test():
        if time.monotonic() > deadline:
            raise PeerTimeoutError(
                f"timeout: {what} did not end within {timeout:g} s: some rank has not called it; "
                "all ranks of the communicator must, in the same order",
                phase="bootstrap",
            )
        time.sleep(nap)
        nap = min(nap + 1e-5, longest_nap)


def check(comm: Any) -> None:
    """Raise ArgumentError for what is no communicator of a Buffer.

    Local, blocking.
    """
    from mpi4py import MPI

    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise ArgumentError("comm: MPI is not running (not initialized yet, or finalized already)")
    if not isinstance(comm, MPI.Comm):
        raise ArgumentError(f"comm: expected an mpi4py communicator, got {type(comm).__name__}")
    if comm == MPI.COMM_NULL:
        raise ArgumentError(
            "comm: expected an intracommunicator, got COMM_NULL (this rank is not in the group)"
        )
    if comm.Is_inter():
        raise ArgumentError("comm: expected an intracommunicator, got an intercommunicator; use its Merge()")


def duplicate(comm: MPI.Comm, timeout: float, step: str = "Buffer()") -> MPI.Intracomm:
    """Copy the communicator, so that our messages never meet the user's.

    Collective, blocking for at most `timeout` seconds; `step` is what a PeerTimeoutError names.
    """
    copy, request = cast("MPI.Intracomm", comm).Idup()
    _wait(request, timeout, f"{step}: MPI_Comm_idup")
    return copy


def meet(comm: MPI.Intracomm, timeout: float, step: str) -> None:
    """Wait for all ranks without a nap, so that they leave together.

    Collective, blocking for at most `timeout` seconds; `step` is what a PeerTimeoutError names.
    """
    _wait(comm.Ibarrier(), timeout, step, longest_nap=0.0)


def allgather(comm: MPI.Intracomm, message: Any, timeout: float, step: str) -> list[Any]:
    """Return every rank's message in rank order.

    Collective, blocking for at most `timeout` seconds; `step` is what a PeerTimeoutError names.
    """
    from mpi4py import MPI

    mine = bytearray(pickle.dumps(message))
    sizes = bytearray(8 * comm.size)
    request = comm.Iallgather([len(mine).to_bytes(8, "little"), MPI.BYTE], [sizes, MPI.BYTE])
    _wait(request, timeout, step)
    counts = [int.from_bytes(sizes[8 * r : 8 * r + 8], "little") for r in range(comm.size)]
    gathered = bytearray(sum(counts))
    starts = [sum(counts[:r]) for r in range(comm.size)]
    request = comm.Iallgatherv([mine, MPI.BYTE], [gathered, counts, starts, MPI.BYTE])
    _wait(request, timeout, step)
    return [pickle.loads(gathered[s : s + n]) for s, n in zip(starts, counts, strict=True)]


def exchange(
    comm: MPI.Intracomm, message: Any, error: Exception | None, timeout: float, step: str
) -> list[Any]:
    """Gather messages, or raise: this rank's own `error`, with the rank, or a PeerError with the text of those others.

    Collective, blocking for at most `timeout` seconds.
    """
    if error is not None:
        error = verdicts.as_our_own(error, step)
        allgather(comm, (None, str(error) or type(error).__name__), timeout, step)
        if isinstance(error, EpcyError):
            error = verdicts.with_rank(error, comm.rank)
        raise _told(error)
    answers = allgather(comm, (message, None), timeout, step)
    refused = [rank for rank, (_, text) in enumerate(answers) if text is not None]
    if refused:
        first = refused[0]
        raise _told(PeerError(f"rank {first} refused in {step}: {answers[first][1]}", refused))
    return [answer for answer, _ in answers]


def _told(error: E) -> E:
    """Mark an error that every rank knows of, and raises."""
    error.__dict__["_is_told"] = True
    return error


def tell(comm: MPI.Intracomm, error: BaseException, timeout: float, step: str) -> tuple[BaseException, bool]:
    """Make what this rank alone ran into between two exchanges the others' news: it is what they gather next.

    Collective, blocking for at most `timeout` seconds, unless every rank knows already. What lies between the exchanges
    may be no collective that waits for all.

    Returns
    -------
    error : BaseException
        What to raise.
    all_raise : bool
        Whether every rank raises now: then what they made together can be given back together.
    """
    if isinstance(error, Exception) and not isinstance(error, PeerTimeoutError):
        if "_is_told" in error.__dict__:
            return error, True
        try:
            exchange(comm, None, error, timeout, step)
        except PeerTimeoutError:
            pass
        except Exception as told:  # of all ranks, or what this one alone met while it told
            return (told, True) if "_is_told" in told.__dict__ else (error, False)
    return error, False


def compare(all_options: list[dict[str, Any]]) -> None:
    """Raise the same MismatchError on every rank where an option differs."""
    for name in all_options[0]:
        values = [options.get(name) for options in all_options]
        if any(value != values[0] for value in values):
            shown = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values[:16]))
            more = f", and {len(values) - 16} more ranks" if len(values) > 16 else ""
            raise _told(MismatchError(f"{name}: every rank must give the same value, got {shown}{more}"))


def agree(
    comm: MPI.Intracomm,
    options: dict[str, Any],
    error: Exception | None,
    timeout: float,
    step: str = "Buffer()",
) -> list[Identity]:
    """Compare the options of all ranks and learn who they are.

    Collective, blocking for at most `timeout` seconds.
    """
    answers = exchange(comm, (options, Identity.mine()), error, timeout, step)
    compare([answer[0] for answer in answers])
    return [answer[1] for answer in answers]
