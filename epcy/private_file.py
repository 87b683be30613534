"""Files that only their user may read, written whole or not at all, under no name that others know beforehand."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["replace", "write_text"]


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
