# cython: boundscheck=False, wraparound=False
# distutils: libraries = epcy_cuda
"""Where an nvshmem Buffer's bytes lie: symmetric memory, as every rank's GPU reaches it, and the kernels' report."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uintptr_t

import numpy as np

from epcy.backends.base cimport Backend
from epcy.backends.cuda cimport *
from epcy.backends.cuda_low_latency cimport epcy_low_latency_wire_layout
from epcy.backends.counters cimport Counters
from epcy.backends.cuda_put cimport epcy_put_layout
from epcy.backends.symmetric cimport check
from epcy.layout cimport epcy_heap_layout, epcy_num_local_experts

from epcy.backends import bootstrap, symmetric
from epcy.errors import HeapError, NotSupportedError


cdef class Mapped:
    def __cinit__(self, int64_t num_experts):
        cdef void *host = NULL
        cdef void *device = NULL
        check(epcy_cuda_mapped(sizeof(epcy_report) + num_experts * 8, &host, &device), "cudaHostAlloc")
        self.report, self.device_report = <epcy_report *>host, <epcy_report *>device

    def __dealloc__(self):
        if self.report != NULL:
            epcy_cuda_unmap(self.report)


cdef class NvshmemHeap(Backend):
    """The memory of a Buffer, and how many blocks its kernels take."""

    def __init__(self, comm, dict shape, dict options, list identities, object token):
        """Collective, blocking: start NVSHMEM if it is not running, and allocate on its heap."""
        import cupy

        cdef int rank, previous = 0
        try:
            super().__init__(comm, shape, options, identities, token, cupy)
            if self.num_ranks > EPCY_MAX_RANKS:
                raise NotSupportedError(f"comm: backend 'nvshmem' takes up to {EPCY_MAX_RANKS} ranks of one NVLink "
                                        f"domain, got {self.num_ranks}")
            options["device"] = self.device = symmetric.choose_device(options["device"], identities, self.rank)
            symmetric.start(comm, self.device, None, self.timeout)
            self.peers.control = epcy_control_layout(&self.shape)
            self.wire = epcy_low_latency_wire_layout(&self.shape, self.peers.control.bytes)
            self.put_wire = epcy_put_layout(&self.shape, &self.wire, self.num_far_ranks(options))
            words_bytes = self.peers.control.bytes + self.wire.bytes + self.put_wire.bytes
            words_bytes += self.more_words(options, words_bytes)
            self.heap_layout = epcy_heap_layout(&self.shape, words_bytes)
            check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
            try:
                free_bytes = cupy.cuda.runtime.memGetInfo()[0]
                error = None
                self.reach("constructor", "arrival")
                if self.faults is not None and self.faults.is_full():
                    error = HeapError(f"num_max_tokens_per_rank: the Buffer needs {self.heap_layout.bytes} bytes; "
                                      "there is no room, says EPCY_FAULTS (full); give fewer num_max_tokens_per_rank")
                elif self.masks_late and self.put_wire.bytes:
                    error = NotSupportedError("on_timeout: expected 'raise' where puts carry low-latency calls, which "
                                              f"need all ranks, got {options['on_timeout']!r} (rank {self.rank}); "
                                              "leave on_timeout out")
                elif self.heap_layout.bytes > free_bytes:
                    error = HeapError(f"num_max_tokens_per_rank: the Buffer needs {self.heap_layout.bytes} bytes, GPU "
                                      f"{self.device} has {free_bytes} free; give fewer num_max_tokens_per_rank or "
                                      "num_max_recv_tokens")
                bootstrap.exchange(comm, None, error, self.timeout, "Buffer()")
                self.memory = symmetric.allocate(comm, self.heap_layout.bytes, self.timeout)
                self.take()
                unreachable = [r for r in range(self.num_ranks) if not self.memory.bases[r]]
                if unreachable:
                    raise NotSupportedError(f"comm: rank {self.rank} cannot reach the memory of ranks {unreachable} by "
                                            "NVLink or PCIe; this build moves tokens inside one NVLink domain")
                for rank in range(self.num_ranks):
                    self.peers.base[rank] = <char *><uintptr_t>self.memory.bases[rank]
                self.start = self.peers.base[self.rank]
                check(epcy_cuda_zero(self.start, words_bytes), "cudaMemset")
                self.mapped = Mapped(epcy_num_local_experts(&self.shape))
                self.peers.shape, self.peers.area, self.peers.heap = self.shape, self.area, self.heap_layout
                self.peers.rank, self.peers.report = self.rank, self.mapped.device_report
                self.peers.timeout_ns = <int64_t>(self.timeout * 1e9)
                self.peers.num_local = <int32_t>epcy_num_local_experts(&self.shape)
                self.peers.goes_on = self.masks_late
                check(epcy_cuda_stream(<void **>&self.own_stream), "cudaStreamCreate")
                check(epcy_cuda_load(), "loading kernels")
                if self.meter is not None:
                    self.counters = Counters()
                    self.counters.open(self.meter, self.start + self.peers.control.counters, self.device,
                                       epcy_num_local_experts(&self.shape))
                self.num_multiprocessors = cupy.cuda.Device(self.device).attributes["MultiProcessorCount"]
                self.choose_blocks(options["num_sms"])
                options["num_sms"] = max(options["num_sms"] or self.combine_blocks, self.dispatch_peer_blocks * (
                    self.num_ranks - 1) + self.dispatch_own_blocks)
                self.pool, self.alive, self.captured = cupy.cuda.MemoryPool(), [], []
                self.open_areas(self.memory)
                self.take()
                error = self.counters.open_page(options["status_dir"]) if self.counters is not None else None
                self.take()
                bootstrap.exchange(comm, None, error, self.timeout, "Buffer()")  # every control region is zero now
            finally:
                epcy_cuda_set_device(previous, NULL)
        except BaseException as error:
            self.failed(comm, error, options["timeout"])

    def abandon(self, bint together):
        cdef int previous = 0
        super().abandon(together)
        if self.device >= 0:
            epcy_cuda_set_device(self.device, &previous)
        if self.counters is not None:
            self.counters.close()
            self.counters = None
        if self.own_stream:
            epcy_cuda_stream_free(<void *>self.own_stream)
            self.own_stream = 0
        if together and self.memory is not None:
            self.memory.free()
            self.memory = None
        if self.device >= 0:
            epcy_cuda_set_device(previous, NULL)

    def num_far_ranks(self, options):
        """Ranks that no kernel may reach by plain stores."""
        return 0

    def more_words(self, options, begin):
        """Bytes of further words, behind the others, which take `begin`."""
        return 0

    def choose_blocks(self, num_sms):
        """Blocks for each destination. About 8 fill the link out of a rank, and more fill it less well; a rank's own
        rows need as many as a peer's. In the expert layout a rank also copies rows, or sums them, in its own memory."""
        others = self.num_ranks - 1
        each = -(-8 // max(1, others))
        most = self.num_multiprocessors     # all blocks run at once
        if num_sms:
            num_sms = min(num_sms, most)
            each = max(1, min(each, num_sms // self.num_ranks))
        self.dispatch_peer_blocks = self.dispatch_own_blocks = each
        rest = (num_sms or min(104, most)) - each * others
        self.expert_own_blocks = max(1, min(EPCY_MAX_CHUNKS, rest // 3))
        self.expert_copy_blocks = max(0, rest - self.expert_own_blocks)
        self.combine_blocks = num_sms or min(24, most)
        self.combine_expert_blocks = num_sms or min(128, most)

    def use_sms(self, num_sms):
        """Let calls use so many blocks from now on, or (None) the usual ones; handles made before know theirs."""
        self.choose_blocks(num_sms)

    def num_blocks(self, str op, str layout):
        """How many blocks, each with a multiprocessor of its own, a "dispatch" or "combine" takes."""
        by_expert = layout == "expert"
        if op == "combine":
            return self.combine_expert_blocks if by_expert else self.combine_blocks
        own = self.expert_own_blocks + self.expert_copy_blocks if by_expert else self.dispatch_own_blocks
        return self.dispatch_peer_blocks * (self.num_ranks - 1) + own

    cdef void set_timeout(self, double seconds) noexcept:
        self.timeout = seconds
        self.peers.timeout_ns = <int64_t>(seconds * 1e9)

    cdef object view(self, int64_t offset, tuple shape, dtype, owner):
        cupy = self.xp
        nbytes = int(np.prod(shape)) * dtype.itemsize
        memory = cupy.cuda.UnownedMemory(<uintptr_t>(self.start + offset), nbytes, owner, self.device)
        return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))

    def peer_address(self, int rank):
        """Where a rank's memory starts, as this GPU reaches it."""
        return <uintptr_t>self.peers.base[rank]

    # ---- faults on purpose, and the option `check` --------------------------------------------------------------

    cdef int lose_flags(self, epcy_peers *peers, str op) except -1:
        """Let a call's flags go where nobody looks, if a fault says so: its headers, its words that it is done."""
        if self.faults is None:
            return 0
        if self.faults.drops(op, "arrival"):
            peers.control.headers = peers.control.resets = peers.control.lost
        if self.faults.drops(op, "completion"):
            peers.control.done = peers.control.lost
        return 0

    cdef int poison(self, int64_t offset, int64_t num_rows, uintptr_t stream) except -1:
        """On a stream: make rows NaN, of whatever dtype."""
        at = <uintptr_t>(self.start + offset)
        self.xp.cuda.runtime.memsetAsync(at, 0xFF, num_rows * self.shape.row_bytes, stream)
        return 0

    cdef uint32_t mask_bits(self) noexcept:
        """The masked ranks, as bits."""
        return 0
