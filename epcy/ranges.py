"""NVTX ranges around calls, for Nsight Systems: inside `epcy.trace`, and in what nsys starts, if nvtx is installed.

nvtx is NVIDIA's own binding of its profilers' protocol, which has nothing to do with moving tokens.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from epcy.observers import use_ranges

__all__ = ["follow"]

_num_traces = 0


def _domain() -> Any:
    """Return NVTX's domain of epcy, or None where the package is missing."""
    if importlib.util.find_spec("nvtx") is None:
        return None
    import nvtx

    return nvtx.get_domain("epcy")


def follow(begin: bool) -> None:
    """Count a trace that begins, or that ends, and switch ranges on and off with them. Local."""
    global _num_traces
    _num_traces += 1 if begin else -1
    use_ranges(_domain() if _num_traces > 0 or "NVTX_INJECTION64_PATH" in os.environ else None)
