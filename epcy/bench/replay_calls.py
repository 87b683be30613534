"""One recorded call made again: its arrays, the call itself, and whether what came is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import epcy
from epcy import reference
from epcy.bench.replay_values import Values
from epcy.recording import Call
from epcy.recording.calls import Array

__all__ = ["Player"]


class Player:
    """Makes the calls of one Buffer of a recording, on this rank."""

    def __init__(self, buf: Any, values: Values) -> None:
        self.buf, self.values, self.rank = buf, values, buf.rank
        self.results: dict[int, Any] = {}  # what calls returned, by their number
        self.outputs: dict[int, Any] = {}  # of low-latency combines that are only sent

    def prepare(self, number: int) -> Callable[[], Any]:
        """Make the arrays of a call; return what makes the call. Local; the call is collective."""
        call = self.values.recording.calls[number]
        make: Callable[[int, Call, dict[str, Any]], Callable[[], Any]] = getattr(self, f"_{call.op}")
        return make(number, call, call.args[self.rank])

    def verify(self, number: int, result: Any) -> int:
        """Count the rows that are not what they should be. Local, blocking."""
        call = self.values.recording.calls[number]
        self.results[number] = result
        if call.op == "hook":
            assert call.refers is not None  # noqa: S101  # checked when it was read
            number = call.refers
            call = self.values.recording.calls[number]
            result = self.results[number]
        elif call.args[self.rank].get("has_hook"):
            return 0  # not received yet
        if call.op == "dispatch":
            return self._wrong_dispatch(number, result)
        if call.op == "low_latency_dispatch":
            return self._wrong_low_latency(number, call, result)
        if call.op == "barrier" or self._clipped(number):
            return 0
        combined = result.combined_x if call.op == "combine" else result[0]
        return self._differ(combined, self.values.sum_of(number, self.rank))

    def forget(self, number: int) -> None:
        """Drop what no later call refers to."""
        self.results.pop(number, None)

    # ---- the calls

    def _on_device(self, array: Any) -> Any:
        return array if self.buf.xp is np else self.buf.xp.asarray(array)

    def _handle(self, number: int | None) -> Any:
        if number is None:
            return None
        result = self.results[number]
        return result[2] if isinstance(result, tuple) else result.handle

    def _x(self, number: int) -> Any:
        parts = tuple(map(self._on_device, self.values.sent(number, self.rank)))
        return parts if len(parts) > 1 else parts[0]

    def _weights(self, number: int, call: Call, num_rows: int) -> Any:
        if not call.args[self.rank]["has_weights"]:
            return None
        return self._on_device(self.values.weights(number, self.rank, num_rows))

    def _dispatch(self, number: int, call: Call, args: dict[str, Any]) -> Callable[[], Any]:
        x, handle = self._x(number), self._handle(call.refers)
        num_tokens = max(call.num_tokens[self.rank], 0)
        weights = self._weights(number, call, num_tokens)
        options = {name: args.get(name) for name in ("layout", "expert_alignment", "num_sms")}
        out = True if args["own_output"] else None
        if handle is not None:
            return lambda: self.buf.dispatch(
                x, None, weights, handle=handle, num_sms=args.get("num_sms"), out=out
            )
        idx = self._on_device(self.values.idx_of(number)[self.rank])
        worst = args["num_worst_tokens"]
        return lambda: self.buf.dispatch(x, idx, weights, num_worst_tokens=worst, out=out, **options)

    def _combine(self, number: int, call: Call, args: dict[str, Any]) -> Callable[[], Any]:
        handle = self._handle(call.refers)
        y = self._on_device(self.values.returned(number, self.rank, np.arange(handle.num_rows)))
        by_rank = handle.layout == "rank"
        weights = self._weights(number, call, handle.num_rows if by_rank else handle.num_tokens)
        bias = tuple(map(self._on_device, self.values.bias(number, self.rank))) or None
        return lambda: self.buf.combine(y, handle, weights, bias=bias, num_sms=args.get("num_sms"))

    def _low_latency_dispatch(self, number: int, call: Call, args: dict[str, Any]) -> Callable[[], Any]:
        x, idx = self._x(number), self._on_device(self.values.idx_of(number)[self.rank])
        weights = self._weights(number, call, max(call.num_tokens[self.rank], 0))
        casts = {name: args[name] for name in ("use_fp8", "round_scale", "use_ue8m0")}
        return lambda: self.buf.low_latency_dispatch(
            x, idx, weights, return_recv_hook=args["has_hook"], **casts
        )

    def _low_latency_combine(self, number: int, call: Call, args: dict[str, Any]) -> Callable[[], Any]:
        handle = self._handle(call.refers)
        slots, hidden = handle.num_rows, self.buf.options["hidden"]
        flat = self.values.returned(number, self.rank, np.arange(slots))
        y = self._on_device(flat.reshape(self.buf.num_local_experts, -1, hidden))
        if args["zero_copy"]:
            area = self.buf.low_latency_combine_input(handle, y.dtype)
            area[...] = y
            y = area
        weights = self._weights(number, call, handle.num_tokens)
        ways = {name: args[name] for name in ("reduction", "zero_copy", "use_logfmt")}
        return lambda: self.buf.low_latency_combine(
            y, None, weights, handle, return_recv_hook=args["has_hook"], **ways
        )

    def _hook(self, number: int, call: Call, args: dict[str, Any]) -> Callable[[], Any]:
        assert call.refers is not None  # noqa: S101  # checked when it was read
        hook: Callable[[], Any] | None = self.results[call.refers][-1]
        if hook is None:
            raise epcy.ArgumentError(f"call {number}: a hook of call {call.refers}, which has none")
        return hook

    def _barrier(self, number: int, call: Call, args: dict[str, Any]) -> Callable[[], Any]:
        barrier: Callable[[], Any] = self.buf.barrier
        return barrier

    # ---- what came

    def _clipped(self, number: int) -> bool:
        routing = self.values.routing(self.values.root(number))
        return any(routing.overflow(rank) for rank in range(routing.num_ranks))

    def _differ(self, got: Any, want: Array) -> int:
        got = np.ascontiguousarray(got if self.buf.xp is np else got.get())
        unsigned = f"u{want.dtype.itemsize}"
        if got.shape != want.shape or got.dtype.itemsize != want.dtype.itemsize:
            return max(len(want), 1)
        return int((got.view(unsigned) != np.ascontiguousarray(want).view(unsigned)).any(-1).sum())

    def _wrong_rows(self, number: int, parts: list[Any], cast: Callable[..., tuple[Array, ...]]) -> int:
        """Compare recv_x (N, H) with what all ranks sent."""
        routing = self.values.routing(self.values.root(number))
        wrong = 0
        for source in range(routing.num_ranks):
            tokens, rows = routing.rows_at(source, self.rank)
            for got, want in zip(parts, cast(*self.values.sent(number, source, tokens)), strict=True):
                bits = got.view(f"u{got.dtype.itemsize}")  # not every CuPy takes rows of bfloat16
                wrong += self._differ(bits[self._on_device(rows)], want)
        return wrong

    def _wrong_dispatch(self, number: int, result: Any) -> int:
        if self._clipped(number):
            return 0
        parts = list(result.recv_x) if isinstance(result.recv_x, tuple) else [result.recv_x]
        routing = self.values.routing(self.values.root(number))
        wrong = int(int(result.handle.num_recv_tokens) != routing.num_recv_tokens[self.rank])
        return wrong + self._wrong_rows(number, parts, lambda *sent: sent)

    def _wrong_low_latency(self, number: int, call: Call, result: Any) -> int:
        args, x, count = call.args[self.rank], result[0], result[1]
        parts = [part.reshape(-1, part.shape[-1]) for part in (x if isinstance(x, tuple) else (x,))]

        def cast(*sent: Array) -> tuple[Array, ...]:
            if not args["use_fp8"]:
                return sent
            return reference.cast_to_fp8(
                sent[0], round_scale=args["round_scale"], use_ue8m0=args["use_ue8m0"]
            )

        expected = self.values.routing(number).num_tokens_per_expert[self.rank]
        wrong = int((np.asarray(count if self.buf.xp is np else count.get()) != expected).sum())
        return wrong + self._wrong_rows(number, parts, cast)
