"""The backends: what moves the tokens. The choice is made once, when a Buffer is constructed."""

from __future__ import annotations

from typing import Any

from epcy.errors import BackendUnavailableError

__all__ = ["find"]


def find(name: str | None) -> tuple[str, Any, Any]:
    """Return a backend's name, its class and its array module.

    Local, blocking.

    Raises
    ------
    BackendUnavailableError
        The backend cannot work here; the message says why.
    """
    if name == "nvshmem":
        raise BackendUnavailableError(
            "backend: 'nvshmem' is not part of this build of epcy; use backend='host' (see `python -m epcy`)"
        )
    import numpy

    from epcy.backends.host import HostBackend

    return "host", HostBackend, numpy
