"""The backends: what moves the tokens. The choice is made once, when a Buffer is constructed."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from epcy.errors import ArgumentError, BackendUnavailableError, NotSupportedError

if TYPE_CHECKING:
    from epcy.topology import Topology

__all__ = ["between_nodes", "find", "load_nvshmem"]


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


def between_nodes(name: str, topology: Topology, options: dict[str, Any]) -> Any:
    """Return what makes a backend whose ranks lie on several nodes; settle the option `path`.

    Local, blocking; the same on every rank.

    Raises
    ------
    ArgumentError
        Nodes of different sizes, and not the direct path.
    NotSupportedError
        A backend without a path between these nodes.
    BackendUnavailableError
        The library that it needs for that cannot be loaded.
    """
    if name != "host" and topology.num_machines > 1:
        raise NotSupportedError(
            f"comm: backend {name!r} works inside one machine, the ranks lie on {topology.num_machines} "
            f"({', '.join(dict.fromkeys(topology.hostnames))}; rank {topology.rank}); use backend='host', or a "
            "sub-communicator of Split_type(COMM_TYPE_SHARED)"
        )
    options["path"] = options["path"] or "hierarchical"
    if options["path"] == "hierarchical" and not topology.is_uniform:
        raise ArgumentError(
            "num_max_nvl_peers: the hierarchical path needs as many ranks in each node, got "
            f"{', '.join(f'{n} in node {i}' for i, n in enumerate(topology.ranks_per_node[:16]))} (rank "
            f"{topology.rank}); start as many ranks on each machine, give num_max_nvl_peers a number that divides "
            "them, or path='direct'"
        )
    if name != "host":
        try:
            from epcy.backends.nvshmem_nodes import NodesNvshmemBackend
        except ImportError as missing:
            raise BackendUnavailableError(
                f"num_max_nvl_peers: several nodes need epcy/libepcy_put.so, which cannot be loaded ({missing}; rank "
                f"{topology.rank}); leave it out, or use backend='host'"
            ) from None
        return functools.partial(NodesNvshmemBackend, topology)
    from epcy.backends.host_relay_low_latency import HostRelayLowLatency

    return functools.partial(HostRelayLowLatency, topology)
