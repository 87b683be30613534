"""The calls that works.py times, said alike for high throughput, low latency and the CuPy baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import epcy
from epcy.bench.datasets import Received


@dataclass
class Slot:
    """Arrays that calls read: what a graph captured stays, and data sets are copied into it."""

    x: tuple[Any, ...]
    topk_idx: Any
    topk_weights: Any

    @property
    def payload(self) -> Any:
        """Return x as a dispatch takes it."""
        return self.x if len(self.x) > 1 else self.x[0]


class Calls(Protocol):
    """Dispatch and combine of something that moves rows."""

    def dispatch(self, slot: Slot, handle: Any = None) -> Any:
        """Collective: send a slot's tokens, by a known routing where a handle is given; return what came."""

    def combine(self, y: Any, handle: Any, slot: Slot, out: Any) -> Any:
        """Collective: bring rows back; return (T, H)."""

    def handle(self, result: Any) -> Any:
        """Return the handle of a dispatch."""

    def look(self, result: Any, known: bool) -> Received:
        """Return what a dispatch brought; `known`: by a handle, without ids and weights. Local."""

    def rows(self, result: Any) -> Any:
        """Return recv_x, to be given back as it is. Local."""

    def output(self, handle: Any) -> Any:
        """Return memory of the library's for the experts' output. Local."""

    def output_shape(self, handle: Any) -> tuple[int, ...]:
        """Return the shape of what combine takes. Local."""


def parts_of(x: Any) -> list[Any]:
    return list(x) if isinstance(x, tuple) else [x]


class HighThroughput:
    """``Buffer.dispatch`` and ``Buffer.combine``."""

    def __init__(self, buf: epcy.Buffer, layout: str, alignment: int, num_worst_tokens: int) -> None:
        self.buf, self.layout, self.num_worst_tokens = buf, layout, num_worst_tokens
        self.alignment = alignment if layout == "expert" else None

    def dispatch(self, slot: Slot, handle: Any = None) -> Any:
        if handle is not None:
            return self.buf.dispatch(slot.payload, handle=handle)
        return self.buf.dispatch(
            slot.payload,
            slot.topk_idx,
            slot.topk_weights,
            layout=self.layout,
            expert_alignment=self.alignment,
            num_worst_tokens=self.num_worst_tokens,
        )

    def combine(self, y: Any, handle: Any, slot: Slot, out: Any) -> Any:
        weights = slot.topk_weights if self.layout == "expert" else None
        return self.buf.combine(y, handle, weights, out=out).combined_x

    def handle(self, result: Any) -> Any:
        return result.handle

    def look(self, result: Any, known: bool) -> Received:
        parts, count = parts_of(result.recv_x), result.handle.num_recv_tokens
        if known:
            return Received(parts, None, counts=count)
        return Received(parts, None, result.recv_topk_idx, result.recv_topk_weights, count)

    def rows(self, result: Any) -> Any:
        return result.recv_x

    def output(self, handle: Any) -> Any:
        return self.buf.combine_input(handle)

    def output_shape(self, handle: Any) -> tuple[int, ...]:
        return int(handle.num_rows), self.buf.options["hidden"]


class LowLatency:
    """``Buffer.low_latency_dispatch`` and ``Buffer.low_latency_combine``; the weights travel with the dispatch."""

    def __init__(self, buf: Any, casts: dict[str, bool], ways: dict[str, Any]) -> None:
        """`casts` and `ways`: what every dispatch and every combine is given."""
        self.buf, self.casts, self.ways = buf, casts, ways

    def dispatch(self, slot: Slot, handle: Any = None, *, return_recv_hook: bool = False) -> Any:
        return self.buf.low_latency_dispatch(
            slot.x[0], slot.topk_idx, slot.topk_weights, return_recv_hook=return_recv_hook, **self.casts
        )

    def combine(self, y: Any, handle: Any, slot: Slot, out: Any) -> Any:
        return self.buf.low_latency_combine(y, slot.topk_idx, None, handle, out=out, **self.ways)[0]

    def send_back(self, y: Any, handle: Any, out: Any) -> Any:
        """Begin a combine into `out`; return its hook. Collective."""
        return self.buf.low_latency_combine(
            y, None, None, handle, out=out, return_recv_hook=True, **self.ways
        )[2]

    def handle(self, result: Any) -> Any:
        return result[2]

    def look(self, result: Any, known: bool) -> Received:
        flat = [part.reshape(-1, part.shape[-1]) for part in parts_of(result[0])]
        return Received(flat, None, counts=result[1])

    def rows(self, result: Any) -> Any:
        return result[0]

    def output(self, handle: Any) -> Any:
        return self.buf.low_latency_combine_input(handle)

    def output_shape(self, handle: Any) -> tuple[int, ...]:
        options = self.buf.options
        slots = self.buf.size * options["num_max_low_latency_tokens_per_rank"]
        return self.buf.num_local_experts, slots, options["hidden"]
