# cython: boundscheck=False, wraparound=False
"""What carries messages between nodes: the interface, and MPI.

A message that is sent stays in its buffer until the receiver has taken it from the wire into one of his own, so a
sender can never be further ahead than there are buffers: that is the flow control. (Small messages of channels that
are not synchronous leave at once.)
"""

from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport calloc, free

import time

import numpy as np

from epcy.errors import BackendError

_open = set()                           # networks whose messages may still come: their memory must stay


cdef class Network:
    cdef int progress(self) except -1:
        """Let messages come and go; how many did."""
        raise NotImplementedError

    cdef int give_up(self, dead) except -1:
        """After `progress` has raised: nothing comes from these ranks any more; how many messages of others moved."""
        raise NotImplementedError

    cdef char *arrived(self, int channel) except? NULL:
        """The oldest message that is here, or NULL."""
        raise NotImplementedError

    cdef int release(self, int channel) except -1:
        """Give back the buffer of the oldest message."""
        raise NotImplementedError

    cdef char *room(self, int channel, int num=1) except? NULL:
        """A free buffer, or NULL; `num`: unless so many are free."""
        raise NotImplementedError

    cdef int send(self, int channel, int64_t num_bytes) except -1:
        """Send what lies in the buffer that `room` gave."""
        raise NotImplementedError

    cdef bint has_sent(self, int channel) noexcept:
        """Whether all messages have left their buffers."""
        return True

    cdef bint is_lost(self, int channel):
        """Whether its rank has been given up: what is sent to it would be an error of MPI's."""
        return False

    def has_ended(self, request):
        """Wait a little for a cancelled receive: one that had begun ends with its sender, who may have left."""
        limit = time.monotonic() + 1
        while not request.Test():
            if time.monotonic() > limit:
                return False
            time.sleep(2e-5)
        return True

    def close(self, together):
        """End; with `together` all ranks do, and every message has come."""


