# cython: boundscheck=False, wraparound=False, cdivision=True
# distutils: libraries = epcy_cuda
"""A low-latency handle whose routing lies on the GPU, and the memory of such handles."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t, uintptr_t

from epcy.backends.cuda cimport epcy_cuda_fetch
from epcy.backends.cuda_event cimport CudaEvent
from epcy.backends.cuda_low_latency cimport epcy_low_latency_found
from epcy.backends.symmetric cimport check
from epcy.handle cimport LowLatencyHandle

import numpy as np

from epcy.backends import verdicts

cdef enum:
    BLOCKS_AT_ONCE = 16


cdef class Blocks:
    def __init__(self, pool, int64_t nbytes):
        self.pool, self.nbytes, self.slabs, self.free = pool, nbytes, [], []
        self.more()

    cdef int more(self) except -1:
        cdef int i
        slab = self.pool.malloc(BLOCKS_AT_ONCE * self.nbytes)
        self.slabs.append(slab)
        for i in range(BLOCKS_AT_ONCE):
            self.free.append(<uintptr_t>slab.ptr + <uintptr_t>(i * self.nbytes))
        return 0

    cdef Block take(self):
        """A block; what it held may still be in use by earlier work of this Buffer: all later work comes after."""
        cdef Block block = Block.__new__(Block)
        if not self.free:
            self.more()
        block.at = self.free.pop()
        block.home = self
        return block


@cython.no_gc_clear
cdef class Block:
    def __dealloc__(self):
        if self.home is not None and self.home.free is not None:       # None: the collector has come to it first
            self.home.free.append(self.at)


cdef class CudaLowLatencyHandle(LowLatencyHandle):
    cpdef object expert_counts(self):
        import cupy
        memory = cupy.cuda.UnownedMemory(<uintptr_t>self.arrays.counts, self.num_local * 8, self.block)
        return cupy.ndarray((self.num_local,), np.int64, memptr=cupy.cuda.MemoryPointer(memory, 0))

    @property
    def num_recv_tokens(self):
        return self.expert_counts().sum()

    cdef int fetch(self, CudaEvent event) except -1:
        """Wait for a call, and copy what it and those before have found; 0: there is nothing any more."""
        if event is not None:
            event.synchronize()
        if self.backend is None:
            return 0
        check(epcy_cuda_fetch(&self.found, self.arrays.found, sizeof(self.found)), "cudaMemcpy")
        return 1

    cdef object num_dropped(self, int which, uint32_t ranks):
        """Lanes by rank, where the kernels have counted any."""
        cdef int32_t[::1] counts
        cdef int num_ranks = self.backend.num_ranks
        lanes = np.zeros(num_ranks, np.int32)
        if ranks:
            counts = lanes
            check(epcy_cuda_fetch(&counts[0], self.arrays.dropped + which * num_ranks, num_ranks * 4), "cudaMemcpy")
        return lanes.astype(np.int64)

    @property
    def num_lanes_not_sent(self):
        return self.num_dropped(0, self.found.not_sent_to) if self.fetch(self.sent or self.event) else None

    @property
    def num_lanes_not_returned(self):
        if not self.fetch(self.combined or self.event):
            return None
        return self.num_dropped(1, self.found.not_returning if self.combined is not None else 0)

    @property
    def missing_ranks(self):
        if not self.received or not self.fetch(self.event):
            return ()
        return tuple([r for r in range(self.backend.num_ranks) if self.found.missing >> r & 1])

    def check(self):
        cdef epcy_low_latency_found found
        if self.error is None and self.received and self.fetch(self.event):
            found = self.found
            if found.verdict:       # the Buffer has its text, or has told it already
                self.error = self.backend.reported() or self.backend.last_error
            elif found.has_bad:
                self.error = verdicts.bad_id(self.backend.rank, found.bad_token, found.bad_lane, found.bad_value,
                                             self.backend.shape.num_experts)
            elif found.left_by:
                self.error = verdicts.left_out(self.epoch, "low_latency_dispatch", [
                    r for r in range(self.backend.num_ranks) if found.left_by >> r & 1])
        if self.error is not None:
            raise self.error
