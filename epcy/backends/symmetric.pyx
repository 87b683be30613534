# distutils: libraries = epcy_cuda
"""NVSHMEM, once a process: its start over a communicator, and symmetric memory for Buffers of any group of ranks."""

import os

from libc.stdint cimport int64_t, uint8_t, uintptr_t

from epcy.backends.cuda cimport (
    EPCY_UNIQUE_ID_BYTES, epcy_cuda_error_name, epcy_cuda_num_devices, epcy_cuda_set_device, epcy_nvshmem_align,
    epcy_nvshmem_free, epcy_nvshmem_init, epcy_nvshmem_init_status, epcy_nvshmem_ptr, epcy_nvshmem_unique_id,
    epcy_nvshmem_version)
from epcy.layout cimport EPCY_PAGE_BYTES, epcy_round_up

from epcy.backends import bootstrap
from epcy.errors import ArgumentError, BackendError, BackendUnavailableError, HeapError, NotSupportedError

VERSION = (3, 4)                # built against it; the structures of another minor version differ
INITIALIZED = 2                 # nvshmemx_init_status() of a usable library
# What NVSHMEM must find in its environment before it starts; a value that the user has set stays.
# NVLS (multicast) is off: a program that uses it may put GPUs out of service that others share.
# Its proxy thread serves networks alone, but always spins: on the core of a rank that the launcher has bound to one.
ENVIRONMENT = {"NVSHMEM_DISABLE_NVLS": "1", "NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": "1"}

_runtime = None


cdef int check(int code, str what) except -1:
    """Raise what a CUDA call returned."""
    if code:
        name = epcy_cuda_error_name(code).decode()
        raise BackendError(f"{what}: CUDA error {code} ({name})", "CUDA", code)
    return 0


def num_devices():
    """Count the GPUs that this process can use; 0 where there is no driver."""
    cdef int count = 0
    return count if epcy_cuda_num_devices(&count) == 0 else 0


def choose_device(device, identities, rank):
    """The GPU of a rank: the one asked for, else the ranks of a machine take its GPUs in turn."""
    count = num_devices()
    if _runtime is not None:        # which spans this rank, and whose memory is on one GPU for good
        if device is not None and device != _runtime.device:
            raise ArgumentError(f"device: expected {_runtime.device}, where NVSHMEM was started on this rank, got "
                                f"{device} (rank {rank}); give the same device to all Buffers, or to epcy.init()")
        return _runtime.device
    if device is None:
        return sum([identity.host == identities[rank].host for identity in identities[:rank]]) % count
    if device >= count:
        raise ArgumentError(f"device: expected a GPU in 0..{count - 1}, got {device} (rank {rank})")
    return device


def version():
    """NVSHMEM's version at run time, as three numbers."""
    cdef int major = 0, minor = 0, patch = 0
    epcy_nvshmem_version(&major, &minor, &patch)
    return major, minor, patch


def unique_id():
    """Make the id that rank 0 passes to the others."""
    cdef uint8_t[128] raw
    status = epcy_nvshmem_unique_id(&raw[0])
    if status:
        raise BackendError(f"nvshmemx_get_uniqueid failed with status {status}", "NVSHMEM", status)
    return bytes(raw[:EPCY_UNIQUE_ID_BYTES])


class Runtime:
    """NVSHMEM's state in this process: which ranks it spans, its device, and the arena for smaller groups."""

    def __init__(self, group, num_pes, device):
        self.group, self.num_pes, self.device = group, num_pes, device
        self.arena = self.arena_bytes = 0
        self.used = []              # (offset, bytes) pieces of the arena, ascending


