"""High-throughput calls between nodes on the emulated machine: filled in as epcy/backends/nvshmem_nodes.pyx does."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulator.high_throughput import OP_COMBINE, OP_DISPATCH, Handle, Ranks, Result
from emulator.structs import C
from emulator.world import FLOATS, KIND_FP8, pointer
from epcy import reference


@dataclass
class NodesHandle(Handle):
    """A handle with what calls between nodes keep in it."""

    nodes: Any = None


class NodesRanks(Ranks):
    """Ranks on nodes, which reach other nodes by puts alone."""

    def __init__(
        self,
        num_ranks: int,
        *args: Any,
        ranks_per_node: int,
        path: str,
        num_slots: int = 2,
        chunk_tokens: int = 3,
        num_blocks: int = 2,
        **options: Any,
    ) -> None:
        self.per_node, self.path, self.num_blocks = ranks_per_node, path, num_blocks
        self.ranks_of = reference.ranks_by_node(num_ranks, ranks_per_node)
        groups = max(len(self.groups(rank)) for rank in range(num_ranks))
        super().__init__(num_ranks, *args, groups=(groups, num_slots, chunk_tokens), **options)

    def groups(self, rank: int) -> list[tuple[int, list[int]]]:
        """By group of a rank: whom it sends to, and all its ranks."""
        others = [ranks for ranks in self.ranks_of if rank not in ranks]
        if self.path == "direct":
            return [(r, [r]) for ranks in others for r in ranks]
        return [(ranks[rank % self.per_node], ranks) for ranks in others]

    def call(self, rank: int, op: int, header: int, ticket: int = 0) -> Any:
        c = C.epcy_nodes_call()
        c.peers = self.peers(rank, operation=op, ticket=ticket)
        near = self.ranks_of[rank // self.per_node]
        for r in range(self.R):
            c.map.name[r], c.map.pe[r], c.map.group_of[r] = self.memory[r].ctypes.data, r, -1
            if r not in near:
                c.peers.base[r] = 8  # nobody's
                c.peers.far |= 1 << r
        c.map.near_ranks, c.map.num_near = sum(1 << r for r in near), len(near)
        c.map.hierarchical = self.path == "hierarchical"
        for g, (peer, members) in enumerate(self.groups(rank)):
            c.map.peer[g], c.map.members[g] = peer, sum(1 << r for r in members)
            c.map.back[g] = [p for p, _ in self.groups(peer)].index(rank)
            for r in members:
                c.map.group_of[r] = g
        if self.path == "hierarchical":
            steps = [C_OWN if ranks == near else c.map.group_of[ranks[0]] for ranks in self.ranks_of]
        else:
            steps = [-2 - r if r in near else c.map.group_of[r] for r in range(self.R)]
        c.map.order[: len(steps)], c.map.num_steps = steps, len(steps)
        c.wire, c.num_blocks = self.nodes_wire, self.num_blocks
        c.wire.num_groups = len(self.groups(rank))
        c.header = header & 0xFFFFFFFF
        return c

    def make_nodes_handle(self, rank: int, T: int, layout: str, worst: int, alignment: int) -> NodesHandle:
        R, M, K, L = self.R, self.M, self.K, self.L
        plain = self.make_handle(rank, T, layout, worst, alignment, (1, 1, 0))
        if layout == "rank":
            plain.arrays["lane_row"] = self.array(rank, (T, K), np.int32)
            plain.routing.lane_row = pointer(plain.arrays["lane_row"])
        G, channels = self.nodes_wire.num_groups, self.nodes_wire.num_channels
        targets = self.per_node if self.path == "hierarchical" else 1
        shapes = {
            "ids": (R, M, K), "lane_rows": (R, M, K), "first": (R, M), "feed_rows": (G, M, targets), "own_list": (G, M),
            "own_order": (G, M), "own_count": (G, channels), "feed_list": (G, M), "feed_count": (G, channels),
            "tokens": (R,), "counts": (R, R), "lanes": (R, R * L),
        }  # fmt: skip
        nodes = C.epcy_nodes_routing()
        for name, shape in shapes.items():
            setattr(nodes, name, pointer(self.array(rank, shape, np.int32)))
        return NodesHandle(**{k: getattr(plain, k) for k in Handle.__dataclass_fields__}, nodes=nodes)

    def open_call(self, rank: int, c: Any, text: bytes | None = None) -> None:
        self.launch(rank, "epcy_nodes_launch_record", ctypes.byref(c), text)

    def dispatch(self, rank: int, x: Any, idx: Any = None, weights: Any = None, scales: Any = None, *,
                 layout: str = "rank", handle: Any = None, worst: int = 0, alignment: int = 1, which: int = 0,
                 has_weights: bool | None = None, waits: bool | None = None, header_xor: int = 0,
                 blocks: Any = None) -> Result:  # fmt: skip
        cached, T = handle is not None, len(x)
        kind = FLOATS.index(x.dtype) if x.dtype in FLOATS else KIND_FP8
        if handle is None:
            handle = self.make_nodes_handle(rank, T, layout, worst, alignment)
        layout, waits = handle.layout, (not cached and not handle.worst) if waits is None else waits
        has_weights = weights is not None if has_weights is None else has_weights
        self.tickets += 1
        ticket = self.tickets if waits else 0
        header = self.header(OP_DISPATCH, kind, handle, has_weights, cached) | (not cached) << 7 | which << 30
        header = (header | (C.EPCY_HEADER_WAITS if waits else 0)) ^ header_xor
        c = self.call(rank, OP_DISPATCH, header, ticket)
        c.routing, c.nodes = handle.routing, handle.nodes
        x, scales, weights = self.put(rank, x), self.put(rank, scales), self.put(rank, weights)
        c.x, c.num_tokens, c.row_bytes = pointer(x), T, self.H * x.dtype.itemsize
        c.x_stride_bytes, c.scales, c.topk_weights = c.row_bytes, pointer(scales), pointer(weights)
        c.num_scales = 0 if scales is None else -(-self.H // 128)
        c.parts = C.EPCY_NODES_WEIGHTS if has_weights else 0
        if not cached:
            idx = self.put(rank, idx)
            c.topk_idx, c.is_int64, c.lane_ids_out = (
                pointer(idx), idx.dtype == np.int64, pointer(handle.lane_ids))  # fmt: skip
            c.parts |= C.EPCY_NODES_IDS
        c.limit, c.fill_to = min(handle.worst or self.shape.num_rows, 2**31 - 1), handle.worst
        c.alignment = handle.alignment
        self.open_call(rank, c)
        self.launch(rank, "epcy_nodes_launch_" + ("await" if cached else "plan"), ctypes.byref(c))
        for step in ("dispatch", "end"):
            self.launch(rank, f"epcy_nodes_launch_{step}", ctypes.byref(c))
        at, rows = self.heap.receive[which], self.shape.num_rows
        lanes: tuple[int, ...] = (rows, self.K) if layout == "rank" else (rows,)

        def part(name: str, shape: tuple[int, ...], dtype: Any) -> Any:
            return self.keep_copy(rank, self.rows(rank, at, name, shape, dtype))

        return Result(
            part("payload", (rows, self.H), x.dtype),
            part("scales", (rows, c.num_scales), np.float32) if c.num_scales else None,
            part("topk_idx", lanes, np.int64), part("topk_weights", lanes, np.float32),
            self.keep_copy(rank, self.reports[rank]), handle, ticket,
        )  # fmt: skip

    def combine(self, rank: int, handle: Any, y: Any, weights: Any = None, bias: tuple[Any, ...] = (), *,
                which: int = 0, blocks: int = 2, staging: str = "area", has_weights: bool | None = None,
                own: tuple[int, int] = (0, 0)) -> tuple[Any, Any]:  # fmt: skip
        area, kind = self.heap.combine[which], FLOATS.index(y.dtype)
        by_rank, T = handle.layout == "rank", handle.num_tokens
        has_weights = weights is not None if has_weights is None else has_weights
        c = self.call(rank, OP_COMBINE, self.header(OP_COMBINE, kind, handle, has_weights, True))
        c.routing, c.nodes, c.num_tokens, c.dtype = handle.routing, handle.nodes, T, kind
        c.row_bytes = self.H * y.dtype.itemsize
        c.y_offset, c.weights_offset = area + self.area.payload, area + self.area.topk_weights
        place = self.rows(rank, area, "payload", y.shape, y.dtype)
        out, out_weights = self.array(rank, (T, self.H), y.dtype), None
        c.out, c.lane_ids = pointer(out), pointer(handle.lane_ids)
        for i, one in enumerate(bias):
            c.bias[i] = pointer(self.put(rank, one))
        y = self.put(rank, y)
        if by_rank:
            self.copy(rank, place, y)
            if staging != "area":
                c.own_rows, c.own_stride_bytes = pointer(y), c.row_bytes
            if has_weights:
                out_weights = self.array(rank, (T, self.K), np.float32)
                c.out_weights = pointer(out_weights)
                weights = self.put(rank, weights)
                self.copy(rank, self.rows(rank, area, "topk_weights", weights.shape, np.float32), weights)
        else:
            c.topk_weights, c.x, c.x_stride_bytes = pointer(self.put(rank, weights)), pointer(y), c.row_bytes
            c.parts = C.EPCY_NODES_WEIGHTS if has_weights else 0
            if staging == "over":
                self.copy(rank, place, y)
                c.x = pointer(place)
        self.open_call(rank, c)
        for step in ("await", *([] if by_rank else ["sums"]), "combine", "end"):
            self.launch(rank, f"epcy_nodes_launch_{step}", ctypes.byref(c))
        return self.keep_copy(rank, out), None if out_weights is None else self.keep_copy(rank, out_weights)

    def step(self, rank: int, header: int = 3, text: bytes | None = None, waits: bool = True) -> Any:
        self.tickets += 1
        ticket = self.tickets if waits else 0
        c = self.call(rank, header & 7, header, ticket)
        self.open_call(rank, c, text)
        for step in ("await", "end"):
            self.launch(rank, f"epcy_nodes_launch_{step}", ctypes.byref(c))
        return self.keep_copy(rank, self.reports[rank]), ticket

    def leave(self, rank: int) -> None:
        self.launch(rank, "epcy_nodes_launch_leave", ctypes.byref(self.call(rank, 0, 0)))

    def reset(self, rank: int, round: int) -> Any:
        self.tickets += 1
        c = self.call(rank, 0, 0, self.tickets)
        self.launch(
            rank, "epcy_nodes_launch_reset", ctypes.byref(c), ctypes.byref(self.wire), ctypes.c_uint32(round)
        )
        return self.keep_copy(rank, self.reports[rank]), self.tickets


C_OWN = -1  # EPCY_NODES_OWN_NODE
