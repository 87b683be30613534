# cython: boundscheck=False, wraparound=False
# distutils: libraries = epcy_host
"""Waiting for other ranks, and what can go wrong there: late, dead or departed ranks, waits that cross, signals."""

import time
import weakref

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t, uint8_t, uint64_t

from epcy.handle cimport Area

from epcy import status as status_pages
from epcy.backends import verdicts

cdef int64_t SLICE_NS = 100_000_000     # how long a wait stays in C before it looks for Ctrl-C and dead ranks

cdef extern from "Python.h":
    int Py_AtExit(void (*function)() noexcept nogil)

OPERATIONS = status_pages.OPERATIONS
_inspected = weakref.WeakSet()          # Buffers of this process with the option `check`
WAITED_FOR = {EPCY_WORD_ARRIVED: "arrival", EPCY_WORD_DONE: "completion", EPCY_WORD_RESET: "reset",
              EPCY_WORD_RECEIVED_DISPATCH: "receipt", EPCY_WORD_RECEIVED_COMBINE: "receipt"}


cdef class HostWaits(HostHeap):
    def __init__(self, *args):
        super().__init__(*args)
        if self.checks:
            _inspected.add(self)

    cdef int tell(self, int op, str phase, int word, uint64_t value) except -1:
        """Store a word, unless a fault loses it."""
        if self.faults is None or not self.faults.drops(OPERATIONS[op] if op else "reset", phase):
            epcy_host_store(&self.h, word, value)
        return 0

    cdef int wait(self, int op, int word, uint64_t value, uint64_t first) except -1:
        """Wait until `word` of every rank is at least `value`, or raise: then this rank leaves call `first`."""
        cdef int state
        cdef int64_t start_ns = epcy_now_ns()
        try:
            state = self.wait_slice(word, value, min(SLICE_NS, <int64_t>(self.timeout * 1e9)))
            if state != EPCY_WAIT_DONE:
                self.wait_longer(op, word, value, first, state, start_ns * 1e-9)
        except BaseException:       # PeerTimeoutError; but a signal's handler may raise in any line of Python
            if op == EPCY_OP_DISPATCH and word == EPCY_WORD_ARRIVED:
                (<Area>self.areas[self.next_area]).generation += 1      # a late rank may still write there
            self.in_call = False
            if word == EPCY_WORD_RESET:     # whoever is through with reset() goes on waiting for this rank
                self.broken = True
            else:
                self.break_off(first)
            raise
        return 0

    cdef int wait_longer(self, int op, int word, uint64_t value, uint64_t first, int state, double start) except -1:
        """Go on waiting since `start`, with an eye on signals, on dead ranks and on the clock."""
        while True:
            PyErr_CheckSignals()
            missing = self.missing(word, value)
            dead = self.dead(missing)
            left = self.timeout - (time.monotonic() - start)
            late = state == EPCY_WAIT_BROKEN or missing and (
                dead or left <= 0 or word != EPCY_WORD_RESET and any([self.has_left(r) for r in missing]))
            if late and not self.goes_on(op, missing, dead, left):
                if dead:
                    self.mourn(op, word, first, dead)
                self.give_up(op, word, value, first, time.monotonic() - start)
            if missing and not late and self.inspection is not None:
                self.inspect_order(op, missing)
            limit = min(SLICE_NS, <int64_t>(max(left, 0.0) * 1e9) + 1)
            state = self.wait_slice(word, value, limit)
            if state == EPCY_WAIT_DONE:
                return 0

    cdef int wait_slice(self, int word, uint64_t value, int64_t slice_ns) except -1:
        """Wait for so long: an enum epcy_wait."""
        cdef int state
        with nogil:
            state = epcy_host_wait(&self.h, word, value, slice_ns)
        return state

    def missing(self, int word, uint64_t value):
        return [r for r in range(self.h.shape.num_ranks)
                if not self.h.masked[r] and epcy_host_word(&self.h, r, word) < value]

    def goes_on(self, int op, missing, dead, double left):
        """Whether this call can do without the ranks that are dead, gone, or too late: then they are masked."""
        return False

    def has_left(self, int64_t rank):
        """Whether that rank gave up, or is in a reset() that this rank knows nothing of."""
        return (epcy_host_word(&self.h, rank, EPCY_WORD_BROKEN) != 0
                or epcy_host_word(&self.h, rank, EPCY_WORD_RESET) > self.num_resets)

    def break_off(self, uint64_t first):
        """Leave call `first` and what follows: there the others must not touch this rank's memory nor wait for it."""
        self.broken = True
        epcy_host_store(&self.h, EPCY_WORD_BROKEN, first or 1)
        epcy_host_phase(&self.h, 0, EPCY_PHASE_IDLE)

    def inspect_order(self, int op, missing):
        """Raise if a rank that is missing here waits for this one in another Buffer: neither would ever come."""
        for other in list(_inspected):
            for r in missing:
                there = None if other is self else (<HostWaits>other).waits_there(self, r)
                if there is not None:
                    time.sleep(0.15)        # it finds the same, unless this rank had left before
                    (<HostWaits>other).break_off((<HostWaits>other).h.epoch + 1)
                    raise verdicts.crossed(OPERATIONS[op], self.h.epoch, self.h.rank, r, *there)

    def waits_there(self, HostWaits first, int rank):
        """Whether the process of rank `rank` of `first` is in a call of this Buffer that this one has not entered."""
        cdef int64_t r
        cdef epcy_record *last
        cdef epcy_record *theirs
        if self.broken or self.h.base == NULL:
            return None
        for r in range(self.num_ranks):
            if self.identities[r] != first.identities[rank]:
                continue
            at = status_pages.parse((<const char *>epcy_host_status(&self.h, r))[:128])
            if at is None or at.phase == "idle" or at.epoch <= self.h.epoch:
                return None
            # Two threads with a Buffer each may be in both: then the other one still comes.
            theirs = epcy_host_record(&self.h, r, at.epoch)
            last = epcy_host_record(&first.h, rank, epcy_host_word(&first.h, rank, EPCY_WORD_ARRIVED))
            if theirs.thread and last.thread and theirs.thread != last.thread:
                return None
            return at.operation, at.epoch, self.h.epoch
        return None

    def node_of(self, rank):
        """A word on the node of a rank, where there are several."""
        return ""

    def where(self, ranks):
        """Say where these ranks are."""
        cdef const uint8_t *at
        lines = []
        for r in ranks[:16]:
            at = <const uint8_t *>epcy_host_status(&self.h, r)
            state = status_pages.parse((<const char *>at)[:128])
            broken = ", gave up" if epcy_host_word(&self.h, r, EPCY_WORD_BROKEN) else ""
            lines.append(f"rank {r} (pid {self.identities[r].pid}{self.node_of(r)}) is {state}{broken}")
        return "; ".join(lines)

    def give_up(self, int op, int word, uint64_t value, uint64_t first, double waited):
        """Raise: a rank did not come in time, or gave up itself. Unless all have come by now: then go on."""
        gone = [r for r in range(self.h.shape.num_ranks)
                if r != self.h.rank and not self.h.masked[r] and self.has_left(r)]
        missing = self.missing(word, value)
        # Who left without coming; else who keeps even those waiting that gave up; else who gave up.
        left = [r for r in missing if r in gone] if word != EPCY_WORD_RESET else []
        culprits = left or missing or gone or ([self.rank] if self.broken else [])
        if not culprits:
            return
        dead = self.dead(culprits)
        if dead:        # somebody else found out first
            self.mourn(op, word, first, dead)
        seen = [epcy_host_word(&self.h, r, word) for r in culprits[:16]]
        name = "reset" if word == EPCY_WORD_RESET else OPERATIONS[op]
        raise verdicts.late(name, first, self.h.rank, culprits, WAITED_FOR[word], value, seen,
                            self.where(culprits), gone, waited, self.timeout)

    def mourn(self, int op, int word, uint64_t first, list dead):
        """Raise: ranks have ended."""
        bound_exit()
        name = "reset" if word == EPCY_WORD_RESET else OPERATIONS[op]
        raise verdicts.ended(name, first, self.h.rank, dead, self.identities[dead[0]].pid, WAITED_FOR[word],
                             self.node_of(dead[0]))


cdef bint _exit_is_bound = False


cdef void end_of_interpreter() noexcept nogil:
    epcy_host_bound_exit()


def bound_exit():
    """See to it that the interpreter's end cannot hang: MPI_Finalize might wait for a rank that is dead.

    mpi4py reads `rc.finalize` only when it is imported. Functions of Py_AtExit run last first, so this one runs before
    mpi4py's.
    """
    global _exit_is_bound
    if not _exit_is_bound and Py_AtExit(&end_of_interpreter) == 0:
        _exit_is_bound = True
