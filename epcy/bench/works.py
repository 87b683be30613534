"""What is timed, one class a case: it loads a data set, makes the calls, and counts the rows that came out wrong.

A work owns the arrays that its calls read (slots). `load` copies a generation of data sets into them, `issue` makes
`num_calls` calls that take the slots in turn, eagerly or inside a graph capture. Neighbouring calls and neighbouring
generations never have the same data, so what an earlier call left behind is not taken for a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from epcy.bench import draws
from epcy.bench.calls import Calls, Slot
from epcy.bench.datasets import COMBINED, DataSet, Received
from epcy.bench.workload import DTYPES

Capture = Callable[[Callable[[], object]], Any]  # records what the calls launch; gives a graph with launch()


class Dispatch:
    """Time dispatch; every row of the last two calls is compared."""

    def __init__(
        self,
        calls: Calls,
        sets: list[list[DataSet]],
        *,
        num_calls: int = 1,
        known: bool = False,
        from_heap: bool = False,
        gives_back: bool = False,
    ) -> None:
        """`known`: by a handle; the experts' output lies in the library's memory (`from_heap`) or in an array, or is
        what dispatch brought (`gives_back`)."""
        self.calls, self.sets, self.num_calls = calls, sets, num_calls
        self.known, self.from_heap, self.gives_back = known, from_heap, gives_back
        self.setting = sets[0][0].setting
        self.xp, self.num_generations, self.generation = self.setting.xp, len(sets), 0
        self.slots = [
            Slot(tuple(part.copy() for part in one.x), one.topk_idx.copy(), one.topk_weights.copy())
            for one in sets[0]
        ]
        self.handles: list[Any] = [None] * len(self.slots)
        self.results: list[tuple[int, Any]] = []
        self.got: list[tuple[int, Received]] = []

    def open(self, capture: Capture | None) -> None:
        """Make what all runs share; `capture` is given where `issue` will be captured. Collective."""
        if self.known:
            self.handles = [self.calls.handle(self.calls.dispatch(slot)) for slot in self.slots]

    def load(self, generation: int) -> None:
        """Put a generation's data where the calls read it. Collective: calls that are not timed may be made."""
        self.generation = generation
        for slot, data in zip(self.slots, self.sets[generation], strict=True):
            for into, part in zip(
                (*slot.x, slot.topk_idx, slot.topk_weights),
                (*data.x, data.topk_idx, data.topk_weights),
                strict=True,
            ):
                draws.copy_into(self.xp, into, part)

    def issue(self) -> None:
        """Make the calls. Collective."""
        self.results = []
        for call in range(self.num_calls):
            number = call % len(self.slots)
            result = self.calls.dispatch(self.slots[number], self.handles[number])
            self.results.append((number, result))

    def collect(self) -> None:
        """Keep the results that still live when all calls are over. Local."""
        self.got = [(number, self.calls.look(result, self.known)) for number, result in self.results[-2:]]

    def wrong(self) -> int:
        """Count the rows that differ from what must have come. Local, blocking."""
        data = self.sets[self.generation]
        return sum(wrong_rows(self.xp, got, data[number].received) for number, got in self.got)


class _WithOutput(Dispatch):
    """The experts' output, in memory of the library's or in an array, and the sums of the last two calls."""

    def __init__(self, calls: Calls, sets: list[list[DataSet]], **how: Any) -> None:
        super().__init__(calls, sets, **how)
        shape = self.setting.shape
        self.dtype = DTYPES[COMBINED[shape.dtype]]
        self.outs = [self.xp.empty((shape.num_tokens, shape.hidden), self.dtype) for _ in range(2)]
        self.areas: dict[int, Any] = {}  # by address
        self.array: Any = None
        self.sums: list[tuple[int, Any]] = []
        self.drawn: dict[int, tuple[Any, Any]] = {}
        self.most_rows = max(data.num_rows for of_generation in sets for data in of_generation)

    def y(self, handle: Any) -> Any:
        """Return memory for the output of the experts that work for `handle`, in the shape that combine takes."""
        if self.from_heap:
            area = self.calls.output(handle)
            self.areas[draws.address_of(area)] = area
            return area
        shape = self.calls.output_shape(handle)
        rows = math.prod(shape[:-1])
        if self.array is None or len(self.array) < rows:
            self.take_array(max(rows, self.most_rows))
        return self.array[:rows].reshape(shape)

    def take_array(self, rows: int) -> None:
        """Have the array that the experts' output lies in, before the first call asks for it. Local."""
        self.array = self.xp.zeros((rows, self.setting.shape.hidden), self.dtype)

    def fill(self, *arrays: Any) -> None:
        """Write the generation's output, the rows that hold a token alone."""
        if self.generation not in self.drawn:
            rows = np.unique(np.concatenate([data.rows_here for data in self.sets[self.generation]]))
            first = self.sets[self.generation][0]
            here = self.xp.asarray(rows)
            self.drawn[self.generation] = here, draws.words(self.xp, first.output(self.setting.rank, here))
        rows, values = self.drawn[self.generation]
        for array in arrays:
            draws.words(self.xp, array.reshape(-1, array.shape[-1]))[rows] = values

    def spoil_outs(self) -> None:
        for out in self.outs:
            draws.words(self.xp, out)[...] = 0xFF

    def combine(self, call: int, number: int, y: Any, handle: Any) -> None:
        out = self.calls.combine(y, handle, self.slots[number], self.outs[call % 2])
        self.sums.append((number, out))

    def wrong_sums(self, of_tokens: bool) -> int:
        data = self.sets[self.generation]
        wrong = 0
        for number, out in self.sums[-2:]:
            expected = data[number].sum_of_tokens if of_tokens else data[number].sum_of_output
            wrong += int(draws.differ(self.xp, out, expected).sum())
        return wrong


