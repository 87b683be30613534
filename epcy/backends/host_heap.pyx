# cython: boundscheck=False, wraparound=False
# distutils: libraries = epcy_host
"""A rank's part of the shared heap: how large it is, how it is made and looked at, the threads that work on it."""

import os

from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

import numpy as np

from epcy.arrays cimport memory_at
from epcy.backends.meter cimport EPCY_GAUGES_AT, epcy_gauges_bytes
from epcy.backends.window cimport Heap, allocate
from epcy.layout cimport (
    EPCY_NUM_AREAS, epcy_default_num_rows, epcy_heap_layout, epcy_low_latency_area, epcy_low_latency_area_layout,
    epcy_num_local_experts, epcy_num_scales, epcy_shape, region_bytes, shape_of)

from epcy import status as status_pages
from epcy.backends import bootstrap
from epcy.backends.window import no_room
from epcy.errors import ArgumentError, HeapError


def heap_layout(dict sizes):
    """Bytes of the regions of a rank's allocation, by name."""
    cdef epcy_shape s = shape_of(sizes)
    control_bytes = epcy_host_control_bytes(&s)
    return region_bytes(epcy_heap_layout(&s, control_bytes), control_bytes - epcy_low_latency_wire_bytes(&s))


cdef class HostHeap(Backend):
    def __cinit__(self):
        self.h.base = NULL

    def __init__(self, comm, dict shape, dict options, list identities, object token):
        """Collective, blocking: allocate the shared window over `comm`, whose ranks share this machine."""
        cdef int size = comm.size
        try:
            super().__init__(comm, shape, options, identities, token, np)
            self.h.shape, self.h.rank = self.shape, comm.rank
            options["num_sms"] = self.num_threads = options["num_sms"] or 1
            nbytes = heap_layout(shape)["total"]
            self.reach("constructor", "arrival")
            error = no_room(nbytes, self.num_ranks_here())
            if self.faults is not None and self.faults.is_full():
                error = HeapError(f"num_max_tokens_per_rank: the Buffer needs {nbytes * size} bytes of shared memory; "
                                  "there is no room, says EPCY_FAULTS (full); give fewer num_max_tokens_per_rank")
            self.take()
            self.h.base = <char **>calloc(size, sizeof(char *))
            if self.h.base == NULL:
                raise MemoryError
            self.heap = Heap()
            bootstrap.exchange(comm, None, error, self.timeout, "Buffer()")
            self.take_memory(nbytes)
            self.take()
            self.open(options, nbytes)
            bootstrap.exchange(comm, None, None, self.timeout, "Buffer()")      # also: every control block is zero now
        except BaseException as error:
            self.failed(comm, error, options["timeout"])

    cdef int open(self, dict options, int64_t nbytes) except -1:
        """Local: the control block, threads, the status page, the views."""
        cdef int code = epcy_host_open(&self.h, options["spin_us"], options["num_sms"])
        if code:
            raise HeapError(f"num_sms: could not start {options['num_sms']} threads ({os.strerror(code)})")
        options["stream_bytes"] = EPCY_STREAM_BYTES if options["stream_bytes"] is None else options["stream_bytes"]
        options["chunk_tokens"] = options["chunk_tokens"] or EPCY_CHUNK_TOKENS
        self.use_knobs(options)
        if self.meter is not None:
            self.h.meter = self.meter.m
        self.take()
        error = self.open_status(options["status_dir"])
        if error is not None:
            raise error
        self.take()
        self.start, self.heap_layout = self.heap.start, self.h.heap
        self.open_areas(memory_at(self.start, nbytes, self.heap))
        self.take()
        return 0

    def abandon(self, bint together):
        super().abandon(together)
        self.remove_page()
        if together and self.heap is not None:
            self.heap.close()

    def num_ranks_here(self):
        """The ranks whose memory this machine must hold."""
        return self.num_ranks

    cdef int take_memory(self, int64_t nbytes) except -1:
        """Collective: the window, and where each rank's memory is mapped."""
        return allocate(self.heap, self.comm, nbytes, self.h.base)

    cdef int give_memory_back(self) except -1:
        """Collective: free what take_memory took, and the communicator."""
        self.heap.close()
        self.comm.Free()
        return 0

    def __dealloc__(self):
        if self.h.base != NULL:
            epcy_host_close(&self.h)
            free(self.h.base)

    def use_sms(self, num_sms):
        """Let calls use so many threads from now on; None: one."""
        cdef int code = epcy_host_use_threads(&self.h, num_sms or 1)
        if code:
            raise HeapError(f"num_sms: could not start {num_sms} threads ({os.strerror(code)}; rank {self.rank}); "
                            "give fewer")
        self.num_threads = num_sms or 1

    def use_knobs(self, dict options):
        """Take from now on what the options say of how a call goes about its work."""
        self.h.stream_bytes, self.h.chunk_tokens = options["stream_bytes"], options["chunk_tokens"]

    def num_blocks(self, str op, str layout):
        """How many threads a call has now."""
        return self.num_threads

    def most_sms(self, str op, str layout, int num_cores):
        """How many threads could be of use: a core each."""
        return num_cores

    cdef object open_status(self, directory):
        """Map the status file; the first fields of it and of the status in the window."""
        cdef epcy_status start
        cdef const uint8_t[::1] view
        start.magic, start.version, start.pid = EPCY_STATUS_MAGIC, EPCY_STATUS_VERSION, os.getpid()
        start.rank, start.size = <int>self.h.rank, <int>self.h.shape.num_ranks
        memcpy(epcy_host_status(&self.h, self.h.rank), &start, 24)
        if directory == "":
            return None
        try:
            nbytes = EPCY_GAUGES_AT + epcy_gauges_bytes(epcy_num_local_experts(&self.h.shape))
            self.page, self.page_path = status_pages.open_page(status_pages.folder(directory), self.h.rank, nbytes)
        except ArgumentError as error:
            return error
        except OSError as error:
            return ArgumentError(f"status_dir: could not make a status page: {error}; set EPCY_STATUS_DIR")
        view = self.page
        self.h.page = <epcy_status *>&view[0]
        if self.meter is not None:
            self.meter.attach(self.page)
        memcpy(self.h.page, &start, 24)
        return None

    def remove_page(self):
        if self.page_path is not None:
            self.h.page = NULL
            if self.meter is not None:
                self.meter.attach(None)
            try:
                os.unlink(self.page_path)
            except FileNotFoundError:
                pass
            self.page = self.page_path = None

    cdef object view(self, int64_t offset, tuple shape, dtype, owner):
        return np.ndarray(shape, dtype, owner, offset)

    cdef int touch_rank(self, int64_t rank) except -1:
        """Look at every page of a rank's memory that calls use, so that this process has it."""
        cdef epcy_shape *s = &self.h.shape
        cdef epcy_low_latency_area low = epcy_low_latency_area_layout(s)
        cdef int64_t rows = min(s.num_rows, epcy_default_num_rows(s)), local = epcy_num_local_experts(s)
        cdef int64_t slots = s.num_ranks * s.num_low_latency_tokens, at, i, expert, row_bytes
        # Of each expert twice a balanced load: all of its slots would be far more memory than is ever used.
        cdef int64_t some = min(slots, 2 * (s.num_low_latency_tokens * s.num_topk // local) + 1)
        with nogil:
            epcy_host_touch(&self.h, rank, 0, self.h.heap.receive[0])
            for i in range(2 * EPCY_NUM_AREAS):
                at = self.h.heap.receive[i] if i < EPCY_NUM_AREAS else self.h.heap.combine[i - EPCY_NUM_AREAS]
                epcy_host_touch(&self.h, rank, at + self.h.area.payload, rows * s.row_bytes)
                epcy_host_touch(&self.h, rank, at + self.h.area.scales, rows * epcy_num_scales(s.hidden) * 4)
                epcy_host_touch(&self.h, rank, at + self.h.area.topk_idx, rows * s.num_topk * 8)
                epcy_host_touch(&self.h, rank, at + self.h.area.topk_weights, rows * s.num_topk * 4)
            for i in range(EPCY_NUM_AREAS if slots else 0):
                at = self.h.heap.low_latency_x[i]
                row_bytes = s.hidden
                while row_bytes <= s.row_bytes:     # where an expert's rows begin depends on the element's size
                    for expert in range(local):
                        epcy_host_touch(&self.h, rank, at + low.payload + expert * slots * row_bytes, some * row_bytes)
                        epcy_host_touch(&self.h, rank, self.h.heap.low_latency_y[i] + expert * slots * row_bytes,
                                        some * row_bytes)
                    row_bytes *= 2
                epcy_host_touch(&self.h, rank, at + low.scales, low.bytes - low.scales)
        return 0

    def touch(self):
        """Have the pages that calls use: this rank's own first, so that they lie near it, then everybody's."""
        cdef int64_t rank
        self.touch_rank(self.h.rank)
        self.barrier()
        for rank in range(self.h.shape.num_ranks):
            if self.h.is_remote == NULL or not self.h.is_remote[rank]:
                self.touch_rank(rank)