def start(comm, device, heap_bytes, timeout):
    """Collective over `comm`: start NVSHMEM there, unless it runs already."""
    global _runtime
    cdef const uint8_t[::1] raw
    cdef int rank = comm.rank, size = comm.size, status = 0, previous = 0
    if _runtime is not None:
        return _runtime
    error = None
    if version()[:2] != VERSION:
        error = BackendUnavailableError(f"backend: epcy was built for NVSHMEM {VERSION[0]}.{VERSION[1]}, found "
                                        f"{'.'.join(map(str, version()))}; install nvidia-nvshmem-cu13==3.4.*")
    bootstrap.exchange(comm, None, error, timeout, "epcy.init()")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    mine = None
    try:        # NVSHMEM's start waits for all ranks, without a limit: what can fail before it does so here
        mine = unique_id() if rank == 0 else None
        check(epcy_cuda_set_device(device, &previous), "cudaSetDevice")
    except BackendError as caught:
        error = caught
    try:
        raw = bootstrap.exchange(comm, mine, error, timeout, "epcy.init()")[0]
        with nogil:
            status = epcy_nvshmem_init(rank, size, &raw[0])
        if status or epcy_nvshmem_init_status() < INITIALIZED:
            error = BackendError(f"NVSHMEM did not start on rank {rank} (status {status}, init status "
                                 f"{epcy_nvshmem_init_status()}); set NVSHMEM_DEBUG=INFO to see why", "NVSHMEM", status)
        bootstrap.exchange(comm, None, error, timeout, "epcy.init()")
        runtime = Runtime(comm.Get_group(), size, device)
        if heap_bytes:
            runtime.arena_bytes = epcy_round_up(heap_bytes, EPCY_PAGE_BYTES)
            runtime.arena = align(runtime.arena_bytes)
            error = None if runtime.arena else HeapError(f"heap_bytes: no room for an arena of {heap_bytes} bytes")
            bootstrap.exchange(comm, None, error, timeout, "epcy.init()")
    finally:
        epcy_cuda_set_device(previous, NULL)
    _runtime = runtime
    return runtime


def align(int64_t nbytes):
    cdef void *p
    with nogil:
        p = epcy_nvshmem_align(nbytes)
    return <uintptr_t>p


class Allocation:
    """A Buffer's symmetric memory: where each rank's part is, as this GPU reaches it."""

    def __init__(self, address, nbytes, bases, names, pes, offset):
        self.address, self.nbytes, self.bases, self.offset = address, nbytes, bases, offset
        self.names, self.pes = names, pes       # the address here by which NVSHMEM knows a rank's part, and that rank

    def free(self):
        """Collective where the memory is NVSHMEM's own; the arena's is given back locally."""
        cdef void *p = <void *><uintptr_t>self.address
        if self.offset is None:
            with nogil:
                epcy_nvshmem_free(p)
        else:
            _runtime.used.remove((self.offset, self.nbytes))


def allocate(comm, int64_t nbytes, timeout):
    """Collective over `comm`, on the current device: symmetric memory of `nbytes` on each rank."""
    from mpi4py import MPI

    cdef int64_t offset = 0
    pes = MPI.Group.Translate_ranks(comm.Get_group(), list(range(comm.size)), _runtime.group)
    if MPI.UNDEFINED in pes:
        raise NotSupportedError("comm: it holds ranks outside the communicator that NVSHMEM was started on; call "
                                "epcy.init(MPI.COMM_WORLD) on all ranks before the first Buffer")
    nbytes = epcy_round_up(nbytes, EPCY_PAGE_BYTES)
    if comm.size == _runtime.num_pes:
        address, place, error = align(nbytes), None, None
        if not address:
            error = HeapError(f"num_max_tokens_per_rank: NVSHMEM had no room for {nbytes} bytes; give fewer "
                              "num_max_tokens_per_rank or num_max_recv_tokens, or set NVSHMEM_SYMMETRIC_SIZE")
        bootstrap.exchange(comm, None, error, timeout, "Buffer()")
        offsets = None
    else:
        for at, size in _runtime.used:
            if at - offset >= nbytes:
                break
            offset = at + size
        error, place = None, offset
        if offset + nbytes > _runtime.arena_bytes:
            error = HeapError(f"comm: a Buffer of a part of the ranks takes its {nbytes} bytes from the arena, which "
                              f"has {_runtime.arena_bytes} ({sum(size for _, size in _runtime.used)} in use); call "
                              f"epcy.init(heap_bytes=...) with more on all ranks before the first Buffer")
        offsets = bootstrap.exchange(comm, offset, error, timeout, "Buffer()")
        _runtime.used = sorted([*_runtime.used, (offset, nbytes)])
        address = _runtime.arena + offset
    names = [address if offsets is None else _runtime.arena + at for at in offsets or pes]
    bases = [<uintptr_t>epcy_nvshmem_ptr(<void *><uintptr_t>name, pe) for name, pe in zip(names, pes)]
    return Allocation(address, nbytes, bases, names, pes, place)