cdef class MpiNetwork(Network):
    def __cinit__(self):
        self.name = "MPI messages"

    def __init__(self, comm, channels):
        """Local. `comm` is this network's own from now on; channels: (peer, tag, bytes, buffers, synchronous) each."""
        from mpi4py import MPI

        cdef int c, i, at = 0, total = sum([2 * buffers for _, _, _, buffers, _ in channels])
        cdef int64_t num_bytes
        # An import is Python, where a signal's handler may raise: between a word that counts as told and its message.
        self.comm, self.test, self.byte, self.failure = comm, MPI.Request.Testsome, MPI.BYTE, MPI.Exception
        self.requests, self.buffers, self.receives, self.lost = [], [], [], set()
        self.owner = <int *>calloc(max(1, total), sizeof(int))
        self.first = <int *>calloc(5 * (len(channels) + 1), sizeof(int))
        self.address = <char **>calloc(max(1, total), sizeof(char *))
        self.pending = <char *>calloc(max(1, total), 1)
        if self.owner == NULL or self.first == NULL or self.address == NULL or self.pending == NULL:
            raise MemoryError
        self.num_buffers = self.first + len(channels) + 1
        self.synchronous = self.num_buffers + len(channels) + 1
        self.oldest, self.newest = self.synchronous + len(channels) + 1, self.synchronous + 2 * (len(channels) + 1)
        for c, (peer, tag, num_bytes, buffers, synchronous) in enumerate(channels):
            self.first[c], self.num_buffers[c], self.synchronous[c] = at, buffers, synchronous
            self.receives.append((peer, tag))
            memory = np.empty((2 * buffers, -(-num_bytes // 64) * 64), np.uint8)
            for i in range(2 * buffers):
                self.owner[at] = c
                self.address[at] = <char *><uintptr_t>memory[i].ctypes.data
                self.buffers.append(memoryview(memory[i]))
                self.requests.append(MPI.REQUEST_NULL)
                at += 1
        self.first[len(channels)] = at
        _open.add(self)
        try:
            for at in range(total):
                c = self.owner[at]
                if at < self.first[c] + self.num_buffers[c]:
                    self.requests[at] = comm.Recv_init([self.buffers[at], MPI.BYTE], *self.receives[c])
                    self.requests[at].Start()
                    self.pending[at] = True
        except BaseException:       # what comes has no place any more; the communicator stays the caller's
            self.take_back(True)
            raise

    def __dealloc__(self):
        free(self.owner)
        free(self.first)
        free(self.address)
        free(self.pending)

    cdef int progress(self) except -1:
        cdef int i
        try:
            done = self.test(self.requests)
        except self.failure as error:
            raise BackendError(f"MPI: a message between nodes failed ({error}); restart the job", "MPI",
                               error.Get_error_class()) from error
        if not done:
            return 0
        for i in done:
            self.pending[i] = False
        return len(done)

    cdef int give_up(self, dead) except -1:
        # MPI tells that one of the requests failed, and not which ones ended well: those of the living did.
        from mpi4py import MPI

        cdef int i, moved = 0
        self.lost.update(dead)
        for i, request in enumerate(self.requests):
            if not self.pending[i]:
                continue
            if i >= self.first[self.owner[i]] + self.num_buffers[self.owner[i]]:
                over = request == MPI.REQUEST_NULL
            else:
                over = self.receives[self.owner[i]][0] not in self.lost and request.Test()
            self.pending[i] = not over
            moved += over
        return moved

    cdef char *arrived(self, int channel) except? NULL:
        cdef int at = self.first[channel] + self.oldest[channel]
        return NULL if self.pending[at] else self.address[at]

    cdef int release(self, int channel) except -1:
        cdef int at = self.first[channel] + self.oldest[channel]
        self.pending[at] = True
        self.oldest[channel] = (self.oldest[channel] + 1) % self.num_buffers[channel]
        self.requests[at].Start()
        return 0

    cdef char *room(self, int channel, int num=1) except? NULL:
        cdef int i, at = self.first[channel] + self.num_buffers[channel]
        for i in range(num):
            if self.pending[at + (self.newest[channel] + i) % self.num_buffers[channel]]:
                return NULL
        return self.address[at + self.newest[channel]]

    cdef int send(self, int channel, int64_t num_bytes) except -1:
        cdef int at = self.first[channel] + self.num_buffers[channel] + self.newest[channel]
        peer, tag = self.receives[channel]
        send = self.comm.Issend if self.synchronous[channel] else self.comm.Isend
        self.requests[at] = send([self.buffers[at][:num_bytes], self.byte], peer, tag)
        self.pending[at] = True
        self.newest[channel] = (self.newest[channel] + 1) % self.num_buffers[channel]
        return 0

    cdef bint is_lost(self, int channel):
        return self.receives[channel][0] in self.lost

    cdef bint has_sent(self, int channel) noexcept:
        cdef int i, at = self.first[channel] + self.num_buffers[channel]
        for i in range(self.num_buffers[channel]):
            if self.pending[at + i]:
                return False
        return True

    def close(self, together):
        from mpi4py import MPI

        if not MPI.Is_finalized() and self.take_back(together) and together:
            self.comm.Free()

    cdef bint take_back(self, bint together) except -1:
        """Cancel the receives; whether none of them goes on."""
        cdef int i
        cdef bint all_ended = True
        for i, request in enumerate(self.requests):
            # A message that nobody takes any more is left alone: to cancel a send is no longer in MPI's standard.
            if (i >= self.first[self.owner[i]] + self.num_buffers[self.owner[i]]
                    or self.receives[self.owner[i]][0] in self.lost):
                continue
            if self.pending[i]:
                request.Cancel()
                if together and not self.has_ended(request):
                    all_ended = False
                    continue
            if together and request:
                request.Free()
        if together and all_ended:
            _open.discard(self)
        return all_ended
