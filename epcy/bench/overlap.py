"""The case overlap: two micro-batches, each one's calls under way while the other one's products run.

A step is as many layers as `num_calls` / 2, and a layer of a micro-batch is a dense product, a dispatch, the experts'
two products, a combine (examples/double_batch.py says the order). The products multiply arrays of their own, of as
many rows as come on the average, so that what the calls move is compared as in any other case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from epcy.bench.calls import LowLatency
from epcy.bench.clocks import Measured
from epcy.bench.datasets import DataSet
from epcy.bench.works import Roundtrip

ORDERS = ("in sequence", "communication", "overlapped")


class Overlap(Roundtrip):
    """Low-latency calls and products in one of ORDERS; every row of the last two calls is compared."""

    calls: LowLatency

    def __init__(self, calls: Any, sets: list[list[DataSet]], *, inner: int, **how: Any) -> None:
        super().__init__(calls, sets, **how)
        self.order, self.inner = ORDERS[0], inner
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
                self._dense()
            result = self.calls.dispatch(self.slots[number])
            if multiplies:
                self._experts()
            handle = self.calls.handle(result)
            self.combine(call, number, self.y(handle), handle)
            self.results.append((number, result))

    def _overlapped(self) -> None:
        hooks: dict[int, Any] = {}
        for first in range(0, self.num_calls, 2):
            pair = (first, first + 1)
            for call in pair:
                if call - 2 in hooks:
                    hooks.pop(call - 2)()
                self._dense()
                number = call % len(self.slots)
                self.results.append((number, self.calls.dispatch(self.slots[number], return_recv_hook=True)))
            for call in pair:
                number, result = self.results[call]
                result[4]()
                self._experts()
                handle, out = self.calls.handle(result), self.outs[call % 2]
                hooks[call] = self.calls.send_back(self.y(handle), handle, out)
                self.sums.append((number, out))
        for hook in hooks.values():
            hook()

    def _dense(self) -> None:
        self.xp.matmul(self.tokens, self.dense, out=self.h)

    def _experts(self) -> None:
        self.xp.matmul(self.rows, self.up, out=self.between)
        self.xp.matmul(self.between, self.down, out=self.back)


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
