"""Ranks of one emulated machine: their memory, their streams, and what goes wrong."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from emulator import build
from emulator.structs import C
from epcy.reference import BFLOAT16

FLOATS = [BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)]  # the payload kinds of epcy/arrays.pxd
KIND_FP8 = 3
MARGIN = 256
FOREVER = 10**18


class Broken(AssertionError):
    """What the machine found wrong with a kernel: a deadlock, a store beside its array, and so on."""


class World:
    """All ranks of a Buffer. Operations are queued on the ranks' streams; `run` runs all of them."""

    def __init__(
        self,
        num_ranks: int,
        num_local: int,
        num_topk: int,
        max_tokens: int,
        hidden: int,
        *,
        row_bytes: int | None = None,
        num_rows: int | None = None,
        low_latency: bool = False,
        num_far: int = 0,
        groups: tuple[int, int, int] = (0, 1, 1),
        timeout_ns: int = FOREVER,
        arch: int = 90,
        delays: bool = True,
        kernels: tuple[Any, ...] = (),
    ) -> None:
        self.lib = build.library(arch, kernels)
        self.lib.emulated_stream.restype = ctypes.c_void_p
        self.lib.emulated_handle.restype = ctypes.c_int64
        self.R, self.L, self.K, self.M, self.H = num_ranks, num_local, num_topk, max_tokens, hidden
        self.E = num_ranks * num_local
        self.lib.emulated_reset(delays)
        s = self.shape = C.epcy_shape(
            num_ranks, self.E, num_topk, max_tokens, hidden, row_bytes or hidden * 4
        )
        s.num_rows = num_rows or num_ranks * max_tokens * max(1, min(num_topk, num_local)) + 128 * num_local
        s.num_low_latency_tokens = max_tokens if low_latency else 0
        self.control, self.area = C.epcy_control(), C.epcy_area()
        self.wire, self.heap, self.put_wire = C.epcy_low_latency_wire(), C.epcy_heap(), C.epcy_put_wire()
        refs = [ctypes.byref(v) for v in (s, self.control, self.area, self.wire, self.heap)]
        self.nodes_wire = C.epcy_nodes_wire()
        self.lib.emulated_layout(
            *refs,
            ctypes.c_int64(num_far),
            ctypes.byref(self.put_wire),
            *groups,  # their number, the slots of a ring, the tokens of a chunk
            ctypes.byref(self.nodes_wire),
        )
        self.timeout_ns = timeout_ns
        self.keep: list[Any] = []
        # without the low-latency areas: results are arrays of their own
        heap_bytes = self.heap.low_latency_x[0]
        self.memory = [self.array(r, heap_bytes, np.uint8, align=4096) for r in range(num_ranks)]
        for r in range(num_ranks):
            self.memory[r][: self.heap.receive[0]] = 0
        report_bytes = ctypes.sizeof(C.epcy_report) + 8 * num_local
        self.reports = [self.array(-1, report_bytes, np.uint8) for _ in range(num_ranks)]
        for report in self.reports:
            report[:] = 0
        self.streams = [ctypes.c_void_p(self.lib.emulated_stream(r)) for r in range(num_ranks)]

    # ---- arrays

    def array(self, rank: int, shape: Any, dtype: Any, align: int = 128) -> Any:
        """An array that kernels may write, full of nonsense, with a margin that nobody may."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        raw = np.full(nbytes + align + 2 * MARGIN, 0x77, np.uint8)
        at = -(raw.ctypes.data + MARGIN) % align + MARGIN
        self.keep.append(raw)
        self.lib.emulated_memory(rank, ctypes.c_void_p(raw.ctypes.data + at), ctypes.c_int64(max(nbytes, 1)))
        return raw[at : at + nbytes].view(dtype).reshape(shape)

    def put(self, rank: int, x: Any) -> Any:
        """A copy of x that kernels can reach; None stays None."""
        if x is None:
            return None
        a = self.array(rank, x.shape, x.dtype)
        a.view(np.uint8)[...] = np.ascontiguousarray(x).view(np.uint8)
        return a

    def peers(self, rank: int, *, operation: int, ticket: int = 0) -> Any:
        p = C.epcy_peers()
        for r in range(self.R):
            p.base[r] = self.memory[r].ctypes.data
        p.shape, p.control, p.area, p.heap = self.shape, self.control, self.area, self.heap
        p.rank, p.report, p.timeout_ns = rank, self.reports[rank].ctypes.data, self.timeout_ns
        p.ticket, p.operation = ticket, operation
        if hasattr(p, "num_local"):
            p.num_local = self.L
        return p

    def report(self, rank: int, raw: Any = None) -> Any:
        """A copy of a rank's report as it is, or as it was copied."""
        return C.epcy_report.from_buffer_copy(self.reports[rank] if raw is None else raw)

    def control_words(self, rank: int, offset: int, count: int, dtype: Any = np.uint64) -> Any:
        return self.memory[rank][offset : offset + count * np.dtype(dtype).itemsize].view(dtype)

    def local(self, rank: int) -> Any:
        """The rank's own state, to be read and written between runs."""
        return C.epcy_local.from_buffer(self.memory[rank], self.control.local)

    # ---- streams

    def launch(self, rank: int, name: str, *args: Any) -> None:
        """Queue a kernel by a launcher of the C headers."""
        self.keep.append(args)
        assert getattr(self.lib, name)(*args, self.streams[rank]) == 0, name

    def copy(self, rank: int, to: Any, source: Any) -> None:
        """Queue a copy, of all bytes of `source` when its turn comes."""
        nbytes = ctypes.c_int64(source.nbytes)
        pointers = ctypes.c_void_p(to.ctypes.data), ctypes.c_void_p(source.ctypes.data)
        self.keep.append((to, source))
        assert to.nbytes >= source.nbytes and source.flags.c_contiguous and to.flags.c_contiguous
        self.lib.emulated_copy(self.streams[rank], *pointers, ctypes.c_int64(1), nbytes, nbytes)

    def keep_copy(self, rank: int, source: Any) -> Any:
        """Queue a copy to an array of its own, and return that."""
        to = np.zeros(source.nbytes, np.uint8)
        self.copy(rank, to, source)
        return to.view(source.dtype).reshape(source.shape)

    def wait(self, rank: int, ns: int) -> None:
        self.lib.emulated_wait(self.streams[rank], ctypes.c_uint64(ns))

    def run(self, seed: int, most_slices: int = 2_000_000) -> None:
        text = ctypes.create_string_buffer(1024)
        good = self.lib.emulated_run(ctypes.c_uint64(seed), ctypes.c_uint64(most_slices), text, 1024)
        if not good:
            raise Broken(text.value.decode())


def pointer(a: Any) -> int | None:
    return None if a is None else a.ctypes.data