class Combine(_WithOutput):
    """Time combine alone, on a routing made by an untimed dispatch of the same run."""

    def open(self, capture: Capture | None) -> None:
        self.dispatched: Any = None
        self.graph: Any = None
        self.ready: Any = None
        if capture is not None:
            self._dispatch()  # once without a capture: memory pools are warm then
            self.graph = capture(self._dispatch)

    def _dispatch(self) -> None:
        self.dispatched = self.calls.dispatch(self.slots[0])

    def load(self, generation: int) -> None:
        super().load(generation)
        self.spoil_outs()
        if self.graph is not None:
            self.graph.launch()
        else:
            self._dispatch()
        if self.graph is None and self.num_calls == 1:
            self.ready = self.y(self.calls.handle(self.dispatched))
            self.fill(self.ready)
        else:
            self.fill(
                *(self.areas.values() if self.from_heap else [self.y(self.calls.handle(self.dispatched))])
            )

    def issue(self) -> None:
        self.sums = []
        handle = self.calls.handle(self.dispatched)
        for call in range(self.num_calls):
            y = self.y(handle) if self.ready is None else self.ready
            self.combine(call, 0, y, handle)

    def collect(self) -> None:
        pass

    def wrong(self) -> int:
        return self.wrong_sums(of_tokens=False)


class Roundtrip(_WithOutput):
    """Time dispatch and combine after one another; the experts give rows back as they came, or wrote theirs before."""

    def load(self, generation: int) -> None:
        super().load(generation)
        self.spoil_outs()
        self.fill(*self.areas.values(), *([] if self.array is None else [self.array]))

    def issue(self) -> None:
        self.results, self.sums = [], []
        for call in range(self.num_calls):
            number = call % len(self.slots)
            result = self.calls.dispatch(self.slots[number], self.handles[number])
            handle = self.calls.handle(result)
            y = self.calls.rows(result) if self.gives_back else self.y(handle)
            self.combine(call, number, y, handle)
            self.results.append((number, result))

    def wrong(self) -> int:
        return super().wrong() + self.wrong_sums(of_tokens=self.gives_back)


WORKS = {"dispatch": Dispatch, "combine": Combine, "roundtrip": Roundtrip}


def wrong_rows(xp: Any, got: Received, expected: Received) -> int:
    """Count the rows of a dispatch that are wrong; a wrong count of rows is at least one."""
    num_rows = len(expected.parts[0])
    wrong = xp.zeros(num_rows, np.bool_)
    pairs = list(zip(got.parts, expected.parts, strict=True))
    if got.topk_idx is not None:
        pairs += [(got.topk_idx, expected.topk_idx), (got.topk_weights, expected.topk_weights)]
    for one, other in pairs:
        if expected.where is not None:
            one = draws.take(xp, one, expected.where)
        if len(one) < num_rows:
            return max(num_rows, 1)
        wrong |= draws.differ(xp, one[:num_rows], other)
    miscounted = 0
    # Worst case: the rest says that it holds nothing.
    if got.topk_idx is not None and len(got.topk_idx) > num_rows:
        miscounted += int((got.topk_idx[num_rows:] != -1).any())
    if expected.counts is not None:
        miscounted += int((got.counts != expected.counts).sum())
    elif got.counts is not None:
        miscounted += int(int(got.counts) != num_rows)
    return int(wrong.sum()) + miscounted
