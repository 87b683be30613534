"""What a result was measured on: models and versions, no names of hosts and no paths."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mpi4py import MPI


def describe(argv: Sequence[str], num_ranks: int) -> dict[str, Any]:
    """Return the ``env`` of the JSON file. Local."""
    return {
        "date": date.today().isoformat(),
        "command": command(argv, num_ranks),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "mpi": " ".join(MPI.Get_library_version().split("\n")[0].strip("\0").split()),
        "versions": {name: _version(name) for name in ("epcy", "numpy", "ml_dtypes", "mpi4py")},
    }


def command(argv: Sequence[str], num_ranks: int) -> str:
    """Return the command that gives the same run: files without their folders, nothing of this machine."""
    words = [Path(word).name if os.sep in word else word for word in argv]
    return " ".join([f"mpiexec -n {num_ranks} python -m mpi4py -m epcy.bench", *words])


def processor() -> str:
    """Return the model name of the processor, or the machine's kind where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str | None:
    module = sys.modules.get(name)
    try:
        return version(name)
    except PackageNotFoundError:
        return getattr(module, "__version__", None)
