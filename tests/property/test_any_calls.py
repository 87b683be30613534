"""Legal and illegal calls in any order on all ranks: the reference's bits or the error that the state calls for, and
after every error the Buffer works, or says that reset() is needed."""

from __future__ import annotations

import time

import hypothesis.strategies as st
import numpy as np
import pytest

import epcy
from mpi import low_latency_cases as low_latency
from mpi.cases import check_combine, check_dispatch, draw, mine, raised
from parallel import given

CALLS = ["dispatch", "cached", "worst", "combine", "barrier", "low_latency", "two_hooks", "hook_out_of_turn",
         "third_send", "bad_argument", "bad_id", "mismatch", "too_many", "reset", "late", "fresh", "use_after_free",
         "stale_result"]  # fmt: skip


class Player:
    def __init__(self, make_buffer, comm):
        self.make_buffer, self.comm = make_buffer, comm
        self.fresh(0)

    def fresh(self, seed):
        """Free the Buffer, sometimes before another one is there, and go on with a new one."""
        old = getattr(self, "buf", None)
        if old is not None and seed % 2:
            old.free()
        self.buf = self.make_buffer(
            low_latency_mode=True, num_sms=1 + seed % 2, check=seed % 3 == 0, timeout=20
        )
        if old is not None:
            old.free()
            assert type(raised(old.barrier)) is epcy.StateError
        self.made = []

    def sent(self, seed, **options):
        tokens = [(seed + 3 * r) % 7 for r in range(self.comm.size)]
        return draw(seed, self.comm.size, tokens, num_experts=4 * self.comm.size, **options)

    def dispatch(self, seed):
        layout = ("rank", "expert")[seed % 2]
        r, routing = check_dispatch(self.buf, self.sent(seed), layout=layout, alignment=1 + 3 * (seed % 2))
        self.made.append((r, routing, seed))

    def cached(self, seed):
        if self.made:
            r, routing, first = self.made[seed % len(self.made)]
            check_dispatch(self.buf, self.sent(first), handle=r.handle, routing=routing)

    def worst(self, seed):
        limit = seed % 9 + 1
        r, routing = check_dispatch(self.buf, self.sent(seed), worst=limit)
        error = raised(self.buf.check)
        assert (type(error) is epcy.CapacityError) == bool(r.handle.overflow), repr(error)

    def combine(self, seed):
        if self.made:
            r, routing, _ = self.made[seed % len(self.made)]
            check_combine(self.buf, r.handle, routing, seed, staged=seed % 3 > 0)

    def barrier(self, seed):
        self.buf.barrier(timeout=10)

    def low_latency(self, seed):
        sent = self.sent(seed)
        handle, routing = low_latency.check_dispatch(self.buf, sent, hook=seed % 2 == 1)
        low_latency.check_combine(
            self.buf, handle, routing, seed, dispatched=sent.weights, hook=seed % 3 == 1
        )

    def flights(self, seeds):
        return [
            self.buf.low_latency_dispatch(*mine(self.buf, self.sent(s)), use_fp8=False, return_recv_hook=True)
            for s in seeds
        ]

    def land(self, flights, seeds):
        for (recv_x, count, *_), seed in zip(flights, seeds, strict=True):
            want, _ = low_latency.expected(self.buf, self.sent(seed), use_fp8=False)
            low_latency.compare_received(recv_x, count, want)

    def two_hooks(self, seed):
        flights = self.flights([seed, seed + 1])
        if seed % 2:
            self.buf.barrier()
        flights[0][4]()
        flights[1][4]()
        self.land(flights, [seed, seed + 1])

    def hook_out_of_turn(self, seed):
        flights = self.flights([seed, seed + 1])
        assert type(raised(flights[1][4])) is epcy.StateError
        flights[0][4]()
        assert type(raised(flights[0][4])) is epcy.StateError
        flights[1][4]()
        self.land(flights, [seed, seed + 1])

    def third_send(self, seed):
        flights = self.flights([seed, seed + 1])
        assert type(raised(lambda: self.flights([seed]))) is epcy.StateError
        for flight in flights:
            flight[4]()
        self.land(flights, [seed, seed + 1])

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


@pytest.mark.host_only("timeouts and refusals are told at once")
@given(
    max_examples=25,
    story=st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 2**16)), min_size=2, max_size=14),
)
def test_any_calls(comm, make_buffer, story):
    player = Player(make_buffer, comm)
    for name, seed in story:
        getattr(player, name)(seed)
    assert raised(player.buf.check) is None
    player.dispatch(1)
    player.low_latency(1)
    player.buf.free()
