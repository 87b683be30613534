"""Where epcy's C headers lie."""

from __future__ import annotations

from pathlib import Path


def get_include() -> str:
    """Return the folder to put on the include path of a .pyx or a C file that uses epcy.

    Local. A file then finds ``#include "epcy/layout.h"``; ``cimport epcy.buffer`` needs this folder too.

    Returns
    -------
    str
        An absolute path: ``epcy/include`` from a wheel, ``include`` beside the package in a source tree.
    """
    package = Path(__file__).resolve().parent
    installed = package / "include"
    return str(installed if installed.is_dir() else package.parent / "include")
