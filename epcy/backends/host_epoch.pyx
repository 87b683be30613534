# cython: boundscheck=False, wraparound=False
# distutils: libraries = epcy_host
"""One step of the epoch: a rank enters with its record, compares everybody's, and leaves; or refuses, or resets."""

from threading import get_native_id

from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy, memset

from epcy.backends import verdicts
from epcy.errors import PeerError
from epcy.status import OPERATIONS


cdef class HostEpoch(HostWaits):
    cdef epcy_record *begin(self, int op) except NULL:
        """Start a call: take the next epoch and its record."""
        cdef epcy_record *record
        self.reach(OPERATIONS[op], "arrival")
        # A rank that refused call n - 1 did not wait there: the record of n - 2 must not be needed any more.
        self.wait(op, EPCY_WORD_ARRIVED, self.h.epoch, self.h.epoch + 1)
        self.h.epoch += 1
        self.entered = self.h.epoch
        self.in_call = True
        record = epcy_host_record(&self.h, self.h.rank, self.h.epoch)
        memset(record, 0, sizeof(epcy_record) - EPCY_TEXT_BYTES)
        record.epoch, record.op = self.h.epoch, op
        if self.checks:
            record.thread = get_native_id()
        epcy_host_phase(&self.h, op, EPCY_PHASE_ARRIVAL)
        return record

    cdef int arrive(self, int op) except -1:
        self.tell(op, "arrival", EPCY_WORD_ARRIVED, self.h.epoch)
        self.wait(op, EPCY_WORD_ARRIVED, self.h.epoch, self.h.epoch)
        return self.reach(OPERATIONS[op], "data")

    cdef int finish(self, int op) except -1:
        self.reach(OPERATIONS[op], "completion")
        self.tell(op, "completion", EPCY_WORD_DONE, self.h.epoch)
        epcy_host_phase(&self.h, op, EPCY_PHASE_COMPLETION)
        self.wait(op, EPCY_WORD_DONE, self.h.epoch, self.h.epoch)
        epcy_host_phase(&self.h, op, EPCY_PHASE_IDLE)
        self.in_call = False
        if self.inspection is not None:
            self.inspect(OPERATIONS[op])
        return 0

    def step_out(self, int op):
        """Leave a call in which this rank moves nothing, so that ranks that go through with it do not wait for it."""
        self.reach(OPERATIONS[op], "completion")
        self.tell(op, "completion", EPCY_WORD_DONE, self.h.epoch)
        epcy_host_phase(&self.h, op, EPCY_PHASE_IDLE)
        self.in_call = False

    cdef int leave(self) except -1:
        if self.in_call and not self.broken:
            self.break_off(self.entered)
        return 0

    def refuse(self, int op, str text):
        """Take part in a call without data, so that the others learn why and stay in step."""
        self.begin(op)
        self.publish_refusal(op, text)

    def publish_refusal(self, int op, str text):
        cdef epcy_record *record = epcy_host_record(&self.h, self.h.rank, self.h.epoch)
        cdef bytes raw = text.encode()[:EPCY_TEXT_BYTES - 1]
        memcpy(record.text, <const char *>raw, len(raw))
        record.text[len(raw)] = 0
        record.refused = 1
        epcy_host_store(&self.h, EPCY_WORD_ARRIVED, self.h.epoch)
        epcy_host_store(&self.h, EPCY_WORD_DONE, self.h.epoch)
        epcy_host_phase(&self.h, op, EPCY_PHASE_IDLE)
        self.in_call = False

    # ---- comparing the records ------------------------------------------------------------------------------

    cdef object disagreement(self):
        """Compare the records of all ranks: the error that every rank must raise, or None."""
        cdef epcy_record *first = epcy_host_record(&self.h, 0, self.h.epoch)
        cdef epcy_record *r
        cdef int64_t rank, size = self.h.shape.num_ranks
        cdef bint differs = False
        for rank in range(size):
            r = epcy_host_record(&self.h, rank, self.h.epoch)
            if r.epoch != self.h.epoch:         # a low-latency call has no record
                return self.mismatch()
            if r.refused and rank != self.h.rank:
                text = (<bytes>r.text).decode(errors="replace")
                return PeerError(f"rank {rank} refused {OPERATIONS[r.op]} (call {self.h.epoch}): {text}", [rank])
            differs |= (r.op != first.op or r.dtype != first.dtype or r.layout != first.layout
                        or r.cached != first.cached or r.has_weights != first.has_weights
                        or r.alignment != first.alignment or r.routing != first.routing)
        return self.mismatch() if differs else None

    def mismatch(self):
        cdef epcy_record *r
        records = []
        ops = [self.op_of(rank, self.h.epoch) for rank in range(self.h.shape.num_ranks)]
        if any([op in (0, EPCY_OP_LOW_LATENCY_DISPATCH, EPCY_OP_LOW_LATENCY_COMBINE) for op in ops]):
            return verdicts.low_latency_mismatch(self.h.epoch, [(op,) + (0,) * 8 for op in ops])
        for rank in range(self.h.shape.num_ranks):
            r = epcy_host_record(&self.h, rank, self.h.epoch)
            records.append((r.op, r.dtype, r.layout, r.cached, r.has_weights, r.alignment, r.routing))
        return verdicts.mismatch(self.h.epoch, records)

    cdef int op_of(self, int64_t rank, uint64_t epoch) noexcept:
        """The operation of a rank that has arrived in this call; 0: it has gone on, and its records with it."""
        cdef epcy_record *record = epcy_host_record(&self.h, rank, epoch)
        cdef const epcy_low_latency_header *header
        cdef int kind
        if record.epoch == epoch:
            return record.op
        for kind in range(2 if self.h.shape.num_low_latency_tokens else 0):
            header = epcy_low_latency_find(&self.h, rank, kind, epoch)
            if header != NULL:
                return header.op
        return 0

    # ---- calls without data ---------------------------------------------------------------------------------

    def barrier(self, int op=EPCY_OP_BARRIER):
        """Wait for every rank to come here."""
        self.begin(op)
        self.arrive(op)
        error = self.disagreement()
        self.step_out(op)
        if error is not None:
            raise error

    def reset(self):
        """Bring every rank to one epoch again, over words in shared memory alone.

        Two rounds: all have come and left their calls; all have the new epoch. After a timeout the next reset() goes on
        in the round that was not over, and then takes part in one that others have begun since.
        """
        cdef bint again = self.reset_round != 0
        if again and self.reset_round == 2:
            self.second_round()
            if self.furthest_reset() <= self.num_resets:
                return
        if self.reset_round == 0:
            self.reach("reset", "arrival")
            epcy_host_store(&self.h, EPCY_WORD_EPOCH, self.h.epoch)
            self.num_resets = max(self.num_resets, self.furthest_reset()) | 1   # who went on without this rank is ahead
            self.reset_round = 1
        self.tell(0, "arrival", EPCY_WORD_RESET, self.num_resets)
        self.wait(0, EPCY_WORD_RESET, self.num_resets, self.h.epoch)
        self.reach("reset", "data")
        self.h.epoch = 2 + max([epcy_host_word(&self.h, r, EPCY_WORD_EPOCH) for r in range(self.h.shape.num_ranks)
                                if not self.h.masked[r]])
        epcy_host_store(&self.h, EPCY_WORD_ARRIVED, self.h.epoch)
        epcy_host_store(&self.h, EPCY_WORD_DONE, self.h.epoch)
        epcy_host_store(&self.h, EPCY_WORD_RECEIVED_DISPATCH, self.h.epoch)
        epcy_host_store(&self.h, EPCY_WORD_RECEIVED_COMBINE, self.h.epoch)
        epcy_host_store(&self.h, EPCY_WORD_BROKEN, 0)
        self.num_resets += 1
        self.reset_round = 2
        self.second_round()
        if again and self.furthest_reset() > self.num_resets:
            self.reset()

    cdef uint64_t furthest_reset(self):
        """The furthest round that a rank is in, this one and masked ones left out."""
        return max([0] + [epcy_host_word(&self.h, r, EPCY_WORD_RESET) for r in range(self.h.shape.num_ranks)
                          if r != self.h.rank and not self.h.masked[r]])

    def second_round(self):
        self.reach("reset", "completion")
        self.tell(0, "completion", EPCY_WORD_RESET, self.num_resets)
        self.wait(0, EPCY_WORD_RESET, self.num_resets, self.h.epoch)
        self.reset_round = 0
        self.forget_areas()
        self.broken, self.deferred, self.in_call = False, None, False

    cdef int listen(self) except -1:
        """Learn what ranks that share no memory with this one have told."""
        return 0

    cdef bint is_left_out(self) except -1:
        """Whether a rank goes on without this one now, or went without it, or did not free together with all."""
        cdef int64_t r
        self.listen()
        for r in range(self.h.shape.num_ranks):
            if r != self.h.rank and epcy_host_without(&self.h, r)[self.h.rank] == <uint64_t>-1:
                return True
        return False

    def close(self, bint together):
        """Give the memory back; `together` frees the window, which is collective.

        Whoever goes on without some rank leaves alone, and so does everybody with whom it does not free together: that
        is told by masking all, and no error.
        """
        from mpi4py import MPI

        cdef int64_t r
        cdef bint agreed = False, alone = False
        try:
            alone = self.leaves_alone(together, EPCY_OP_FREE)
            agreed = together and not alone
        finally:
            if alone and not MPI.Is_finalized():
                for r in range(self.h.shape.num_ranks):
                    if r != self.h.rank:
                        epcy_host_mask(&self.h, r, 1)
            if not agreed and not self.broken and not MPI.Is_finalized():
                self.break_off(self.h.epoch + 1)        # the others shall not wait for this rank
            self.close_areas()
            self.remove_page()
            if agreed and not MPI.Is_finalized():
                self.give_memory_back()
