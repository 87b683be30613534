"""The shared memory of the host backend: is there room, get it, and keep its addresses after it was freed."""

import mmap
import os
import resource
import weakref

from libc.stdint cimport int64_t, uint8_t, uintptr_t

from epcy.errors import HeapError

_heaps = weakref.WeakSet()      # of this process
# Parts of two ranks that begin a multiple of 64 MiB apart, give or take 8, hinder each other: on AMD EPYC, where a
# token's rows are read from both, a combine takes up to 2.5 times as long.
PERIOD_MIB, LEAST_MIB = 64, (12, 10, 9, 8)      # the best that can be had of these, for up to 8 ranks in a row


cdef class Heap:
    def __dealloc__(self):
        if self.guarded:
            epcy_window_unguard(self.start, self.nbytes)

    cdef int64_t untouched(self) noexcept:
        """Bytes of the window, all ranks' parts, that were promised and are not yet in use."""
        if self.window is None or self.num_ranks == 1:
            return 0
        return epcy_window_untouched(self.start, self.nbytes) * self.num_ranks

    cdef int close(self) except -1:
        """Collective: free the window, and keep the addresses from becoming anything else's."""
        if self.num_ranks == 1 or self.window is None:
            return 0            # of one rank the last array that looks at it takes the memory along
        self.window.Free()
        self.window = None
        self.guarded = self.start != NULL and epcy_window_guard(self.start, self.nbytes) == 0
        return 0


cdef int allocate(Heap heap, object comm, int64_t nbytes, char **base) except -1:
    """Collective: the window over `comm`, `nbytes` a rank; `base` gets where each rank's part is mapped.

    If it fails after there is a window, `heap` has that: to be closed by all.
    """
    from mpi4py import MPI

    cdef int rank, size = comm.size
    cdef uint8_t[::1] alone
    # For a rank alone MPI may take the memory from malloc, which gives it to others after free() while arrays
    # of the user still look at it.
    try:
        stride = apart(nbytes, size)
        heap.num_ranks = size
        heap.window = MPI.Win.Allocate_shared(stride, 1, comm=comm) if size > 1 else mmap.mmap(-1, nbytes)
    except (MPI.Exception, OSError, MemoryError) as error:
        reason = error.Get_error_string().split("\n")[-1] if isinstance(error, MPI.Exception) else error
        raise HeapError(f"num_max_tokens_per_rank: the memory of the Buffer, {nbytes} bytes a rank, could not be had "
                        f"({reason}; rank {comm.rank}); give fewer num_max_tokens_per_rank or num_max_recv_tokens, or "
                        "allow more memory (ulimit -v, cgroup, /dev/shm)") from None
    if size == 1:
        alone = heap.window
        base[0] = <char *>&alone[0]
    for rank in range(size if size > 1 else 0):
        base[rank] = <char *><uintptr_t>heap.window.Shared_query(rank)[0].address
    heap.start, heap.nbytes = base[comm.rank], nbytes
    _heaps.add(heap)
    return 0


def apart(int64_t nbytes, int size):
    """Return how far apart the parts of ranks shall begin: what lies between is never touched, and takes no memory.

    Local. Where memory is so short that the room itself would count, nothing is left between.
    """
    cdef int64_t first = (nbytes + (1 << 20) - 1) >> 20
    stride = next((mib << 20 for least in LEAST_MIB for mib in range(first, first + PERIOD_MIB)
                   if all([least <= k * mib % PERIOD_MIB <= PERIOD_MIB - least for k in range(1, min(size, 8))])))
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return nbytes
    try:
        info = os.statvfs("/dev/shm")
    except OSError:
        return nbytes
    return stride if stride * size <= info.f_bavail * info.f_frsize else nbytes


def no_room(int64_t nbytes, int size):
    """Return a HeapError if there is no room for all ranks, else None.

    Touching shared memory that is not there would be a SIGBUS; an MPI library that cannot map it may leave the others
    waiting.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        with open("/proc/self/statm") as statm:
            left = limit - int(statm.read().split()[0]) * resource.getpagesize()
        if nbytes * size > left:
            return HeapError(f"num_max_tokens_per_rank: the Buffer maps {nbytes * size} bytes of shared memory, this "
                             f"process may map {max(0, left)} more; give fewer num_max_tokens_per_rank or "
                             "num_max_recv_tokens, or allow more memory (ulimit -v)")
    try:
        info = os.statvfs("/dev/shm")
    except OSError:
        return None
    # What other Buffers of this process were promised and have not touched yet is not free.
    promised = sum([(<Heap>heap).untouched() for heap in _heaps])
    free_bytes, need = max(0, info.f_bavail * info.f_frsize - promised), nbytes * size
    if need <= free_bytes:
        return None
    return HeapError(f"num_max_tokens_per_rank: the Buffer needs {need} bytes of shared memory ({nbytes} a rank), "
                     f"/dev/shm has {free_bytes} free; give fewer num_max_tokens_per_rank or num_max_recv_tokens, "
                     "or enlarge /dev/shm (docker run --shm-size)")
