# cython: boundscheck=False, wraparound=False
# distutils: libraries = epcy_cuda
"""The steps of the nvshmem backend's calls: streams, and the calls that move no data."""

from libc.stdint cimport uint32_t, uintptr_t

import numpy as np

from epcy.backends.call cimport Call
from epcy.backends.cuda cimport *
from epcy.backends.cuda_event cimport CudaEvent
from epcy.backends.cuda_low_latency cimport epcy_cuda_launch_reset
from epcy.backends.nvshmem_waits cimport LEFT, LEFT_ALONE
from epcy.backends.symmetric cimport check

from epcy.errors import HeapError
from epcy.status import OPERATIONS


cdef class NvshmemEpoch(NvshmemWaits):
    cdef uintptr_t begin(self, Call call, bint *capturing) except? 0:
        """Choose the stream of a call, and make it wait for what the call must come after."""
        cdef int yes = 0
        cdef uintptr_t stream = call.stream
        cdef CudaEvent fork
        if self.mapped.report.expired:
            raise self.late_error()
        self.num_calls += 1
        check(epcy_cuda_is_capturing(<void *>stream, &yes), "cudaStreamIsCapturing")
        capturing[0] = yes
        if call.async_finish or call.previous_event is not None:
            stream = self.own_stream
            fork = call.previous_event if isinstance(call.previous_event, CudaEvent) else None
            if fork is None:
                fork = CudaEvent.__new__(CudaEvent)
                fork.record(call.stream)
            check(epcy_cuda_event_wait(fork.event, <void *>stream), "cudaStreamWaitEvent")
        if not yes:
            self.come_behind(stream)
        return stream

    cdef int come_behind(self, uintptr_t stream) except -1:
        """Make a stream wait for the last eager call."""
        if self.last is not None and self.last_stream != stream:
            check(epcy_cuda_event_wait(self.last.event, <void *>stream), "cudaStreamWaitEvent")
        return 0

    cdef int be_last(self, CudaEvent event, uintptr_t stream) except -1:
        """Let later calls come behind what a stream holds."""
        event.record(stream)
        self.last, self.last_stream = event, stream
        return 0

    cdef CudaEvent end(self, Call call, uintptr_t stream, bint capturing, list keeps):
        """Mark the end of a call, and keep its arrays until the stream has passed it."""
        cdef CudaEvent event = CudaEvent.__new__(CudaEvent)
        event.record(stream)
        if stream != call.stream and not call.async_finish:
            check(epcy_cuda_event_wait(event.event, <void *>call.stream), "cudaStreamWaitEvent")
        if capturing:
            self.captured.append(keeps)     # a graph may replay for as long as the Buffer lives
            return event
        event.keeps = keeps
        self.last, self.last_stream = event, stream
        if self.counters is not None:
            self.counters.leave()
        self.alive.append(event)
        if len(self.alive) % 4 == 0:        # to ask after an event takes longer than to keep one
            while self.alive and (<CudaEvent>self.alive[0]).query():
                (<CudaEvent>self.alive.pop(0)).keeps = None
        return event

    def next_ticket(self):
        self.num_tickets = (self.num_tickets + 1) & 0xFFFFFFFF or 1
        return self.num_tickets

    def step(self, uint32_t header, bytes text, uint32_t ticket):
        """Launch a call that moves nothing, behind all others, on the Buffer's own stream."""
        self.launch_step(header, text, ticket, self.own_stream)

    def align(self, uintptr_t stream):
        """Launch a barrier of all ranks on a stream; the host does not wait."""
        self.launch_step(OP_BARRIER, None, 0, stream)

    cdef int launch_step(self, uint32_t header, bytes text, uint32_t ticket, uintptr_t stream) except -1:
        cdef epcy_peers peers = self.peers
        cdef int previous = 0
        cdef const char *c_text = NULL
        cdef CudaEvent event = CudaEvent.__new__(CudaEvent)
        self.num_calls += 1
        if text is not None:
            c_text = text
        check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
        try:
            self.come_behind(stream)
            peers.ticket, peers.operation = ticket, header & 7
            if not header & EPCY_HEADER_REFUSED:
                self.lose_flags(&peers, OPERATIONS[header & 7])
            self.run_step(&peers, header, c_text, stream)
            self.be_last(event, stream)
        finally:
            epcy_cuda_set_device(previous, NULL)
        return 0

    cdef int run_step(self, epcy_peers *peers, uint32_t header, const char *text, uintptr_t stream) except -1:
        return check(epcy_cuda_launch_step(peers, header, text, <void *>stream), "launching a step")

    def refuse(self, int op, str text):
        """Take part in a call without data, so that the others learn why and stay in step."""
        raw = f"rank {self.rank} refused {OPERATIONS[op]}: {text}".encode()[:EPCY_CUDA_TEXT_BYTES - 1]
        self.step(<uint32_t>op | EPCY_HEADER_REFUSED, raw, 0)

    def barrier(self, int op=OP_BARRIER):
        """Wait for every rank to come here."""
        self.reach(OPERATIONS[op], "arrival")
        ticket = self.next_ticket()
        self.step(op, None, ticket)
        self.wait_report(ticket, self.rank, 1, 0, OPERATIONS[op])

    def reset(self):
        """Bring every rank to one epoch again, by a kernel of two rounds.

        After a timeout the next reset() goes on with the same rounds, and then takes part in those that others have
        begun since.
        """
        cdef bint again = self.reset_is_open
        cdef int previous = 0
        check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
        try:
            if not again:   # they know; who has met this rank in its rounds since would take it for news
                self.tell_gone(self.mask_bits())
            self.settle("reset")
            self.late_error()
            self.one_reset()
            while again:
                rounds = self.fetch(self.peers.control.resets, self.num_ranks, np.uint64) >> np.uint64(32)
                if rounds.max() <= self.num_resets:
                    break
                self.one_reset()
            self.late_error()           # of a round that was left by Ctrl-C, and expired since
            self.forget_areas()
        finally:
            epcy_cuda_set_device(previous, NULL)

    def one_reset(self):
        cdef epcy_peers peers = self.peers
        if not self.reset_is_open:
            self.reach("reset", "arrival")
            self.num_resets = max(self.num_resets + 1, self.next_reset())
        self.reset_is_open = self.broken = True
        peers.ticket = self.next_ticket()
        self.lose_flags(&peers, "reset")
        self.launch_reset(&peers)
        self.wait_report(peers.ticket, self.rank, 1, 0, "reset")
        self.reset_is_open = self.broken = False
        self.mapped.report.stop = 0
        # The same on every rank, whatever calls each had tried: handles are compared by the number of their call.
        self.num_calls = int(self.fetch(self.peers.control.local, 1, np.uint32)[0])

    cdef int launch_reset(self, epcy_peers *peers) except -1:
        return check(epcy_cuda_launch_reset(peers, &self.wire, self.num_resets, <void *>self.own_stream),
                     "launching reset")

    def next_reset(self):
        """The round that the ranks are in, or come to next, who may have gone on without this one."""
        rounds = (self.fetch(self.peers.control.resets, 2 * self.num_ranks, np.uint64) >> np.uint64(32)).reshape(2, -1)
        mask = self.mask_bits()
        return max([0] + [int(begun if begun > settled else begun + 1) for rank, (begun, settled) in enumerate(rounds.T)
                          if rank != self.rank and begun and not mask >> rank & 1])

    def refuse_memory(self, int op, num_tokens):
        """Refuse a call, and raise: there is no memory for its handle."""
        text = f"x: no memory for the routes of {num_tokens} tokens (rank {self.rank})"
        self.refuse(op, text)
        raise HeapError(text)

    cdef bint is_left_out(self) except -1:
        return bool((self.fetch(self.peers.control.left, self.num_ranks, np.uint32) == LEFT_ALONE).any())

    def close(self, bint together):
        """Give the memory back; `together` is collective."""
        from mpi4py import MPI

        cdef int previous = 0
        check(epcy_cuda_set_device(self.device, &previous), "cudaSetDevice")
        try:
            agreed = alone = False
            try:
                alone = self.leaves_alone(together, OP_FREE)
                agreed = together and not alone
            finally:
                if self.counters is not None:
                    self.counters.close()
                if not agreed:
                    self.tell_gone(0, LEFT_ALONE if alone else LEFT)
                self.close_areas()
                self.alive, self.captured = [], []
            if agreed and not MPI.Is_finalized():
                self.settle("free")
                self.memory.free()
                epcy_cuda_stream_free(<void *>self.own_stream)
                self.comm.Free()
        finally:
            epcy_cuda_set_device(previous, NULL)
