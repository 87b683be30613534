# cython: boundscheck=False, wraparound=False
"""The state of a Buffer: which calls it allows, how long they wait, what it tells, and its masked ranks."""

from posix.unistd cimport getpid

from epcy.errors import ArgumentError, StateError
from epcy.options import BY_NAME

cdef object NEED_ALL = frozenset(["dispatch", "combine", "barrier", "warmup"])


cdef class BufferState:

    def check(self):
        """Raise what went wrong in an earlier call that did not wait.

        Local, blocking. Each error is raised once.

        Raises
        ------
        ArgumentError, CapacityError, PeerError
        """
        self.enter("check")
        self._busy = False
        self._backend.wait_all()
        self._backend.inspect("check")
        self._raise_late()

    def stats(self, *, reset=False):
        """Tell what this rank's Buffer did: memory, tokens, waits, times.

        Local. It waits for nothing on the host backend; on nvshmem it copies 400 KB from the GPU. Works on a
        broken Buffer too.

        Parameters
        ----------
        reset : bool
            Count anew from here on. What is returned is of the time before.

        Returns
        -------
        epcy.stats.Stats

        Raises
        ------
        StateError
            The Buffer was freed, or was made with `stats=False`.
        """
        if self._freed or self._backend is None:
            raise StateError(f"stats: this Buffer was freed (rank {self.rank}); ask before free()")
        if self._backend.meter is None:
            raise StateError(f"stats: this Buffer counts nothing (rank {self.rank}); construct it with stats=True")
        found = self._backend.meter.read()
        if reset:
            self._backend.meter.set_back()
        return found

    def mask_rank(self, rank):
        """Go on without a rank in the low-latency calls: it is not waited for, gets nothing and gives nothing.

        Local, does not block. Needs `low_latency_mode=True`. On nvshmem it is ordered like a call, and CUDA graphs
        replay with the masks of the moment: let replays end before it. Lanes that go to its experts are dropped and
        counted; `low_latency_combine(renormalize=True)` scales the weights of what is left. The other calls need
        all ranks: while a rank is masked they are a StateError.

        Parameters
        ----------
        rank : int
            Any other rank. Masking one twice does nothing.

        Raises
        ------
        ArgumentError, StateError
        NotSupportedError
            Puts carry low-latency calls here (`buf.low_latency_transport`); they need all ranks.
        """
        self.enter("mask_rank")
        self._busy = False
        self._backend.set_mask(self.other_rank(rank), True)

    def unmask_rank(self, rank):
        """Take a rank back that was only late.

        Local, does not block. The calls that were made without it are over: it makes them too, to be where the others
        are (nothing comes of them, and `check()` tells so), or all ranks call `reset()` after this.

        Parameters
        ----------
        rank : int
            One that is not masked stays so.

        Raises
        ------
        ArgumentError
        StateError
            Its process has ended; it cannot come back.
        """
        self.enter("unmask_rank")
        self._busy = False
        other = self.other_rank(rank)
        if self._backend.dead([other]):
            raise StateError(f"unmask_rank: the process of rank {other} has ended and cannot come back (rank "
                             f"{self.rank}); leave it masked, or restart the job")
        self._backend.set_mask(other, False)

    def masked_ranks(self):
        """Tell which ranks this one goes on without: by `mask_rank`, or on their timeout with `on_timeout="mask"`.

        Local, does not block.

        Returns
        -------
        tuple of int
        """
        return () if self._backend is None else self._backend.masked()

    @property
    def num_lanes_not_sent(self):
        """Lanes, by the rank that they would have gone to, that low-latency dispatches dropped: (R,) int64, since the
        Buffer was made. None where the backend masks no ranks."""
        return None if self._backend is None else self._backend.dropped(0)

    @property
    def num_lanes_not_returned(self):
        """Lanes, by rank, that were sent and missing in the sums of low-latency combines: (R,) int64, likewise."""
        return None if self._backend is None else self._backend.dropped(1)

    def _raise_late(self):
        """Raise what went wrong in an earlier call that did not wait; this one is over on all ranks."""
        error = self._backend.take_deferred()
        if error is not None:
            raise error

    cdef int other_rank(self, rank) except -1:
        cdef int size = self._backend.num_ranks
        if self._backend.low_latency is None:
            raise StateError(f"mask_rank: this Buffer has no low-latency areas (rank {self.rank}); construct it with "
                             "low_latency_mode=True")
        if isinstance(rank, bool) or not hasattr(rank, "__index__"):
            raise ArgumentError(f"rank: expected a whole number, got {rank!r} (rank {self.rank})")
        if not 0 <= rank.__index__() < size or rank.__index__() == self.rank:
            raise ArgumentError(f"rank: expected another rank than this one, in 0..{size - 1}, got {rank} "
                                f"(rank {self.rank})")
        return rank.__index__()

    cdef int limit(self, timeout) except -1:
        """Bound the waits of this call where the user gave a limit."""
        if timeout is None:
            return 0
        option = BY_NAME["timeout"]
        try:
            seconds = None if isinstance(timeout, (bool, str, bytes)) else float(timeout)
        except (TypeError, ValueError):
            seconds = None
        if seconds is None or not option.minimum <= seconds <= option.maximum:
            raise ArgumentError(f"timeout: expected seconds from {option.minimum:g} to {option.maximum:g}, or None for "
                                f"the Buffer's, got {timeout!r} (rank {self.rank})")
        self._backend.set_timeout(seconds)
        return 0

    cdef int enter(self, str name) except -1:
        """Refuse a call that the Buffer's state does not allow; mark it busy."""
        if self._freed or self._backend is None:
            raise StateError(f"{name}: this Buffer was freed (rank {self.rank}); construct a new one")
        if self._pid != getpid():
            raise StateError(f"{name}: this Buffer belongs to process {self._pid}, a fork cannot use it; "
                             "construct one after the fork")
        if self._busy:
            raise StateError(f"{name}: another thread is in a call of this Buffer (rank {self.rank}); "
                             "give each thread its own Buffer")
        if self._backend.broken and name != "reset":
            raise StateError(f"{name}: an earlier call on this Buffer did not end (rank {self.rank}); "
                             "call reset() on all ranks first")
        if mpi_finalized():
            raise StateError(f"{name}: MPI was finalized, and the Buffer's memory went with it (rank {self.rank})")
        if self._backend.num_masked() and name in NEED_ALL:
            raise StateError(f"{name}: ranks {list(self.masked_ranks())} are masked (rank {self.rank}), and this call "
                             "needs all ranks; unmask them and call reset() on all ranks first")
        self._backend.set_timeout(self._backend.default_timeout)
        self._busy = True
        return 0

    cdef int leave(self) except -1:
        """End a call, well or not."""
        self._busy = False
        return self._backend.leave()


cdef object _is_finalized = None


cdef bint mpi_finalized():
    global _is_finalized
    if _is_finalized is None:
        from mpi4py import MPI
        _is_finalized = MPI.Is_finalized
    return _is_finalized()
