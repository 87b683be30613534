# cython: boundscheck=False, wraparound=False
# distutils: libraries = epcy_host
"""How the host backend waits for ranks of other nodes: the one place where such a wait rests, and where it gives up.

A wait for a word of every rank (host_waits.pyx) is one in memory, for a copy of a control block is there; this one is
for what only messages bring: rows, sums, slots, answers, room for a message.
"""

import time

from cpython.exc cimport PyErr_CheckSignals
from posix.time cimport nanosleep, timespec

from epcy.backends.host_kernels cimport *

from epcy.backends import verdicts
from epcy.backends.host_waits import bound_exit
from epcy.status import OPERATIONS

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef int NUM_YIELDS = 64                # turns in which nothing happens until the core is left for longer
cdef int LOOK_EVERY = 128               # and between two looks at the clock and at the others
cdef long NAP_NS = 20_000


cdef class NodeWait:
    def __init__(self, HostWaits of, int op, str phase, int word, uint64_t value, double limit):
        """Begin to wait, for at most `limit` seconds; `value` is the call, and of reset() what `word` should be."""
        self.of, self.op, self.phase, self.word, self.value, self.limit = of, op, phase, word, value, limit
        self.since = time.monotonic()

    cdef double waited(self) except -1:
        """For how many seconds."""
        return time.monotonic() - self.since

    cdef bint rest(self) except -1:
        """Answer signals and leave the core to others; whether it is time to look if this will ever end."""
        cdef timespec nap
        PyErr_CheckSignals()
        self.idle += 1
        nap.tv_sec, nap.tv_nsec = 0, NAP_NS
        with nogil:
            if self.idle < NUM_YIELDS:
                sched_yield()
            else:
                nanosleep(&nap, NULL)
        return self.idle % LOOK_EVERY == 0

    cdef int look(self, list awaited, list gone=None, list blamed=None) except -1:
        """Raise if one of `awaited` has ended, one of `gone` has left, or the time is over, unless the call goes on.

        Masked ranks are not among `awaited`; those that are masked here are not any more when this is called again.
        `gone` are by default those of `awaited` that left; `blamed`, by default `awaited`, are named if none has ended.
        """
        cdef HostWaits of = self.of
        cdef double waited = self.waited()
        dead = of.dead(awaited)
        if gone is None:        # whoever has left its call comes to reset() all the same
            gone = [r for r in awaited if self.op and of.has_left(r)]
        if not dead and not gone and waited < self.limit or of.goes_on(self.op, awaited, dead, self.limit - waited):
            return 0
        name, epoch = (OPERATIONS[self.op], self.value) if self.op else ("reset", of.h.epoch)
        of.in_call = False
        if self.op:
            of.break_off(epoch)
        else:
            of.broken = True
        if dead:
            bound_exit()
            raise verdicts.ended(name, epoch, of.rank, dead, of.identities[dead[0]].pid, self.phase,
                                 of.node_of(dead[0]))
        blamed = awaited if blamed is None else blamed
        blamed = [r for r in blamed if r in gone] or blamed or gone
        seen = [epcy_host_word(&of.h, r, self.word) if self.word >= 0 else 0 for r in blamed]
        raise verdicts.late(name, epoch, of.rank, blamed, self.phase, self.value, seen, of.where(blamed), gone,
                            waited, self.limit)
