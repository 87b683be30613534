"""Files that only their user may read, written whole or not at all, under no name that others know beforehand."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

__all__ = ["write_text"]


def write_text(path: Path, text: str) -> None:
    """Replace a file, mode 0600. Local.

    Raises
    ------
    OSError
        The folder cannot be written to; nothing is left there.
    """
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
