"""Starting what a process starts once: NVSHMEM, over the ranks that later Buffers may join."""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from typing import Any

from epcy import backends
from epcy.backends import bootstrap
from epcy.errors import ArgumentError, BackendUnavailableError, StateError
from epcy.options import BY_NAME, resolve

__all__ = ["agree", "check", "find_transport", "init", "settle", "settled"]

# What NVSHMEM reads when it starts, by rdma_transport. "ibrc" is its transport that a CPU thread drives, which also
# stands behind IBGDA for what the GPU cannot do.
TRANSPORTS = {
    "auto": {},
    "ibgda": {"NVSHMEM_IB_ENABLE_IBGDA": "1", "NVSHMEM_REMOTE_TRANSPORT": "ibrc"},
    "proxy": {"NVSHMEM_IB_ENABLE_IBGDA": "0", "NVSHMEM_REMOTE_TRANSPORT": "ibrc"},
}
SETTINGS = ("num_qps_per_rank", "rdma_transport")
QPS = "NVSHMEM_IBGDA_NUM_RC_PER_PE"
_settled: dict[str, Any] | None = None  # the options that this process' NVSHMEM starts, or was started, with


def check(
    backend: str, options: dict[str, Any], environ: MutableMapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables that these options ask NVSHMEM to start with; none once it is settled.

    Local. On the host backend there are none.

    Raises
    ------
    ArgumentError
        A variable of NVSHMEM's own, set by the user, says something else.
    StateError
        The process has other settings already.
    """
    environ = os.environ if environ is None else environ
    if backend != "nvshmem":
        return {}
    if _settled is not None:
        for name in SETTINGS:
            if options[name] not in (_settled[name], BY_NAME[name].default):
                raise StateError(
                    f"{name}: expected {_settled[name]!r}, with which NVSHMEM was started in this process, got "
                    f"{options[name]!r}; it starts once: give the same value to all Buffers, and to epcy.init() by "
                    f"{BY_NAME[name].env}"
                )
        return {}
    variables = dict(TRANSPORTS[options["rdma_transport"]])
    if options["num_qps_per_rank"] is not None:
        variables[QPS] = str(options["num_qps_per_rank"])
    for variable, text in variables.items():
        if environ.get(variable, text) != text:
            name = "num_qps_per_rank" if variable == QPS else "rdma_transport"
            raise ArgumentError(
                f"{name}: {options[name]!r} means {variable}={text}, and the environment has {environ[variable]!r}; "
                "leave one of them out"
            )
    return variables


def find_transport(options: dict[str, Any], devices: Sequence[str] | None = None) -> None:
    """See that this machine has what `rdma_transport` asks for. Local.

    Parameters
    ----------
    devices : sequence of str, optional
        Its RDMA devices; by default those of /sys/class/infiniband.

    Raises
    ------
    BackendUnavailableError
        It has not; the message says what it has.
    """
    transport = options["rdma_transport"]
    if devices is None:
        try:
            devices = sorted(os.listdir("/sys/class/infiniband"))
        except OSError:
            devices = []
    wanted = {"ibgda": "mlx5", "proxy": ""}.get(transport)
    if wanted is None or any(device.startswith(wanted) for device in devices):
        return
    kind = "an mlx5 device (ConnectX)" if wanted else "an RDMA device"
    seen = f"only {', '.join(devices)}" if devices else "none"
    raise BackendUnavailableError(
        f"rdma_transport: {transport!r} needs {kind}, and this machine has {seen} in /sys/class/infiniband; leave it "
        "at 'auto', with which ranks of one machine reach each other by NVLink"
    )


def agree(comm: Any, options: dict[str, Any], timeout: float) -> None:
    """Find out whether NVSHMEM can be started, or was, as each rank of `comm` wants it.

    Collective, blocking for at most `timeout` seconds. Raises what `check` raises; PeerError where another rank does.
    """
    from epcy.backends import bootstrap

    error: Exception | None = None
    try:
        if check("nvshmem", options):
            find_transport(options)
    except Exception as caught:
        error = caught
    bootstrap.exchange(comm, None, error, timeout, "Buffer()")


def settle(backend: str, options: dict[str, Any], environ: MutableMapping[str, str] | None = None) -> None:
    """Set what `check` returns, for good: NVSHMEM starts right after. Local; raises what `check` raises."""
    global _settled
    environ = os.environ if environ is None else environ
    environ.update(check(backend, options, environ))
    if backend == "nvshmem" and _settled is None:
        _settled = {name: options[name] for name in SETTINGS}


def settled() -> dict[str, Any]:
    """Return what this process has settled: num_qps_per_rank and rdma_transport; empty where nothing is. Local."""
    return dict(_settled or {})


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
    error: Exception | None = None
    try:
        given = {"num_max_tokens_per_rank": 0, "hidden": 1, "num_experts": 1, "num_topk": 1, "device": device}
        values = {name: value.value for name, value in resolve(given).items()}
        if heap_bytes is not None and (
            not isinstance(heap_bytes, int) or isinstance(heap_bytes, bool) or heap_bytes < 0
        ):
            raise ArgumentError(f"heap_bytes: expected a whole number of bytes, got {heap_bytes!r}")
        backends.find("nvshmem")
        if check("nvshmem", values):
            find_transport(values)
    except Exception as caught:
        error = caught
    timeout = values.get("timeout", BY_NAME["timeout"].default)
    copy = bootstrap.duplicate(comm, timeout, "epcy.init()")
    try:
        identities = bootstrap.agree(copy, {"heap_bytes": heap_bytes}, error, timeout, "epcy.init()")

        from epcy.backends import symmetric

        settle("nvshmem", values)
        chosen = symmetric.choose_device(values["device"], identities, copy.rank)
        symmetric.start(copy, chosen, heap_bytes, timeout)
    except BaseException as caught:
        told, all_raise = bootstrap.tell(copy, caught, timeout, "epcy.init()")
        if all_raise:
            copy.Free()
        if told is caught:
            raise
        raise told from caught
