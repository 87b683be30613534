"""The backends: what moves the tokens. The choice is made once, when a Buffer is constructed."""

from __future__ import annotations

import contextlib
from typing import Any

from epcy.errors import BackendUnavailableError

__all__ = ["find", "load_nvshmem"]


def load_nvshmem() -> None:
    """Load NVSHMEM's host library, so that the extension modules that need it find it.

    Local, blocking. A wheel keeps the library in a folder that the loader does not search by itself. Where neither way
    finds it, the run path of libepcy_cuda.so may, or the import that follows says what is missing.
    """
    import ctypes

    with contextlib.suppress(Exception):
        from cuda.pathfinder import load_nvidia_dynamic_lib

        load_nvidia_dynamic_lib("nvshmem_host")
        return
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnvshmem_host.so.3", ctypes.RTLD_GLOBAL)


def _find_nvshmem() -> tuple[str, Any, Any]:
    remedy = "use backend='host', or see `python -m epcy`"
    try:
        import cupy
    except ImportError as error:
        raise BackendUnavailableError(
            f"backend: 'nvshmem' needs CuPy, which cannot be imported ({error}); {remedy}"
        ) from None
    try:
        load_nvshmem()
        from epcy.backends.nvshmem_low_latency import LowLatencyNvshmemBackend
        from epcy.backends.symmetric import num_devices
    except (ImportError, OSError) as error:
        raise BackendUnavailableError(f"backend: 'nvshmem' could not be loaded ({error}); {remedy}") from None
    if num_devices() == 0:
        raise BackendUnavailableError(f"backend: 'nvshmem' needs a GPU, and CUDA sees none; {remedy}")
    return "nvshmem", LowLatencyNvshmemBackend, cupy


def find(name: str | None) -> tuple[str, Any, Any]:
    """Return a backend's name, its class and its array module; without a name, nvshmem where it works, else host.

    Local, blocking.

    Raises
    ------
    BackendUnavailableError
        The backend cannot work here; the message says why.
    """
    if name != "host":
        try:
            return _find_nvshmem()
        except BackendUnavailableError:
            if name is not None:
                raise
    import numpy

    from epcy.backends.host_low_latency import HostLowLatencyBackend

    return "host", HostLowLatencyBackend, numpy
