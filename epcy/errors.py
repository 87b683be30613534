"""The errors that epcy raises.

Each inherits the builtin that people already catch. A message names the argument, what was expected, what came,
the rank, and what to do. All of them survive pickling, so they may travel between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "ArgumentError",
    "BackendError",
    "BackendUnavailableError",
    "CapacityError",
    "EpcyError",
    "HeapError",
    "MismatchError",
    "NotSupportedError",
    "PeerError",
    "PeerTimeoutError",
    "StateError",
]


class EpcyError(Exception):
    """The base of every error that epcy raises."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.__dict__.copy())


def _rebuild(cls: type[EpcyError], message: str, attributes: dict[str, Any]) -> EpcyError:
    error = cls(message)
    error.__dict__.update(attributes)
    return error


class ArgumentError(EpcyError, ValueError):
    """An argument has the wrong type, shape, dtype or value; nothing was sent."""


class CapacityError(EpcyError, OverflowError):
    """More tokens than the Buffer, or the call's `num_worst_tokens`, has room for."""


class StateError(EpcyError, RuntimeError):
    """The call is not possible in the present state (freed, broken, result given away, in use by a thread)."""


class HeapError(EpcyError, MemoryError):
    """The memory that the Buffer needs could not be had."""


class MismatchError(EpcyError, ValueError):
    """Ranks disagree about an option, an argument or about which call they are in; raised on every rank."""


class PeerError(EpcyError, ConnectionError):
    """Another rank refused its arguments, gave up or died.

    Attributes
    ----------
    ranks : tuple of int
        The ranks at fault.
    """

    def __init__(self, message: str = "", ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class PeerTimeoutError(PeerError, TimeoutError):
    """A rank did not arrive within `timeout` seconds.

    Attributes
    ----------
    ranks : tuple of int
        The ranks that were waited for.
    phase : str
        What was waited for: "arrival" (the rank has not entered the call), "completion" (it has not finished),
        "receipt", "forward", "reset", or in the constructor "bootstrap"; on nvshmem also "counts", "starts", "data" and
        "acknowledgement". docs/errors.md says what each means.
    epoch : int
        The number of the call on this Buffer; 0 in the constructor.
    """

    def __init__(self, message: str = "", ranks: Sequence[int] = (), phase: str = "", epoch: int = 0) -> None:
        super().__init__(message, ranks)
        self.phase = phase
        self.epoch = epoch


class BackendError(EpcyError, RuntimeError):
    """A library below epcy failed.

    Attributes
    ----------
    library : str
        The library: "CUDA", "NVSHMEM", "MPI" or "libc".
    code : int
        Its error code.
    """

    def __init__(self, message: str = "", library: str = "", code: int = 0) -> None:
        super().__init__(message)
        self.library = library
        self.code = code


class BackendUnavailableError(EpcyError, ImportError):
    """The backend asked for cannot work here; the message says why."""


class NotSupportedError(EpcyError, NotImplementedError):
    """A combination that epcy does not offer; the message names the nearest one that works."""
