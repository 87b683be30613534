# cython: boundscheck=False, wraparound=False
# distutils: libraries = epcy_host
"""What ranks of other nodes know of this one, and this one of them: snapshots of control blocks, by messages.

This rank's words are sent when they change, and messages are looked at in every wait. A snapshot leaves without its
sender's help, in several messages where it is large: a rank that has told what it stored may turn to other work.
"""

import time

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from epcy.backends.node_waits cimport NodeWait

from epcy.errors import BackendError

cdef int MOST_AT_ONCE = 256             # messages that a turn takes
cdef int64_t EAGER_BYTES = 8192         # of messages that surely leave without their sender's help
cdef int NUM_SNAPSHOTS = 8              # of the largest kind, that may be on their way to a rank


cdef class HostSnapshots(HostLowLatencyBackend):
    def __dealloc__(self):
        free(self.remote)
        free(self.told)
        free(self.heard)
        free(self.pieces)
        free(self.num_come)

    cdef int open_told(self, int size) except -1:
        """Make room for what is known of each rank."""
        self.remote = <int *>calloc(size, sizeof(int))
        self.told = <epcy_told *>calloc(size, sizeof(epcy_told))
        self.heard = <epcy_heard *>calloc(size, sizeof(epcy_heard))
        if self.remote == NULL or self.told == NULL or self.heard == NULL:
            raise MemoryError
        return 0

    cdef tuple open_pieces(self):
        """Make room for snapshots in pieces; of a channel of them: bytes, buffers, and that it is synchronous."""
        cdef int64_t whole_bytes = epcy_snapshot_bytes(&self.h.shape)
        self.num_pieces = <int>((whole_bytes + EAGER_BYTES - 1) // EAGER_BYTES)
        self.piece_bytes = min(whole_bytes, EAGER_BYTES)
        if self.num_pieces > 1:
            self.pieces = <char *>malloc((1 + self.num_remote) * whole_bytes)
            self.num_come = <int64_t *>calloc(self.num_remote, sizeof(int64_t))
            if self.pieces == NULL or self.num_come == NULL:
                raise MemoryError
        return self.piece_bytes, NUM_SNAPSHOTS * self.num_pieces, True

    cdef int pump(self) except -1:
        """Let messages come and go, apply what came, tell what changed; how many came or went."""
        cdef int i, channel, moved = 0, now = 1
        cdef char *message
        while now and moved < MOST_AT_ONCE:     # all that has come: the last word of a rank may be that it has left
            try:
                now = self.network.progress()
            except BackendError:
                try:
                    dead = self.must_be_dead()
                except BaseException:   # a signal's handler: what has come has come all the same
                    self.network.give_up([])
                    raise
                now = self.network.give_up(dead)
            moved += now
            for i in range(self.num_remote):
                channel = self.first_control + i
                message = self.network.arrived(channel)
                while message != NULL:
                    self.take_piece(i, message)
                    self.network.release(channel)
                    message = self.network.arrived(channel)
        self.tell_nodes()
        return moved

    cdef object must_be_dead(self):
        """Whose message broke off because its process has ended: the wait for it finds that out. Else raise again."""
        cdef int i
        remote = [self.remote[i] for i in range(self.num_remote)]
        for _ in range(200):         # its memory went first, and what tells of its end comes a little later
            dead = self.dead(remote)
            if dead:
                return dead
            time.sleep(0.005)
        raise

    cdef int tell_nodes(self) except -1:
        """Send this rank's words to everybody who does not know them; the number of ranks that could not be told.

        Without room nothing is lost: what a rank hears is always the newest. A masked rank is not waited for, and but
        one message is under way to it, so that there is room for the news that it is masked no more.
        """
        cdef int i, channel, untold = 0
        cdef int64_t num_bytes
        cdef char *message
        for i in range(self.num_remote):
            channel = self.first_control + i
            if self.network.is_lost(channel):
                continue
            if (self.h.masked[self.remote[i]] and not self.network.has_sent(channel)
                    and self.told[i].without == epcy_host_without(&self.h, self.h.rank)[self.remote[i]]):
                continue
            message = self.network.room(channel, self.num_pieces)
            if message == NULL:
                untold += not self.h.masked[self.remote[i]]
                continue
            if self.num_pieces > 1:
                message = self.pieces
            num_bytes = epcy_snapshot_take(&self.h, self.remote[i], self.leaving, self.asked, &self.heard[i],
                                           &self.told[i], message)
            if self.num_pieces > 1:
                self.send_pieces(channel, message, num_bytes)
            elif num_bytes:
                self.network.send(channel, num_bytes)
        return untold

    cdef int send_pieces(self, int channel, const char *snapshot, int64_t num_bytes) except -1:
        """Send a snapshot in messages that leave at once: there is room for all of them."""
        cdef int64_t at = 0, some
        while at < num_bytes:
            some = min(self.piece_bytes, num_bytes - at)
            memcpy(self.network.room(channel), snapshot + at, some)
            self.network.send(channel, some)
            at += some
        return 0

    cdef int take_piece(self, int i, const char *message) except -1:
        """Apply the snapshot that a message is, or ends."""
        cdef int64_t whole_bytes = epcy_snapshot_bytes(&self.h.shape), num_bytes
        cdef char *into
        if self.num_pieces > 1 and (self.num_come[i] or epcy_snapshot_num_bytes(message) > self.piece_bytes):
            into = self.pieces + (1 + i) * whole_bytes
            num_bytes = epcy_snapshot_num_bytes(into) if self.num_come[i] else epcy_snapshot_num_bytes(message)
            memcpy(into + self.num_come[i], message, min(self.piece_bytes, num_bytes - self.num_come[i]))
            self.num_come[i] += self.piece_bytes
            if self.num_come[i] < num_bytes:
                return 0
            self.num_come[i] = 0
            message = into
        epcy_snapshot_apply(&self.h, self.remote[i], message, &self.heard[i])
        return 0

    cdef int flush(self, double limit) except -1:
        """Let everybody know what this rank has stored; when it leaves, wait until they leave too.

        That is no error's place: whoever cannot be told any more, or not in time, makes the next call fail.
        """
        cdef NodeWait wait = None
        while True:
            self.pump()
            if self.is_told(self.tell_nodes()):
                return 0
            if wait is None:
                wait = NodeWait(self, 0, "leave", -1, 0, limit)
            if wait.rest() and (wait.waited() > limit or self.all_dead()):
                return 0

    cdef bint is_told(self, int untold) noexcept:
        cdef int i
        for i in range(self.num_remote):
            untold += self.is_untold(i)
        return untold == 0

    cdef bint is_untold(self, int i) noexcept:
        """Whether this rank must not leave before a rank of another node has heard of it, or left as well."""
        if self.h.masked[self.remote[i]]:
            return False
        return self.leaving and (not self.heard[i].leaving
                                 or not self.network.has_sent(self.first_control + i))

    cdef bint all_dead(self) except -1:
        """Whether all who are still to be told have ended."""
        cdef int i
        untold = [self.remote[i] for i in range(self.num_remote)
                  if self.is_untold(i) or self.network.room(self.first_control + i, self.num_pieces) == NULL]
        return len(self.dead(untold)) == len(untold)
