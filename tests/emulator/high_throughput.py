"""Dispatch and combine on the emulated machine: structs filled in as epcy/backends/nvshmem.pyx does."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emulator.structs import C
from emulator.world import FLOATS, KIND_FP8, World, pointer

OP_DISPATCH, OP_COMBINE, OP_BARRIER = 1, 2, 3
CHUNKS = C.EPCY_MAX_CHUNKS


@dataclass
class Handle:
    layout: str
    alignment: int
    num_tokens: int
    worst: int
    number: int  # the same on all ranks
    blocks: tuple[int, int, int]  # for each other rank, for the own one, that only copy
    arrays: dict[str, Any]
    routing: Any

    @property
    def lane_ids(self) -> Any:
        return self.arrays["lane_ids"]


@dataclass
class Result:
    """What a call left behind, each a copy from when its kernel had ended."""

    payload: Any
    scales: Any
    topk_idx: Any
    topk_weights: Any
    report: Any
    handle: Handle
    ticket: int
    extra: dict[str, Any] = field(default_factory=dict)


class Ranks(World):
    """A World with the high-throughput calls."""

    tickets = 0
    calls = 0

    def header(self, op: int, kind: int, handle: Handle, weights: bool, routed: bool) -> int:
        h = op | kind << 3 | (handle.layout == "expert") << 6 | weights << 8 | (handle.alignment & 1023) << 9
        return h | (handle.number & 511 if routed else 0) << 19

    def make_handle(
        self, rank: int, T: int, layout: str, worst: int, alignment: int, blocks: tuple[int, int, int]
    ) -> Handle:
        R, K, L = self.R, self.K, self.L
        shapes: dict[str, Any] = {"num_recv": (2,), "experts": (L,), "lane_ids": (T, K), "list": (R, T)}
        shapes.update(pos=(T, R), chunk_count=(R, CHUNKS), chunk_base=(R, CHUNKS), recv_count=(R, CHUNKS))
        if layout == "expert":
            shapes.update(offsets=(L + 1,), lane_row=(T, K), fans=(R * self.M, K))
        long = ("num_recv", "experts", "lane_ids", "offsets")
        arrays = {k: self.array(rank, s, np.int64 if k in long else np.int32) for k, s in shapes.items()}
        routing = C.epcy_cuda_routing()
        for name, array in arrays.items():
            if name != "lane_ids":
                setattr(routing, name, pointer(array))
        routing.num_peer_chunks, routing.num_own_chunks = blocks[:2]
        return Handle(layout, alignment, T, worst, self.calls, blocks, arrays, routing)

    def rows(self, rank: int, at: int, part: str, shape: tuple[int, ...], dtype: Any) -> Any:
        begin = at + getattr(self.area, part)
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.memory[rank][begin : begin + nbytes].view(dtype).reshape(shape)

    def dispatch(
        self,
        rank: int,
        x: Any,
        idx: Any = None,
        weights: Any = None,
        scales: Any = None,
        *,
        layout: str = "rank",
        handle: Handle | None = None,
        worst: int = 0,
        alignment: int = 1,
        blocks: tuple[int, int, int] = (2, 2, 0),
        which: int = 0,
        has_weights: bool | None = None,
        waits: bool | None = None,
        header_xor: int = 0,
    ) -> Result:
        """Queue a dispatch; `handle`: a cached one."""
        cached = handle is not None
        T, kind = len(x), FLOATS.index(x.dtype) if x.dtype in FLOATS else KIND_FP8
        if handle is None:
            handle = self.make_handle(rank, T, layout, worst, alignment, blocks)
        layout, waits = handle.layout, (not cached and not handle.worst) if waits is None else waits
        has_weights = weights is not None if has_weights is None else has_weights
        d = C.epcy_cuda_dispatch()
        self.tickets += 1
        ticket = self.tickets if waits else 0
        d.peers, d.routing = self.peers(rank, operation=OP_DISPATCH, ticket=ticket), handle.routing
        x, scales, weights = self.put(rank, x), self.put(rank, scales), self.put(rank, weights)
        d.x, d.num_tokens, d.row_bytes = pointer(x), T, self.H * x.dtype.itemsize
        d.x_stride_bytes, d.scales, d.topk_weights = d.row_bytes, pointer(scales), pointer(weights)
        d.num_scales = 0 if scales is None else -(-self.H // 128)
        if cached:
            d.lane_ids, d.is_int64, d.cached = pointer(handle.lane_ids), 1, 1
        else:
            idx = self.put(rank, idx)
            d.topk_idx, d.is_int64, d.lane_ids_out = (
                pointer(idx),
                idx.dtype == np.int64,
                pointer(handle.lane_ids),
            )
        d.limit, d.fill_to = min(handle.worst or self.shape.num_rows, 2**31 - 1), handle.worst
        header = self.header(OP_DISPATCH, kind, handle, has_weights, cached) | cached << 7 | which << 30
        header = (header | (C.EPCY_HEADER_WAITS if waits else 0)) ^ header_xor
        d.header = ctypes.c_int32(header).value
        d.num_peer_blocks, d.num_own_blocks = blocks[:2]
        d.num_copy_blocks = blocks[2] if layout == "expert" else 0
        d.alignment = handle.alignment
        at, rows = self.heap.receive[which], self.shape.num_rows
        lanes: tuple[int, ...] = (rows, self.K) if layout == "rank" else (rows,)
        name = "epcy_cuda_launch_dispatch" + ("_expert" if layout == "expert" else "")
        self.launch(rank, name, ctypes.byref(d))

        def part(name: str, shape: tuple[int, ...], dtype: Any) -> Any:
            return self.keep_copy(rank, self.rows(rank, at, name, shape, dtype))

        return Result(
            part("payload", (rows, self.H), x.dtype),
            part("scales", (rows, d.num_scales), np.float32) if d.num_scales else None,
            part("topk_idx", lanes, np.int64),
            part("topk_weights", lanes, np.float32),
            self.keep_copy(rank, self.reports[rank]),
            handle,
            ticket,
        )

    def combine(
        self,
        rank: int,
        handle: Handle,
        y: Any,
        weights: Any = None,
        bias: tuple[Any, ...] = (),
        *,
        which: int = 0,
        blocks: int = 2,
        staging: str = "area",
        has_weights: bool | None = None,
        own: tuple[int, int] = (0, 0),
    ) -> tuple[Any, Any]:
        """Queue a combine.

        Rank layout: `staging` is "area" (as from combine_input), "kernel" (copied by the staging kernel) or "engine"
        (rows but the `own` = (base, count) ones are copied); the last two leave this rank's own rows apart.
        Expert layout: "area" puts sums beside the rows, "over" over them.
        """
        c = C.epcy_cuda_combine()
        by_rank, T = handle.layout == "rank", handle.num_tokens
        area, kind = self.heap.combine[which], FLOATS.index(y.dtype)
        c.peers, c.routing = self.peers(rank, operation=OP_COMBINE), handle.routing
        c.pos, c.num_tokens, c.dtype = handle.routing.pos, T, kind
        c.row_bytes = self.H * y.dtype.itemsize
        c.y_offset, c.weights_offset = area + self.area.payload, area + self.area.topk_weights
        has_weights = weights is not None if has_weights is None else has_weights
        c.header = ctypes.c_int32(self.header(OP_COMBINE, kind, handle, has_weights, True)).value
        place = self.rows(rank, area, "payload", y.shape, y.dtype)
        out = self.array(rank, (T, self.H), y.dtype)
        out_weights = None
        c.out = pointer(out)
        for i, one in enumerate(bias):
            c.bias[i] = pointer(self.put(rank, one))
        if by_rank:
            y = self.put(rank, y)
            if staging == "area":
                self.copy(rank, place, y)
            else:
                c.own_rows, c.own_stride_bytes = pointer(y), c.row_bytes
            if staging == "engine":
                self.copy(rank, place[: own[0]], y[: own[0]])
                self.copy(rank, place[sum(own) :], y[sum(own) :])
            elif staging == "kernel":
                g = C.epcy_cuda_staging()
                setattr(g, "from", pointer(y))
                g.to, g.num_recv = pointer(place), handle.routing.num_recv
                g.own_base = handle.routing.chunk_base + rank * CHUNKS * 4
                g.own_count = handle.routing.chunk_count + rank * CHUNKS * 4
                g.num_rows, g.row_bytes, g.stride_bytes = len(y), c.row_bytes, c.row_bytes
                self.launch(rank, "epcy_cuda_launch_staging", ctypes.byref(g), 2)
            if has_weights:
                out_weights = self.array(rank, (T, self.K), np.float32)
                c.out_weights, c.lane_ids = pointer(out_weights), pointer(handle.lane_ids)
                weights = self.put(rank, weights)
                self.copy(rank, self.rows(rank, area, "topk_weights", weights.shape, np.float32), weights)
        else:
            c.lane_ids = pointer(handle.lane_ids)
            c.topk_weights = pointer(self.put(rank, weights))
            if staging == "area":
                c.x = pointer(self.put(rank, y))
            else:
                self.copy(rank, place, self.put(rank, y))
                c.x = pointer(place)
            c.x_stride_bytes = c.row_bytes
        name = "epcy_cuda_launch_combine" + ("" if by_rank else "_expert")
        self.launch(rank, name, ctypes.byref(c), blocks)
        return self.keep_copy(rank, out), None if out_weights is None else self.keep_copy(rank, out_weights)

    def step(self, rank: int, header: int = OP_BARRIER, text: bytes | None = None, waits: bool = True) -> Any:
        """Queue a call that moves nothing; returns (report, ticket)."""
        self.tickets += 1
        ticket = self.tickets if waits else 0
        peers = self.peers(rank, operation=header & 7, ticket=ticket)
        self.launch(rank, "epcy_cuda_launch_step", ctypes.byref(peers), ctypes.c_uint32(header), text)
        return self.keep_copy(rank, self.reports[rank]), ticket

    def refuse(self, rank: int, op: int, text: str) -> Any:
        return self.step(rank, op | C.EPCY_HEADER_REFUSED, text.encode(), waits=False)

    def reset(self, rank: int, round: int) -> Any:
        self.tickets += 1
        peers = self.peers(rank, operation=0, ticket=self.tickets)
        self.launch(
            rank,
            "epcy_cuda_launch_reset",
            ctypes.byref(peers),
            ctypes.byref(self.wire),
            ctypes.c_uint32(round),
        )
        return self.keep_copy(rank, self.reports[rank]), self.tickets

    def verdicts(self, rank: int, raw: Any, ticket: int) -> list[int]:
        """What the host that waited with `ticket` was told for each destination; -1 for nothing."""
        words = list(self.report(rank, raw).verdict[: self.R])
        return [w & 0xFFFFFFFF if w >> 32 == ticket else -1 for w in words]
