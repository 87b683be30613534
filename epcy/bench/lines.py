"""One line of the table on the nvshmem backend, or of low latency on any: its Buffer, data, works and clocks."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

import epcy
from epcy.bench import first_call, overlap, prediction, table
from epcy.bench.arguments import Arguments
from epcy.bench.clocks import EventClock, GraphClock, HostClock, Measured, time_work
from epcy.bench.cupy_baseline import CupyExchange
from epcy.bench.datasets import DataSet, draw_sets
from epcy.bench.figures import count_bytes, figures
from epcy.bench.nccl import AllToAll, Nccl
from epcy.bench.plot import Bar
from epcy.bench.settings import buffer_options, calls_of, setting_of, shape_of, what_of
from epcy.bench.works import WORKS


class Bench:
    """What the lines of a run share: the Buffer, which lines that need an equal one use again, NCCL and the links."""

    def __init__(self, comm: MPI.Intracomm, backend: str) -> None:
        self.comm, self.backend = comm, backend
        self.buffer: Any = None
        self.options: dict[str, Any] = {}
        self.nccl: Nccl | None = None
        self.peer_copy_gbps: float | None = None
        self.timeline: dict[str, list[Bar]] = {}  # of the last line of the case overlap, of this rank

    def get_buffer(self, **options: Any) -> epcy.Buffer:
        """Return a Buffer with these options. Collective, blocking."""
        if self.buffer is None or options != self.options:
            self.free_buffer()
            self.buffer = epcy.Buffer(self.comm, backend=self.backend, preinitialize=True, **options)
            self.options = options
        assert isinstance(self.buffer, epcy.Buffer)  # noqa: S101  # for mypy
        return self.buffer

    def free_buffer(self) -> None:
        """Free the Buffer. Collective, blocking."""
        if self.buffer is not None:
            self.buffer.free()
            self.buffer = None

    def close(self) -> None:
        """Free what the lines shared. Collective, blocking."""
        if self.nccl is not None:
            self.nccl.free()
        self.free_buffer()

    def measure(self, given: Arguments, case: str, num_tokens: int) -> table.Row:
        """Time and check one case at one size. Collective, blocking."""
        if case == "first-call":  # its Buffers are its own
            self.free_buffer()
            return first_call.measure(self.comm, given, self.backend, num_tokens)
        shape = shape_of(given, num_tokens)
        buf = self.get_buffer(**buffer_options(given, shape, self.comm.size))
        is_ll = given.mode == "ll"
        setting = setting_of(given, shape, buf, self.comm)
        turns = case != "combine" and (given.graph or is_ll)
        sets = draw_sets(
            setting,
            given.seed,
            num_generations=2 if turns else 3,
            num_slots=3 if turns else 1,
            fixed_routing=given.cached and case != "combine",
        )
        from_heap = given.combine_from == "heap"
        worst = given.graph and not (given.cached and case != "combine")
        calls = calls_of(given, buf, from_heap, buf.options["num_max_recv_tokens"] if worst else 0)
        gives_back = case == "roundtrip" and from_heap and not is_ll and given.dtype != "fp8"
        how: dict[str, Any] = {
            "num_calls": given.num_calls,
            "known": given.cached and case != "combine",
            "from_heap": from_heap and (is_ll or case == "combine"),
            "gives_back": gives_back,
        }
        waits = not is_ll and case != "combine" and not given.cached

        def time(work: Any) -> Measured:
            grows = (
                case == "overlap"
            )  # products are launched one by one, and are to be there when their turn comes
            clock = self._clock(buf, given, hidden=grows or given.graph or not (is_ll or waits), grows=grows)
            return time_work(self.comm, clock, work, given.runs, given.warmup, given.check)

        beside: dict[str, Any]
        if case == "overlap":
            work: Any = overlap.Overlap(calls, sets, inner=given.inner, **how)
            measured, beside = overlap.measure(work, time)
            if given.plot is not None:
                self.timeline = work.timeline()
        else:
            work = WORKS[case](calls, sets, **how)
            measured = time(work)
            beside = self._baselines(buf, given, case, sets, measured.times.us_p50)
        if given.predict:
            beside |= prediction.predict(buf, given, case, num_tokens, measured.times.us_p50)
        buf.check()
        in_array = not gives_back and not work.from_heap
        return table.Row(
            **what_of(given, case, num_tokens, self.backend, self.comm.size),
            num_sms=self._num_sms(buf, given, case),
            wrong=measured.wrong,
            combine_from=None if case == "dispatch" else "array" if in_array else "heap",
            calls=given.num_calls,
            host_us_p50=measured.host_us_p50,
            num_late=measured.num_late,
            **beside,
            **figures(measured, count_bytes(case, sets), self.peer_copy_gbps, given.floor_gbps),
        )

    def _num_sms(self, buf: epcy.Buffer, given: Arguments, case: str) -> int | None:
        """Return the SMs that a case takes, the most of its operations; None for low latency, which takes what fits."""
        if self.backend == "host":
            return buf.num_sms
        if given.mode == "ll":
            return given.num_sms
        return max(
            buf._num_blocks(op, given.layout) for op in ("dispatch", "combine") if case in (op, "roundtrip")
        )

    def _clock(self, buf: epcy.Buffer, given: Arguments, hidden: bool, grows: bool) -> HostClock | EventClock:
        if self.backend == "host":
            return HostClock(buf)
        kind = GraphClock if given.graph else EventClock
        spin = given.mode == "ht" or given.graph or grows
        return kind(buf, flush=given.mode == "ht", spin=spin, hidden=hidden, grows=grows)

    def _baselines(
        self, buf: epcy.Buffer, given: Arguments, case: str, sets: list[list[DataSet]], epcy_us: float
    ) -> dict[str, Any]:
        found = []
        for name in given.baselines(self.backend) if self.nccl is not None else ():
            work: Any
            shape, graph = sets[0][0].setting.shape, given.graph and name != "cupy"
            if name == "nccl-alltoall":
                row_bytes = [
                    shape.row_bytes if case != "combine" else 0,
                    shape.returned_row_bytes if case != "dispatch" else 0,
                ]
                work = AllToAll(self.nccl, buf.xp, sets[0][0], row_bytes, given.num_calls)
            else:
                exchange = CupyExchange(buf.xp, self.nccl, self.comm, given.experts, given.hidden)
                work = WORKS[case](
                    exchange,
                    [of_generation[:1] for of_generation in sets],
                    known=given.cached and case != "combine",
                    gives_back=case == "roundtrip" and given.dtype != "fp8",
                )
            kind = GraphClock if graph else EventClock
            spin = given.mode == "ht" or graph
            clock = kind(buf, flush=given.mode == "ht", spin=spin, hidden=False)
            measured = time_work(self.comm, clock, work, given.runs, given.warmup, given.check)
            found.append(
                {
                    "name": name,
                    "graph": graph,
                    "us_min": measured.times.us_min,
                    "us_p50": measured.times.us_p50,
                    "us_p99": measured.times.us_p99,
                    "wrong": measured.wrong if name == "cupy" else None,
                    "speedup": measured.times.us_p50 / epcy_us,
                }
            )
        if not found:
            return {}
        first = found[0]
        return {
            "baseline": first["name"],
            **{f"baseline_{key}": first[key] for key in ("us_min", "us_p50", "us_p99", "wrong")},
            "speedup": first["speedup"],
            "baselines": tuple(found),
        }
