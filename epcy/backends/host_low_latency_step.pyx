# cython: boundscheck=False, wraparound=False
# distutils: libraries = epcy_host
"""One step of a low-latency call on the host backend: slots, headers, receipts, and going on without a rank.

To send is to write rows, a header and the `arrived` word into this rank's own memory; nobody is waited for, but that a
slot is free again. To receive is to wait for everybody's `arrived`, to compare the headers, to read, and to say so in a
`received` word. A call is one step of the epoch like any other.
"""

from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memcpy, memset

import numpy as np

from epcy.backends.low_latency cimport LOW_LATENCY_COMBINE, LOW_LATENCY_DISPATCH

from epcy.backends import verdicts
from epcy.errors import PeerError
from epcy.status import OPERATIONS

cdef int *OPS = [EPCY_OP_LOW_LATENCY_DISPATCH, EPCY_OP_LOW_LATENCY_COMBINE]
cdef int *RECEIVED = [EPCY_WORD_RECEIVED_DISPATCH, EPCY_WORD_RECEIVED_COMBINE]


cdef class HostLowLatencyStep(HostBackend):
    def __init__(self, *args):
        super().__init__(*args)
        if self.low_latency is not None:
            self.low_latency_transport = "shared memory"
        self.num_lanes = [[0] * self.num_ranks, [0] * self.num_ranks]

    cdef epcy_low_latency_header *take_slot(self, int kind) except NULL:
        """The slot of the next call, once everybody has received the call before the last, which lies there."""
        cdef int slot = self.next_slot[kind]
        cdef epcy_low_latency_header *header = epcy_low_latency_header_at(&self.h, self.h.rank, kind, slot)
        self.reach(OPERATIONS[OPS[kind]], "arrival")
        self.wait(OPS[kind], RECEIVED[kind], header.epoch, self.h.epoch + 1)
        if self.h.num_masked:
            epcy_low_latency_invalidate(&self.h, kind, header.epoch)
        memset(&header.op, 0, <char *>&header.text[0] - <char *>&header.op)
        header.op = OPS[kind]
        return header

    cdef uint64_t step(self, int kind) noexcept:
        """Take the next epoch."""
        self.h.epoch += 1
        self.entered, self.in_call = self.h.epoch, True
        epcy_host_phase(&self.h, OPS[kind], EPCY_PHASE_ARRIVAL)
        return self.h.epoch

    cdef int send(self, int kind, epcy_low_latency_header *header, uint64_t epoch, const int64_t *counts) except -1:
        """Make a header and what it speaks of everybody's; of a combine `counts` (L,) rows of the experts."""
        epcy_low_latency_publish(header, epoch)
        self.post(kind, self.next_slot[kind], epoch, counts)
        self.next_slot[kind] ^= 1
        self.epochs[kind][self.low_latency.sent(kind) & 1] = epoch
        self.reach(OPERATIONS[OPS[kind]], "data")
        self.tell(OPS[kind], "arrival", EPCY_WORD_ARRIVED, epoch)
        return 0

    cdef int post(self, int kind, int slot, uint64_t epoch, const int64_t *counts) except -1:
        """Send a slot to those who cannot see this rank's memory."""
        return 0

    cdef int await_slots(self, int kind, uint64_t epoch) except -1:
        """Wait for the slots of those whose memory cannot be seen."""
        return 0

    cdef const epcy_route *reachable(self, const epcy_route *routes, int64_t num_tokens, uint64_t epoch) except NULL:
        """Where a combine's rows can be read."""
        return routes

    cdef void has_sent(self, int kind) noexcept:
        """End the half of a call that sends: its hook receives."""
        epcy_host_phase(&self.h, OPS[kind], EPCY_PHASE_IDLE)
        self.in_call = False

    cdef void receiving(self, int op, uint64_t epoch) noexcept:
        self.entered, self.in_call = epoch, True
        epcy_host_phase(&self.h, op, EPCY_PHASE_COMPLETION)
        if self.h.meter != NULL:
            self.h.meter.epoch = epoch

    cdef int finish_receiving(self, int kind) except -1:
        """End a call: others may use what this rank has read."""
        self.low_latency.has_received(kind)
        self.reach(OPERATIONS[OPS[kind]], "receipt")
        if self.faults is None or not self.faults.drops(OPERATIONS[OPS[kind]], "receipt"):
            self.acknowledge(kind)
        epcy_host_phase(&self.h, OPS[kind], EPCY_PHASE_IDLE)
        self.in_call = False
        if self.inspection is not None:
            self.inspect(OPERATIONS[OPS[kind]])
        return 0

    cdef uint64_t received_up_to(self, int kind) noexcept:
        """Up to which call this rank needs nothing of this kind any more."""
        cdef uint64_t number = self.low_latency.num_received[kind]
        if number == self.low_latency.num_sent[kind]:
            return self.h.epoch
        return self.epochs[kind][number + 1 & 1] - 1

    cdef void acknowledge(self, int kind) noexcept:
        epcy_host_store(&self.h, RECEIVED[kind], self.received_up_to(kind))

    def refuse(self, int op, str text):
        cdef int kind = op - EPCY_OP_LOW_LATENCY_DISPATCH
        cdef epcy_low_latency_header *header
        cdef bytes raw
        cdef uint64_t epoch
        if kind != LOW_LATENCY_DISPATCH and kind != LOW_LATENCY_COMBINE:
            HostBackend.refuse(self, op, text)
            return
        header = self.take_slot(kind)
        raw = text.encode()[:EPCY_TEXT_BYTES - 1]
        memcpy(header.text, <const char *>raw, len(raw))
        header.text[len(raw)] = 0
        header.refused = 1
        epoch = self.step(kind)
        epcy_low_latency_publish(header, epoch)
        self.post(kind, self.next_slot[kind], epoch, NULL)
        self.next_slot[kind] ^= 1
        epcy_host_store(&self.h, EPCY_WORD_ARRIVED, epoch)
        self.acknowledge(kind)
        self.has_sent(kind)

    # ---- comparing the headers ------------------------------------------------------------------------------

    cdef object disagreement_of(self, int kind, uint64_t epoch, uint8_t *takes_part):
        """Compare everybody's headers of a call: MismatchError or PeerError, or None; and who takes part in it."""
        cdef const epcy_low_latency_header *mine = epcy_low_latency_find(&self.h, self.h.rank, kind, epoch)
        cdef const epcy_low_latency_header *r
        cdef int64_t rank, size = self.h.shape.num_ranks
        cdef bint differs = False
        cdef list left_by = []
        for rank in range(size):
            r = epcy_low_latency_find(&self.h, rank, kind, epoch)
            takes_part[rank] = r != NULL and not self.h.masked[rank]
            if self.h.masked[rank]:
                continue
            if self.is_masked_by(rank, epoch):
                left_by.append(rank)
            if r == NULL and self.is_masked_by(rank, epoch):       # it did not wait for this rank, and has gone on
                continue
            if r == NULL:
                differs = True
                break
            if r.refused:
                text = (<bytes>r.text).decode(errors="replace")
                return PeerError(f"rank {rank} refused {OPERATIONS[r.op]} (call {epoch}): {text}", [rank])
            differs |= (r.dtype != mine.dtype or r.use_fp8 != mine.use_fp8 or r.round_scale != mine.round_scale
                        or r.use_ue8m0 != mine.use_ue8m0 or r.reduction != mine.reduction
                        or r.use_logfmt != mine.use_logfmt or r.has_weights != mine.has_weights
                        or r.routing != mine.routing)
        self.left_out = verdicts.left_out(epoch, OPERATIONS[OPS[kind]], left_by) if left_by and not differs else None
        if self.left_out is not None:
            self.deferred = self.left_out
        if not differs:
            return None
        self.acknowledge(1 - kind)      # who is in a call of the other kind must not wait for this rank there
        records = []
        for rank in range(size):
            r = epcy_low_latency_find(&self.h, rank, kind, epoch)
            if r == NULL:
                records.append((self.op_of(rank, epoch),) + (0,) * 8)
            else:
                records.append((r.op, r.dtype, r.use_fp8, r.round_scale, r.use_ue8m0, r.reduction, r.use_logfmt,
                                r.has_weights, r.routing))
        return verdicts.low_latency_mismatch(epoch, records)

    def mismatch(self):
        self.acknowledge(LOW_LATENCY_DISPATCH)
        self.acknowledge(LOW_LATENCY_COMBINE)
        return HostBackend.mismatch(self)

    # ---- going on without a rank ----------------------------------------------------------------------------

    cdef bint is_masked_by(self, int64_t rank, uint64_t epoch) noexcept:
        """Whether that rank goes, or went, on without this one in this call."""
        return epcy_host_without(&self.h, rank)[self.h.rank] >= epoch

    cdef int64_t num_masked(self) noexcept:
        return self.h.num_masked

    def goes_on(self, int op, missing, dead, double left):
        cdef bint may = op == EPCY_OP_LOW_LATENCY_DISPATCH or op == EPCY_OP_LOW_LATENCY_COMBINE
        if not (may and self.masks_late):
            return False
        gone = [r for r in range(self.num_ranks) if r != self.rank and not self.h.masked[r] and self.has_left(r)]
        late = set(dead) | set(gone) | (set(missing) if left <= 0 else set())
        for rank in late - {self.rank}:
            self.set_mask(rank, True)
        return bool(late - {self.rank})

    cpdef set_mask(self, int rank, bint masked):
        epcy_host_mask(&self.h, rank, masked)

    cpdef masked(self):
        return tuple([r for r in range(self.num_ranks) if self.h.masked[r]])

    cpdef dropped(self, int which):
        return np.array(self.num_lanes[which], np.int64)
