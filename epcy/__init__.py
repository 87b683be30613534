"""epcy: mixture-of-experts dispatch and combine between MPI ranks, for NumPy, CuPy and Cython.

Importing does nothing but define names: no MPI is started and no GPU is touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from epcy._include import get_include
from epcy._version import __version__
from epcy.errors import (
    ArgumentError,
    BackendError,
    BackendUnavailableError,
    CapacityError,
    EpcyError,
    HeapError,
    MismatchError,
    NotSupportedError,
    PeerError,
    PeerTimeoutError,
    StateError,
)

if TYPE_CHECKING:
    from epcy.buffer import Buffer
    from epcy.event import Event, EventOverlap
    from epcy.fp8 import cast_from_fp8, cast_to_fp8
    from epcy.handle import Combine, Dispatch, Handle, LowLatencyHandle
    from epcy.kineto import bench_kineto
    from epcy.low_latency import Hook
    from epcy.recording.recorder import record
    from epcy.startup import init
    from epcy.timeline import trace

__all__ = [
    "ArgumentError",
    "BackendError",
    "BackendUnavailableError",
    "Buffer",
    "CapacityError",
    "Combine",
    "Dispatch",
    "EpcyError",
    "Event",
    "EventOverlap",
    "Handle",
    "HeapError",
    "Hook",
    "LowLatencyHandle",
    "MismatchError",
    "NotSupportedError",
    "PeerError",
    "PeerTimeoutError",
    "StateError",
    "__version__",
    "bench_kineto",
    "cast_from_fp8",
    "cast_to_fp8",
    "get_include",
    "init",
    "metrics",
    "record",
    "trace",
]

# Extension modules load when a name of theirs is first used: `python -m epcy` must work where one is missing.
_LAZY = {
    "Buffer": "epcy.buffer",
    "Event": "epcy.event",
    "EventOverlap": "epcy.event",
    "Handle": "epcy.handle",
    "Dispatch": "epcy.handle",
    "Combine": "epcy.handle",
    "LowLatencyHandle": "epcy.handle",
    "Hook": "epcy.low_latency",
    "bench_kineto": "epcy.kineto",
    "record": "epcy.recording.recorder",
    "trace": "epcy.timeline",
    "cast_to_fp8": "epcy.fp8",
    "cast_from_fp8": "epcy.fp8",
    "init": "epcy.startup",
}


def __getattr__(name: str) -> Any:
    if name == "metrics":  # a module of its own, which `import epcy.metrics` finds too
        from importlib import import_module

        return import_module("epcy.metrics")
    if name not in _LAZY:
        raise AttributeError(f"module 'epcy' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
