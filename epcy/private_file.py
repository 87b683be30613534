"""Files that only their user may read, written whole or not at all, under no name that others know beforehand."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from epcy.errors import ArgumentError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["replace", "write_of_all", "write_text"]


@contextlib.contextmanager
def replace(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write to, mode 0600, which takes the place of `path` when the `with` block ends well. Local.

    Raises
    ------
    OSError
        The folder cannot be written to; as after any error, nothing is left there.
    """
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a file, mode 0600. Local; raises what `replace` raises."""
    with replace(path) as file:
        file.write(text.encode("utf-8"))


def write_of_all(
    comm: MPI.Intracomm, path: Path, part: Any, write: Callable[[list[Any]], None]
) -> ArgumentError | None:
    """Let rank 0 write what all ranks give. Collective, blocking, for ranks that are known to have come.

    Returns
    -------
    ArgumentError or None
        On every rank: why rank 0 could not.
    """
    parts, text = comm.gather(part), None
    if parts is not None:
        try:
            write(parts)
        except Exception as caught:  # whatever it is, the other ranks wait to hear of it
            text = str(caught) or type(caught).__name__
    text = comm.bcast(text)
    return (
        None if text is None else ArgumentError(f"path: rank 0 could not write {os.fspath(path)!r}: {text}")
    )
