"""Keeping the calls of a job while it runs, and joining what its ranks kept."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from epcy.backends import bootstrap
from epcy.backends.meter import world_ranks
from epcy.errors import ArgumentError, PeerTimeoutError, StateError
from epcy.observers import use_recorder
from epcy.private_file import write_of_all
from epcy.recording.checks import ARGUMENTS, PLACES, ROUTED
from epcy.recording.file import write
from epcy.recording.join import Entry, Key, join
from epcy.recording.kept import keep_array, kept_on_host, plain, rows_and_kind

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["record"]


@dataclass
class Kept:
    """What is kept of one Buffer."""

    key: Key
    options: dict[str, Any]
    entries: deque[Entry]
    backend: str
    num_calls: int = 0
    hooks: dict[int, tuple[Any, int]] = field(default_factory=dict)


class record:  # noqa: N801 - used as a function
    """Keep the calls of all Buffers inside a `with` block in a file, to replay them elsewhere.

    Collective over `comm` at both ends of the block, blocking. Kept are routing, shapes, arguments, options and times
    of every rank; rows and weights only with `payload`. Calls of `warmup()` are not kept. An exception that leaves the
    block makes every rank write what it has, `path` with `.rankN` behind it, and waits for nobody;
    `epcy.recording.read` and the replay take these parts together by the name `path`.

    Parameters
    ----------
    path : path
        Of the file (.npz), readable by this user alone, which rank 0 writes.
    comm : mpi4py.MPI.Intracomm
        Whose ranks are recorded; default COMM_WORLD.
    payload : bool
        Keep the rows of dispatch and combine, and the weights. Large, and whoever has the file has them.
    num_calls : int
        Calls that are kept of each Buffer: the last ones.
    timeout : float
        Seconds that a rank waits for the others at either end.

    Raises
    ------
    ArgumentError
        num_calls is below 1; rank 0 cannot write the file.
    PeerTimeoutError
        A rank did not come to the end of the block; this one has written its part.
    HeapError, PeerError
        A rank had no memory to keep a call, or what it kept: every call was made, and nothing is written.
    StateError
        Another recording is under way, or the same one is entered again.
    """

    _current: record | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        comm: MPI.Intracomm | None = None,
        *,
        payload: bool = False,
        num_calls: int = 10_000,
        timeout: float = 60.0,
    ) -> None:
        if isinstance(num_calls, bool) or not isinstance(num_calls, int) or num_calls < 1:
            raise ArgumentError(f"num_calls: expected a positive whole number, got {num_calls!r}")
        self.path, self.payload, self.num_calls = Path(path), payload, num_calls
        self.timeout, self._given = timeout, comm
        self._comm: MPI.Intracomm | None = None
        # by the Buffer's id; the list keeps them alive, so that no id comes twice
        self._kept: dict[int, Kept] = {}
        self._alive: list[Any] = []
        self._start_ns = 0
        self._error: Exception | None = None  # what was in the way of keeping a call, first

    def __enter__(self) -> record:
        from mpi4py import MPI

        comm = self._given if self._given is not None else MPI.COMM_WORLD
        if self._comm is not None:
            raise StateError(f"record: this recording was entered before (rank {comm.rank}); make a new one")
        if record._current is not None:
            raise StateError(f"record: another recording is under way (rank {comm.rank}); end it first")
        # A copy: in it stays an end that a rank never comes to.
        self._comm = bootstrap.duplicate(comm, self.timeout, "epcy.record")
        with contextlib.suppress(OSError):  # of an earlier job
            self._alone.unlink()
        self._start_ns = time.monotonic_ns()
        record._current = self
        use_recorder(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        comm = self._comm
        if comm is None or record._current is not self:
            return
        use_recorder(None)
        record._current = None
        part, error = {"rank": comm.rank, "buffers": []}, self._error
        try:
            part = self._part()
        except Exception as caught:
            error = error or caught
        self._kept, self._alive = {}, []
        if kind is not None:
            self._write_alone(part, comm)
            return
        try:
            bootstrap.exchange(comm, None, error, self.timeout, "the end of epcy.record")
        except PeerTimeoutError:
            self._write_alone(part, comm)
            raise
        except Exception:  # on every rank
            comm.Free()
            raise
        refused = write_of_all(comm, self.path, part, lambda parts: write(self.path, join(parts, comm.size)))
        comm.Free()
        if refused is not None:
            raise refused

    def _write_alone(self, part: dict[str, Any], comm: MPI.Intracomm) -> None:
        with contextlib.suppress(OSError):  # the exception that ends the block is the one to see
            write(self._alone, join([part], comm.size))

    @property
    def _alone(self) -> Path:
        """Where this rank writes its part."""
        return self.path.with_name(f"{self.path.name}.rank{self._comm.rank if self._comm else 0}")

    # ---- while the job runs

    def call(self, buf: Any, op: str, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Make a call and keep it; what it raises is raised."""
        try:
            kept = self._kept_of(buf)
            entry = self._entry(kept, buf, op, function, arguments)
            kept.entries.append(entry)
        except Exception as error:  # the call itself has to be made: the other ranks are in it
            self._error = self._error or error
            return function(**arguments)
        entry.start_ns = time.monotonic_ns()
        try:
            result = function(**arguments)
        except BaseException as error:
            entry.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            entry.duration_ns = time.monotonic_ns() - entry.start_ns if entry.error is None else -1
        self._link(kept, entry, op, result)
        return result

    def _kept_of(self, buf: Any) -> Kept:
        kept = self._kept.get(id(buf))
        if kept is None:
            group = world_ranks(buf.comm)
            number = sum(other.key[0] == group for other in self._kept.values())
            options = {name: value for name, value in buf.options.items() if name not in PLACES}
            kept = Kept((group, number), options, deque(maxlen=self.num_calls), buf.backend)
            self._kept[id(buf)] = kept
            self._alive.append(buf)
        return kept

    def _entry(
        self, kept: Kept, buf: Any, op: str, function: Callable[..., Any], given: dict[str, Any]
    ) -> Entry:
        at = kept.num_calls
        kept.num_calls += 1
        entry = Entry(at, op, None, None, 0, {})
        try:
            handle = given.get("handle")
            if op == "hook":
                entry.refers = kept.hooks.pop(id(function), (None, None))[1]
            elif handle is not None:
                owner, number = handle.recorded or (None, None)
                entry.refers = number if owner is self else None
            unknown = op in ("combine", "low_latency_combine", "hook") or handle is not None
            if not unknown or entry.refers is not None:
                entry.args = self._arguments(op, given)
            if op in ROUTED:
                entry.num_tokens = rows_and_kind(given["x"])[0]
                if handle is None:
                    entry.arrays["topk_idx"] = keep_array(buf.xp, given["topk_idx"], given["stream"])
            if self.payload and op in ("dispatch", "low_latency_dispatch", "combine"):
                self._keep_payload(entry, buf.xp, given)
        except MemoryError:
            raise
        except Exception:  # whatever is wrong with the arguments, the call itself will say
            entry.args = None
        return entry

    def _arguments(self, op: str, given: dict[str, Any]) -> dict[str, Any]:
        """Return what ARGUMENTS wants to know of a call."""
        derived: dict[str, Callable[[], Any]] = {
            "dtype": lambda: rows_and_kind(given["x"])[1],
            "has_weights": lambda: given["topk_weights"] is not None,
            "has_hook": lambda: bool(given["return_recv_hook"]),
            "own_output": lambda: given["out"] is not None,
            "num_biases": lambda: _num_biases(given["bias"]),
        }
        return {
            name: derived[name]() if name in derived else plain(given[name], kind)
            for name, kind in ARGUMENTS[op].items()
        }

    def _keep_payload(self, entry: Entry, xp: Any, given: dict[str, Any]) -> None:
        parts = given["x"] if isinstance(given["x"], (tuple, list)) else (given["x"],)
        found = dict(zip(("x", "scales"), parts, strict=False))
        if entry.op in ROUTED and given["topk_weights"] is not None:
            found["topk_weights"] = given["topk_weights"]
        for name, array in found.items():
            entry.arrays[name] = keep_array(xp, array, given["stream"])

    def _link(self, kept: Kept, entry: Entry, op: str, result: Any) -> None:
        """Remember what later calls refer to."""
        handle = result.handle if op == "dispatch" else result[2] if op == "low_latency_dispatch" else None
        if handle is not None and (handle.recorded is None or handle.recorded[0] is not self):
            handle.recorded = self, entry.at
        hook = (
            result[4] if op == "low_latency_dispatch" else result[2] if op == "low_latency_combine" else None
        )
        if hook is not None:
            kept.hooks[id(hook)] = hook, entry.at

    def _part(self) -> dict[str, Any]:
        """Return what this rank kept, as it travels to rank 0."""
        assert self._comm is not None  # noqa: S101  # entered
        buffers = []
        for kept in self._kept.values():
            for entry in kept.entries:
                entry.arrays = {name: kept_on_host(array) for name, array in entry.arrays.items()}
                entry.start_ns -= self._start_ns
            buffers.append((kept.key, kept.options, kept.backend, kept.num_calls, list(kept.entries)))
        return {"rank": self._comm.rank, "buffers": buffers}


def _num_biases(bias: Any) -> int:
    return 0 if bias is None else len(bias) if isinstance(bias, (tuple, list)) else 1
