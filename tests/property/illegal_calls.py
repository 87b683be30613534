"""Illegal calls: the error that the state calls for on every rank; after it the Buffer works, or says that reset() is
needed (test_any_calls.py)."""

from __future__ import annotations

import time

import numpy as np

import epcy
from mpi import low_latency_cases as low_latency
from mpi.cases import draw, mine, raised
from property.legal_calls import Player


class Offender(Player):
    def culprit(self, seed):
        return seed % self.comm.size

    def one_is_wrong(self, seed, call, kind):
        error = low_latency.late_error(self.buf, call)
        mine = self.comm.rank == self.culprit(seed)
        assert type(error) is (kind if mine else epcy.PeerError), repr(error)
        assert mine or error.ranks == (self.culprit(seed),)

    def bad_argument(self, seed):
        x, idx, w = mine(self.buf, self.sent(seed))
        wrong = idx.astype(np.float32) if self.comm.rank == self.culprit(seed) else idx
        name = ("dispatch", "low_latency_dispatch")[seed // 2 % 2]
        self.one_is_wrong(seed, lambda: getattr(self.buf, name)(x, wrong, w), epcy.ArgumentError)

    def bad_id(self, seed):
        sent = draw(seed, self.comm.size, 3, num_experts=4 * self.comm.size)
        x, idx, w = mine(self.buf, sent)
        if self.comm.rank == self.culprit(seed):
            idx[1, 1] = -7
        self.one_is_wrong(seed, lambda: self.buf.dispatch(x, idx, w), epcy.ArgumentError)

    def too_many(self, seed):
        many = self.comm.rank == self.culprit(seed)
        x, idx = np.zeros((17 if many else 2, 512), np.float16), np.zeros((17 if many else 2, 2), np.int64)
        name = ("dispatch", "low_latency_dispatch")[seed // 2 % 2]
        self.one_is_wrong(seed, lambda: getattr(self.buf, name)(x, idx), epcy.CapacityError)

    def mismatch(self, seed):
        if self.comm.size == 1:
            return
        x, idx, _ = mine(self.buf, self.sent(seed))
        if self.comm.rank == self.culprit(seed):
            error = raised(self.buf.barrier)
        else:
            error = raised(lambda: self.buf.dispatch(x, idx))
        assert type(error) is epcy.MismatchError, repr(error)

    def reset(self, seed):
        flights = self.flights([seed]) if seed % 2 else []
        self.buf.reset()
        for flight in flights:
            assert type(raised(flight[4])) is epcy.StateError

    def late(self, seed):
        if self.comm.size == 1 or seed % 4:  # it takes its time
            time.sleep(0.002 * (self.comm.rank == self.culprit(seed)))
            return
        late = self.comm.rank == self.culprit(seed)
        if not late:
            assert type(raised(lambda: self.buf.barrier(timeout=0.02))) is epcy.PeerTimeoutError
            assert not self.buf and type(raised(self.buf.barrier)) is epcy.StateError
        self.comm.Barrier()
        self.buf.reset()

    def use_after_free(self, seed):
        other = self.make_buffer(low_latency_mode=seed % 2 == 0)
        other.free()
        for call in (other.barrier, other.reset, other.check, lambda: other.mask_rank(0)):
            assert type(raised(call)) is epcy.StateError
        assert raised(other.free) is None and other.masked_ranks() == ()

    def stale_result(self, seed):
        x, idx, _ = mine(self.buf, self.sent(seed))
        r = self.buf.dispatch(x, idx)
        self.buf.dispatch(x, idx)
        assert raised(lambda: r.recv_x) is None
        self.buf.dispatch(x, idx)
        assert type(raised(lambda: r.recv_x)) is epcy.StateError

    def all_are_wrong(self, call, kind, text):
        """Every rank makes the same mistake, and is told its own."""
        error = raised(call)
        assert type(error) is kind and text in str(error), repr(error)
        told = raised(self.buf.check)
        assert told is None or type(told) is epcy.PeerError and text in str(told), repr(told)

    def foreign_handle(self, seed):
        other = self.make_buffer(low_latency_mode=True)
        x, idx, _ = mine(other, self.sent(seed))
        r, (_, _, handle, *_) = other.dispatch(x, idx), other.low_latency_dispatch(x, idx)
        y, rows = np.zeros((4, 16 * self.comm.size, 512), np.float16), np.array(r.recv_x)
        calls = [
            lambda: self.buf.dispatch(x, handle=r.handle),
            lambda: self.buf.combine(rows, r.handle),
            lambda: self.buf.low_latency_combine(y, None, None, handle),
            lambda: self.buf.combine(rows, handle),
        ]
        if seed % 2:
            other.free()
        self.all_are_wrong(calls[seed // 2 % 4], epcy.ArgumentError, "handle: expected")
        other.free()

    def handle_and_ids(self, seed):
        if self.made:
            r, _, first = self.made[seed % len(self.made)]
            x, idx, _ = mine(self.buf, self.sent(first))
            if seed % 2:
                self.all_are_wrong(
                    lambda: self.buf.dispatch(x, idx, handle=r.handle), epcy.ArgumentError, "topk_idx: "
                )
            else:
                more = np.zeros((r.handle.num_tokens + 1, 512), x.dtype)
                self.all_are_wrong(
                    lambda: self.buf.dispatch(more, handle=r.handle), epcy.ArgumentError, "x: "
                )

    def wrong_rows(self, seed):
        if self.made:
            r, _, _ = self.made[seed % len(self.made)]
            y = np.zeros((r.handle.num_rows + 1 + seed % 3, 512), np.float16)
            self.all_are_wrong(lambda: self.buf.combine(y, r.handle), epcy.ArgumentError, "x: expected")

    def combine_inputs(self, seed):
        """Two areas of a kind may be out; a third is refused, and a reset takes them back."""
        if seed % 2:
            x, idx, _ = mine(self.buf, self.sent(seed))
            handle, ask = self.buf.dispatch(x, idx).handle, self.buf.combine_input
        else:
            x, idx, _ = mine(self.buf, self.sent(seed))
            handle, ask = self.buf.low_latency_dispatch(x, idx)[2], self.buf.low_latency_combine_input
        given = [ask(handle) for _ in range(2)]
        error = raised(lambda: ask(handle))
        assert type(error) is epcy.StateError and "both combine areas" in str(error), repr(error)
        if seed // 2 % 2:
            self.buf.reset()
            return
        for y in given:
            y[...] = 1
            if seed % 2:
                self.buf.combine(y, handle)
            else:
                self.buf.low_latency_combine(y, None, None, handle, zero_copy=True)

    def unreceived_handle(self, seed):
        (flight,) = self.flights([seed])
        y = np.zeros((4, 16 * self.comm.size, 512), np.float16)
        error = raised(lambda: self.buf.low_latency_combine(y, None, None, flight[2]))
        assert type(error) is epcy.StateError and "hook" in str(error), repr(error)
        flight[4]()
        self.land([flight], [seed])
        raised(self.buf.check)

    def masked(self, seed):
        """What needs all ranks is refused while one is masked here; masks are each rank's own."""
        if self.comm.size == 1:
            assert type(raised(lambda: self.buf.mask_rank(0))) is epcy.ArgumentError
            return
        other = (self.comm.rank + 1) % self.comm.size
        self.comm.Barrier()  # a call that is still being received is told of a mask, too
        self.buf.mask_rank(other)
        assert self.buf.masked_ranks() == (other,)
        x, idx, _ = mine(self.buf, self.sent(seed))
        for call in (self.buf.barrier, lambda: self.buf.dispatch(x, idx), self.buf.warmup):
            error = raised(call)
            assert type(error) is epcy.StateError and f"ranks [{other}] are masked" in str(error), repr(error)
        self.comm.Barrier()  # nobody's call meets a rank that has masked it
        self.buf.unmask_rank(other)
        assert self.buf.masked_ranks() == ()
        self.comm.Barrier()

    def late_low_latency(self, seed):
        if self.comm.size == 1 or seed % 4:
            return self.low_latency(seed)
        late = self.comm.rank == self.culprit(seed)
        x, idx, _ = mine(self.buf, self.sent(seed))
        if not late:
            error = raised(lambda: self.buf.low_latency_dispatch(x, idx, timeout=0.02))
            assert type(error) is epcy.PeerTimeoutError and self.culprit(seed) in error.ranks, repr(error)
        self.comm.Barrier()
        self.buf.reset()

    def refused_construction(self, seed):
        """A constructor that fails fails on every rank, and leaves this Buffer alone."""
        wrong = self.comm.rank == self.culprit(seed)
        options = [{"hidden": 63 if wrong else 64}, {"num_topk": 0 if wrong else 2}, {"timeout": -1 if wrong else 20},
                   {"dtype": "float32" if wrong or self.comm.size == 1 else "float16"}]  # fmt: skip
        which = seed // 8 % 4
        error = raised(lambda: self.make_buffer(**options[which]))
        if which < 3:
            assert type(error) is (epcy.ArgumentError if wrong else epcy.PeerError), repr(error)
        elif self.comm.size > 1:
            assert type(error) is epcy.MismatchError and str(error).startswith("dtype: "), repr(error)

    def free_in_flight(self, seed):
        other = self.make_buffer(low_latency_mode=True)
        x, idx, _ = mine(other, self.sent(seed))
        r = other.dispatch(x, idx)
        flight = other.low_latency_dispatch(x, idx, use_fp8=False, return_recv_hook=True)
        other.free()
        for call in (flight[4], lambda: r.recv_x, lambda: other.combine_input(r.handle), other.combine_input):
            assert isinstance(raised(call), (epcy.StateError, TypeError))
        assert r.handle.num_tokens == len(x)  # a handle is no view
