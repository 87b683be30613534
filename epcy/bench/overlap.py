"""The case overlap: two micro-batches, each one's calls under way while the other one's products run.

A step is as many layers as `num_calls` / 2, and a layer of a micro-batch is a dense product, a dispatch, the experts'
two products, a combine (examples/double_batch.py says the order). The products multiply arrays of their own, of as
many rows as come on the average, so that what the calls move is compared as in any other case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from epcy.bench.calls import LowLatency
from epcy.bench.clocks import Measured
from epcy.bench.datasets import DataSet
from epcy.bench.plot import Bar
from epcy.bench.works import Roundtrip

ORDERS = ("in sequence", "communication", "overlapped")


class Overlap(Roundtrip):
    """Low-latency calls and products in one of ORDERS; every row of the last two calls is compared."""

    calls: LowLatency

    def __init__(self, calls: Any, sets: list[list[DataSet]], *, inner: int, **how: Any) -> None:
        super().__init__(calls, sets, **how)
        self.order, self.inner = ORDERS[0], inner
        self.marks: Marks | None = None
        xp, shape = self.xp, self.setting.shape
        dtype = np.dtype(np.float32 if xp is np else np.float16)
        rows = max(1, shape.num_tokens * shape.num_topk)  # of all ranks' tokens, those of this rank's experts

        def ones(*size: int) -> Any:
            return xp.full(size, 1 / 64, dtype)

        self.tokens, self.dense, self.h = (
            ones(shape.num_tokens, shape.hidden),
            ones(shape.hidden, shape.hidden),
            ones(shape.num_tokens, shape.hidden),
        )
        self.rows, self.up, self.between = (
            ones(rows, shape.hidden),
            ones(shape.hidden, inner),
            ones(rows, inner),
        )
        self.down, self.back = ones(inner, shape.hidden), ones(rows, shape.hidden)

    def issue(self) -> None:
        self.results, self.sums = [], []
        if self.order == "overlapped":
            self._overlapped()
            return
        multiplies = self.order != "communication"
        for call in range(self.num_calls):
            number = call % len(self.slots)
            if multiplies:
                self._dense(call)
            with self._part("dispatch", call):
                result = self.calls.dispatch(self.slots[number])
            if multiplies:
                self._experts(call)
            handle = self.calls.handle(result)
            with self._part("combine", call):
                self.combine(call, number, self.y(handle), handle)
            self.results.append((number, result))

    def _overlapped(self) -> None:
        hooks: dict[int, Any] = {}
        for first in range(0, self.num_calls, 2):
            pair = (first, first + 1)
            for call in pair:
                if call - 2 in hooks:
                    with self._part("combine receive", call):
                        hooks.pop(call - 2)()
                self._dense(call)
                number = call % len(self.slots)
                with self._part("dispatch send", call):
                    result = self.calls.dispatch(self.slots[number], return_recv_hook=True)
                self.results.append((number, result))
            for call in pair:
                number, result = self.results[call]
                with self._part("dispatch receive", call):
                    result[4]()
                self._experts(call)
                handle, out = self.calls.handle(result), self.outs[call % 2]
                with self._part("combine send", call):
                    hooks[call] = self.calls.send_back(self.y(handle), handle, out)
                self.sums.append((number, out))
        for call, hook in hooks.items():
            with self._part("combine receive", call):
                hook()

    def _dense(self, call: int) -> None:
        with self._part("product", call):
            self.xp.matmul(self.tokens, self.dense, out=self.h)

    def _experts(self, call: int) -> None:
        with self._part("product", call):
            self.xp.matmul(self.rows, self.up, out=self.between)
            self.xp.matmul(self.between, self.down, out=self.back)

    def _part(self, name: str, call: int) -> AbstractContextManager[None]:
        return nullcontext() if self.marks is None else self.marks.part(name, call)

    def timeline(self) -> dict[str, list[Bar]]:
        """Go through the orders with products a few times more, eagerly; return what this rank did in the shortest.

        Collective, blocking.
        """
        found: dict[str, list[Bar]] = {}
        for order in (ORDERS[0], ORDERS[2]) * 5:
            self.order = order
            self.load(0)
            self.calls.buf.barrier()
            self.marks = Marks(self.xp)
            self.issue()
            bars, self.marks = self.marks.bars(), None
            if order not in found or bars[-1].end_us < found[order][-1].end_us:
                found[order] = bars
        return found


class Marks:
    """When parts began and ended: by the host's clock, or by events of the current stream."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.taken: list[tuple[Any, Any, str, str]] = []
        self.start = self.now()

    def now(self) -> Any:
        if self.xp is np:
            return perf_counter()
        event = self.xp.cuda.Event()
        event.record()
        return event

    @contextmanager
    def part(self, name: str, call: int) -> Iterator[None]:
        start = self.now()
        yield
        self.taken.append((start, self.now(), name, f"micro-batch {'ab'[call % 2]}"))

    def since_us(self, moment: Any) -> float:
        if self.xp is np:
            return float((moment - self.start) * 1e6)
        moment.synchronize()
        return float(self.xp.cuda.get_elapsed_time(self.start, moment) * 1e3)

    def bars(self) -> list[Bar]:
        """Return the parts. Local, blocking."""
        return [
            Bar(self.since_us(start), self.since_us(end), name, lane) for start, end, name, lane in self.taken
        ]


def measure(work: Overlap, time: Callable[[Overlap], Measured]) -> tuple[Measured, dict[str, Any]]:
    """Time the work in each order; return the overlapped one with the wrong rows of all, and a row's fields."""
    found = {}
    for order in ORDERS:
        work.order = order
        found[order] = time(work)
    overlapped, sequence, alone = (found[order] for order in ("overlapped", "in sequence", "communication"))
    counts = [one.wrong for one in found.values() if one.wrong is not None]
    saved = sequence.times.us_p50 - overlapped.times.us_p50
    return replace(overlapped, wrong=sum(counts) if counts else None), {
        "us_sequence_p50": sequence.times.us_p50,
        "us_communication_p50": alone.times.us_p50,
        "hidden_share": saved / alone.times.us_p50,
        "inner": work.inner,
    }
