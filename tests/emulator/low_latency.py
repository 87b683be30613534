"""Low-latency calls on the emulated machine, by the launchers of include/epcy/low_latency.h alone."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulator.structs import C
from emulator.world import FLOATS, World, pointer

OP_DISPATCH, OP_COMBINE = 5, 6
SEND, RECEIVE = C.EPCY_LOW_LATENCY_SEND, C.EPCY_LOW_LATENCY_RECEIVE
BOTH = SEND | RECEIVE


def ranks_of(bits: int) -> tuple[int, ...]:
    return tuple(r for r in range(32) if bits >> r & 1)


@dataclass
class Received:
    recv_x: Any
    scales: Any
    count: Any


class LowLatencyRanks(World):
    """A World with the low-latency calls; results are what lies in their arrays after `run`."""

    def __init__(self, *args: Any, ranks_per_node: int | None = None, **options: Any) -> None:
        """`ranks_per_node`: ranks of other nodes are far, and reached by puts; None: nobody is."""
        options.setdefault("num_rows", 16)
        R, per_node = args[0], ranks_per_node or args[0]
        node = [r // per_node for r in range(R)]
        self.far = [sum(1 << q for q in range(R) if node[q] != node[r]) for r in range(R)]
        num_far = max(mask.bit_count() for mask in self.far)
        self.goes_on = options.pop("goes_on", False)
        super().__init__(*args, low_latency=True, num_far=num_far, **options)

    def make_handle(self, rank: int) -> Any:
        """A handle's memory, full of nonsense, with its arrays."""
        handle = C.epcy_low_latency_handle()
        nbytes = self.lib.emulated_handle(ctypes.byref(self.shape), None, ctypes.byref(handle))
        memory = self.array(rank, nbytes, np.uint8)
        base = ctypes.c_void_p(memory.ctypes.data)
        self.lib.emulated_handle(ctypes.byref(self.shape), base, ctypes.byref(handle))
        return handle

    def fill(
        self,
        call: Any,
        rank: int,
        handle: Any,
        slot: int,
        header: int,
        *,
        phases: int,
        T: int,
        kind: int,
        row_bytes: int,
        blocks: int,
    ) -> None:
        call.peers = self.mirrored(rank, header & 7)
        call.peers.goes_on = self.goes_on
        call.wire, call.handle, call.sent = self.wire, handle, handle.sent + 4 * slot
        call.header, call.phases, call.num_tokens, call.dtype = header, phases, T, kind
        call.max_blocks = blocks
        self.lib.emulated_complete(ctypes.byref(call), ctypes.c_int64(row_bytes))

    def dispatch(
        self,
        rank: int,
        handle: Any,
        x: Any,
        idx: Any,
        weights: Any = None,
        *,
        phases: int = BOTH,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        stats: Any = None,
        blocks: int = 3,
        into: Received | None = None,
    ) -> Received:
        rows, group = self.R * self.M, 512 if use_ue8m0 else 128
        if into is None:
            scales = (self.L, rows, self.H // group), np.int32 if use_ue8m0 else np.float32
            into = Received(
                self.array(rank, (self.L, rows, self.H), np.uint8 if use_fp8 else x.dtype),
                self.array(rank, *scales) if use_fp8 else None,
                self.array(rank, self.L, np.int64),
            )
        kind = FLOATS.index(x.dtype)
        header = OP_DISPATCH | kind << 3 | (weights is not None) * C.EPCY_LOW_LATENCY_WEIGHTS
        header |= use_fp8 * C.EPCY_LOW_LATENCY_FP8 | use_ue8m0 * C.EPCY_LOW_LATENCY_UE8M0
        header |= round_scale * C.EPCY_LOW_LATENCY_ROUND_SCALE
        d = C.epcy_low_latency_dispatch()
        x, idx, weights = self.put(rank, x), self.put(rank, idx), self.put(rank, weights)
        row_bytes = self.H if use_fp8 else self.H * x.dtype.itemsize
        self.fill(d.call, rank, handle, 0, header, phases=phases, T=len(x), kind=kind, row_bytes=row_bytes,
                  blocks=blocks)  # fmt: skip
        d.x, d.x_stride_bytes = pointer(x), self.H * x.dtype.itemsize
        d.topk_idx, d.is_int64, d.topk_weights = pointer(idx), idx.dtype == np.int64, pointer(weights)
        d.recv_x, d.recv_scales, d.recv_count = (
            pointer(into.recv_x),
            pointer(into.scales),
            pointer(into.count),
        )
        d.stats, d.stats_is_int64 = pointer(stats), stats is not None and stats.dtype == np.int64
        if use_fp8:
            d.num_scales, d.part_scales = self.H // group, C.EPCY_PART_BYTES // group
        self.carry(rank, d, 0)
        return into

    def combine(
        self,
        rank: int,
        handle: Any,
        y: Any,
        T: int,
        weights: Any = None,
        *,
        phases: int = BOTH,
        by_source: bool = False,
        use_logfmt: bool = False,
        renormalize: bool = False,
        slot: int = 1,
        blocks: int = 3,
        out: Any = None,
    ) -> Any:
        if out is None:
            out = self.array(rank, (T, self.H), y.dtype)
        kind = FLOATS.index(y.dtype)
        header = OP_COMBINE | kind << 3 | (weights is not None) * C.EPCY_LOW_LATENCY_WEIGHTS
        header |= by_source * C.EPCY_LOW_LATENCY_SOURCE | use_logfmt * C.EPCY_LOW_LATENCY_LOGFMT
        if renormalize:
            header |= C.EPCY_LOW_LATENCY_RENORMALIZE | (not by_source) * C.EPCY_LOW_LATENCY_WEIGHTS
        c = C.epcy_low_latency_combine()
        y, weights = self.put(rank, y), self.put(rank, weights)
        self.fill(c.call, rank, handle, slot, header, phases=phases, T=T, kind=kind,
                  row_bytes=self.H * y.dtype.itemsize, blocks=blocks)  # fmt: skip
        c.x, c.topk_weights, c.out = pointer(y), pointer(weights), pointer(out)
        self.carry(rank, c, 1)
        return out

    def refuse(self, rank: int, kind: int, text: bytes = b"no") -> None:
        """Queue this rank's part of a call that it refuses."""
        op = OP_DISPATCH if kind == C.EPCY_LOW_LATENCY_DISPATCH else OP_COMBINE
        peers = self.mirrored(rank, op)
        self.launch(rank, "epcy_cuda_launch_low_latency_refusal", ctypes.byref(peers), ctypes.byref(self.wire),
                    kind, ctypes.c_uint32(op), text)  # fmt: skip
        if self.far[rank]:
            call = C.epcy_low_latency_call()
            call.peers, call.wire, call.header = peers, self.wire, op | C.EPCY_HEADER_REFUSED
            self.lib.emulated_complete(ctypes.byref(call), ctypes.c_int64(self.shape.row_bytes))
            self.launch_put(rank, call, kind, "send")
            self.launch_put(rank, call, kind, "acknowledge")

    # ---- far ranks, as epcy/backends/nvshmem_put.pyx does it

    def mirrored(self, rank: int, operation: int) -> Any:
        peers = self.peers(rank, operation=operation)
        self.lib.emulated_mirrors(
            ctypes.byref(peers), ctypes.byref(self.put_wire), ctypes.c_uint32(self.far[rank])
        )
        return peers

    def launch_put(self, rank: int, call: Any, kind: int, step: str, weights: int | None = None) -> None:
        p = C.epcy_put()
        p.call, p.wire, p.far, p.kind, p.topk_weights = call, self.put_wire, self.far[rank], kind, weights
        for r in range(self.R):
            p.name[r], p.pe[r] = self.memory[r].ctypes.data, r
        self.launch(rank, f"epcy_put_launch_{step}", ctypes.byref(p))

    def carry(self, rank: int, params: Any, kind: int) -> None:
        """Queue a call: one kernel, or with far ranks its halves and what goes around them."""
        name = "epcy_cuda_launch_low_latency_" + ("combine" if kind else "dispatch")
        if not self.far[rank]:
            self.launch(rank, name, ctypes.byref(params))
            return
        asked = params.call.phases
        for phase in (SEND, RECEIVE):
            if not asked & phase:
                continue
            part = type(params).from_buffer_copy(params)
            part.call.phases = phase
            if phase == RECEIVE:
                self.launch_put(rank, part.call, kind, "await")
            elif kind and self.gives_weights(part):
                self.launch_put(rank, part.call, kind, "weights", part.topk_weights)
            self.launch(rank, name, ctypes.byref(part))
            self.launch_put(rank, part.call, kind, "send" if phase == SEND else "acknowledge")

    def gives_weights(self, params: Any) -> bool:
        """Whether the experts' ranks wait for weights of a combine."""
        return bool(
            params.call.header & C.EPCY_LOW_LATENCY_WEIGHTS
            and not params.call.header & C.EPCY_LOW_LATENCY_SOURCE
        )

    def mask(self, rank: int, more: Any = (), fewer: Any = ()) -> None:
        """Queue a change of this rank's masks."""
        bits = [ctypes.c_uint32(sum(1 << r for r in ranks)) for ranks in (more, fewer)]
        peers = self.peers(rank, operation=0)
        self.launch(rank, "epcy_cuda_launch_mask", ctypes.byref(peers), *bits)

    def masked(self, rank: int) -> tuple[int, ...]:
        return ranks_of(self.local(rank).masked)

    def found(self, handle: Any) -> Any:
        """A copy of what a handle's calls have found."""
        return C.epcy_low_latency_found.from_buffer_copy(C.epcy_low_latency_found.from_address(handle.found))

    def dropped(self, handle: Any) -> tuple[list[int], list[int]]:
        """Lanes by rank that were not sent, and not returned, as the host reads them."""
        found, R = self.found(handle), self.R
        lanes = list((ctypes.c_int32 * (2 * R)).from_address(handle.dropped))
        return (lanes[:R] if found.not_sent_to else [0] * R, lanes[R:] if found.not_returning else [0] * R)

    def set_epoch(self, epoch: int) -> None:
        """As if every rank had come to this call of either kind, before `run`."""
        for r in range(self.R):
            local = C.epcy_low_latency_local.from_buffer(self.memory[r], self.wire.local)
            for kind in range(2):
                local.epoch[kind][:] = [epoch] * len(local.epoch[kind])
            self.control_words(r, self.wire.acks, 2 * self.R)[:] = epoch
