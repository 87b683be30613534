"""A player of legal calls, some of them with hooks: each is compared with the reference (test_any_calls.py)."""

from __future__ import annotations

import epcy
from mpi import low_latency_cases as low_latency
from mpi.cases import check_combine, check_dispatch, draw, mine, raised


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

    def two_buffers(self, seed):
        """Calls of two Buffers in turns, the second with other sizes."""
        other = self.make_buffer(low_latency_mode=True, num_max_tokens_per_rank=8, hidden=64, num_topk=1)
        sent = draw(seed, self.comm.size, 4, num_experts=4 * self.comm.size, num_topk=1, hidden=64)
        handle, routing = low_latency.check_dispatch(other, sent, use_fp8=False)
        self.dispatch(seed)
        low_latency.check_combine(other, handle, routing, seed, dispatched=sent.weights)
        self.combine(seed)
        other.free()
        self.barrier(seed)
