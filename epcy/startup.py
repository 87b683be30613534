"""Starting what a process starts once: NVSHMEM, over the ranks that later Buffers may join."""

from __future__ import annotations

from typing import Any

from epcy import backends
from epcy.backends import bootstrap
from epcy.errors import ArgumentError, EpcyError
from epcy.options import BY_NAME, resolve

__all__ = ["init"]


def init(comm: Any = None, heap_bytes: int | None = None, *, device: int | None = None) -> None:
    """Start NVSHMEM over `comm`, for programs whose Buffers span different groups of ranks.

    Collective, blocking. The first Buffer on the nvshmem backend calls it by itself on its own communicator, which
    suffices where all Buffers have the same ranks. Later calls do nothing. The host backend needs no start.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks that any later Buffer may hold; default COMM_WORLD.
    heap_bytes : int, optional
        Bytes a rank of the arena from which Buffers of a part of these ranks take their memory
        (`Buffer.size_hint` tells how much each needs).
    device : int, optional
        The GPU of this rank; default: the ranks of one machine take its visible GPUs in turn.

    Raises
    ------
    ArgumentError, BackendUnavailableError, BackendError, HeapError, PeerError, PeerTimeoutError
    """
    if comm is None:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
    values: dict[str, Any] = {}
    error: EpcyError | None = None
    try:
        given = {"num_max_tokens_per_rank": 0, "hidden": 1, "num_experts": 1, "num_topk": 1, "device": device}
        values = {name: value.value for name, value in resolve(given).items()}
        if heap_bytes is not None and (
            not isinstance(heap_bytes, int) or isinstance(heap_bytes, bool) or heap_bytes < 0
        ):
            raise ArgumentError(f"heap_bytes: expected a whole number of bytes, got {heap_bytes!r}")
        backends.find("nvshmem")
    except EpcyError as caught:
        error = caught
    timeout = values.get("timeout", BY_NAME["timeout"].default)
    copy = bootstrap.duplicate(comm, timeout)
    identities = bootstrap.agree(copy, {"heap_bytes": heap_bytes}, error, timeout)

    from epcy.backends import symmetric

    symmetric.start(
        copy, symmetric.choose_device(values["device"], identities, copy.rank), heap_bytes, timeout
    )
