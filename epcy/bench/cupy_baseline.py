"""Dispatch and combine as a careful CuPy user would write them without epcy: gather, counts by MPI, grouped NCCL.

The GPU's counterpart of baseline.py, with the same bits in the rank layout: one row for each (token, distinct rank),
rows gathered as 32-bit integers, a scatter-add in float32 for each rank in turn, one rounding at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from epcy.bench.calls import Slot, parts_of
from epcy.bench.datasets import Received
from epcy.bench.draws import words
from epcy.bench.measure import Array


class Route(NamedTuple):
    """Where this rank's rows go and come from; rows are ordered by (rank, token) on both sides."""

    num_tokens: int
    tokens: Any  # (S,) the token of each row sent, on the device
    send_counts: Array  # (R,) rows, on the host
    recv_counts: Array
    recv_topk_idx: Any
    recv_topk_weights: Any


class CupyExchange:
    """The calls of works.py. Collective, stream-ordered but for the counts, which the host waits for."""

    def __init__(self, xp: Any, transport: Any, comm: MPI.Intracomm, num_experts: int, hidden: int) -> None:
        self.xp, self.transport, self.comm, self.hidden = xp, transport, comm, hidden
        self.num_local_experts = num_experts // comm.size

    def dispatch(self, slot: Slot, handle: Route | None = None) -> tuple[Any, Route]:
        route = self._route(slot.topk_idx, slot.topk_weights) if handle is None else handle
        parts = tuple(self._send(part, route) for part in slot.x)
        return (parts if len(parts) > 1 else parts[0]), route

    def combine(self, y: Any, handle: Route, slot: Slot, out: Any) -> Any:
        xp, row_bytes = self.xp, y.shape[1] * y.dtype.itemsize
        back = xp.empty((len(handle.tokens), y.shape[1]), y.dtype)
        self.transport.exchange(y, handle.recv_counts * row_bytes, back, handle.send_counts * row_bytes)
        total = xp.zeros((handle.num_tokens, y.shape[1]), np.float32)
        first = 0
        for count in handle.send_counts.tolist():
            rows = back[first : first + count].astype(np.float32)
            if xp is np:
                total[handle.tokens[first : first + count]] += rows
            else:
                import cupyx

                cupyx.scatter_add(total, handle.tokens[first : first + count], rows)
            first += count
        out[...] = total.astype(y.dtype)
        return out

    def _route(self, topk_idx: Any, topk_weights: Any) -> Route:
        xp, (num_tokens, num_topk), size = self.xp, topk_idx.shape, self.comm.size
        # Lane -1 belongs to rank -1 // L = -1: the last column, which is cut off.
        hit = xp.zeros((num_tokens, size + 1), np.bool_)
        hit[xp.arange(num_tokens)[:, None], topk_idx // self.num_local_experts] = True
        ranks, tokens = xp.nonzero(hit[:, :size].T)
        counts = xp.bincount(ranks, minlength=size)
        send_counts = np.asarray(counts if xp is np else counts.get(), np.int64)
        recv_counts = np.empty_like(send_counts)
        self.comm.Alltoall(send_counts, recv_counts)
        route = Route(num_tokens, tokens, send_counts, recv_counts, None, None)
        lanes = xp.concatenate((topk_idx.astype(np.int32), topk_weights.view(np.int32)), axis=1)
        lanes = self._send(lanes, route)
        local = lanes[:, :num_topk] - np.int32(self.comm.rank * self.num_local_experts)
        here = (local >= 0) & (local < self.num_local_experts)
        weights = xp.ascontiguousarray(lanes[:, num_topk:]).view(np.float32)
        return route._replace(
            recv_topk_idx=xp.where(here, local, np.int32(-1)).astype(np.int64),
            recv_topk_weights=xp.where(here, weights, np.float32(0)),
        )

    def _send(self, part: Any, route: Route) -> Any:
        """Gather the rows that `route` names and exchange them; return the rows received."""
        xp, row_bytes = self.xp, part.shape[1] * part.dtype.itemsize
        packed = xp.take(words(xp, part), route.tokens, axis=0)
        received = xp.empty((int(route.recv_counts.sum()), part.shape[1]), part.dtype)
        self.transport.exchange(
            packed, route.send_counts * row_bytes, received, route.recv_counts * row_bytes
        )
        return received

    # ---- as works.py asks

    def handle(self, result: tuple[Any, Route]) -> Route:
        return result[1]

    def look(self, result: tuple[Any, Route], known: bool) -> Received:
        rows, route = result
        return Received(parts_of(rows), None, route.recv_topk_idx, route.recv_topk_weights)

    def rows(self, result: tuple[Any, Route]) -> Any:
        return result[0]

    def output(self, handle: Route) -> Any:
        raise NotImplementedError("without epcy there is no memory of a library's to write into")

    def output_shape(self, handle: Route) -> tuple[int, ...]:
        return int(handle.recv_counts.sum()), self.hidden
