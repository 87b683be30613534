"""The baseline: dispatch and combine as a careful NumPy and mpi4py user would write them without epcy.

It moves the same rows as ``epcy.Buffer`` in the rank layout and gives the same bits:

- one row for each (token, distinct destination rank), never one for each expert;
- the counts travel by ``Alltoall``, rows and their ids and weights by two ``Alltoallv`` out of buffers allocated once;
- rows are packed by ``np.take`` on unsigned views (ml_dtypes' own indexing is several times slower), ``mode="clip"``
  because the default mode makes ``np.take`` copy through a buffer of its own;
- combine sends the rows back and adds each rank's by one fancy-indexed addition in float32 (a token occurs at most
  once for each rank, so ``np.add.at`` is not needed), rounded once at the end.

It uses no BLAS, so a rank is one thread whatever OPENBLAS_NUM_THREADS says.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

Array = NDArray[Any]


class Route(NamedTuple):
    """Where this rank's rows go and come from; rows are ordered by (rank, token) on both sides."""

    num_tokens: int
    tokens: Array  # (S,) the token of each row sent
    send_counts: Array  # (R,) int32, rows
    send_starts: Array
    recv_counts: Array
    recv_starts: Array
    recv_topk_idx: Array  # (N, K) int64, local ids, -1 for experts elsewhere
    recv_topk_weights: Array  # (N, K) float32, 0 for experts elsewhere

    @property
    def num_recv_tokens(self) -> int:
        return int(self.recv_counts.sum())


class AlltoallvExchange:
    """Dispatch and combine over ``comm`` by ``MPI.Alltoallv``; the arguments are those of ``epcy.Buffer``.

    Collective, blocking. Results are views of buffers that the next call overwrites.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        num_topk: int,
        dtype: Any,
    ) -> None:
        self.comm = comm
        self.hidden, self.num_topk = hidden, num_topk
        self.num_local_experts = num_experts // comm.size
        self.dtype = np.dtype(dtype)
        num_rows = num_max_tokens_per_rank * comm.size
        self._tokens = np.arange(num_max_tokens_per_rank)[:, None]
        self._sent = np.empty((num_rows, hidden), self.dtype)
        self._received = np.empty((num_rows, hidden), self.dtype)
        self._meta_sent = np.empty((num_rows, 2 * num_topk), np.uint32)
        self._meta_received = np.empty((num_rows, 2 * num_topk), np.uint32)
        self._rows32 = np.empty((num_max_tokens_per_rank, hidden), np.float32)
        self._so_far = np.empty((num_max_tokens_per_rank, hidden), np.float32)
        self._sum = np.empty((num_max_tokens_per_rank, hidden), np.float32)
        self._combined = np.empty((num_max_tokens_per_rank, hidden), self.dtype)
        self._scales: tuple[Array, Array] | None = None

    def dispatch(
        self,
        x: Array | tuple[Array, Array],
        topk_idx: Array | None,
        topk_weights: Array | None,
        route: Route | None = None,
    ) -> tuple[Any, Array, Array, Route]:
        """Send each token once to every rank that owns one of its experts.

        Collective, blocking. ``x`` is (T, H), or (payload, scales) for e4m3; with ``route`` the ids, weights and
        counts of an earlier call are used again. Returns rows (N, H), local ids (N, K) int64 with -1 for experts
        elsewhere, their weights (N, K) float32, and the route.
        """
        if route is None:
            if topk_idx is None or topk_weights is None:
                raise ValueError("topk_idx and topk_weights are needed when no route is given")
            route = self._make_route(topk_idx, topk_weights)
        if isinstance(x, tuple):
            payload, scales = x
            if self._scales is None:
                shape = (len(self._sent), scales.shape[1])
                self._scales = np.empty(shape, np.float32), np.empty(shape, np.float32)
            sent, received = _as_bytes(self._sent), _as_bytes(self._received)
            rows: Any = (
                self._exchange(payload, sent, received, route),
                self._exchange(scales, *self._scales, route),
            )
        else:
            rows = self._exchange(x, self._sent, self._received, route)
        return rows, route.recv_topk_idx, route.recv_topk_weights, route

    def combine(self, y: Array, route: Route) -> Array:
        """Send the rows (N, H) back and add, for each token, what its ranks returned; returns (T, H).

        Collective, blocking.
        """
        unit = _unsigned(y.dtype)
        back, size = self._sent, self.hidden
        mpi_type = _MPI_TYPES[y.dtype.itemsize]
        rows_out = np.ascontiguousarray(y).view(unit)
        self.comm.Alltoallv(
            [rows_out, route.recv_counts * size, route.recv_starts * size, mpi_type],
            [back.view(unit), route.send_counts * size, route.send_starts * size, mpi_type],
        )
        total = self._sum[: route.num_tokens]
        total.fill(0)
        for start, count in zip(route.send_starts.tolist(), route.send_counts.tolist(), strict=True):
            tokens, rows, so_far = (
                route.tokens[start : start + count],
                self._rows32[:count],
                self._so_far[:count],
            )
            np.copyto(rows, back[start : start + count], casting="unsafe")
            # total[tokens] += rows, without the new arrays that this would make.
            np.take(total, tokens, axis=0, out=so_far, mode="clip")
            total[tokens] = np.add(so_far, rows, out=so_far)
        combined = self._combined[: route.num_tokens]
        np.copyto(combined, total, casting="unsafe")
        return combined

    def _make_route(self, topk_idx: Array, topk_weights: Array) -> Route:
        num_tokens, size = len(topk_idx), self.comm.size
        # Lane -1 belongs to rank -1 // L = -1: the last column, which is cut off.
        hit = np.zeros((num_tokens, size + 1), np.bool_)
        hit[self._tokens[:num_tokens], topk_idx // self.num_local_experts] = True
        ranks, tokens = np.nonzero(hit[:, :size].T)
        send_counts = np.bincount(ranks, minlength=size).astype(np.int32)
        recv_counts = np.empty_like(send_counts)
        self.comm.Alltoall(send_counts, recv_counts)
        meta = np.empty((num_tokens, 2 * self.num_topk), np.uint32)
        meta[:, : self.num_topk] = topk_idx
        meta[:, self.num_topk :] = topk_weights.astype(np.float32, copy=False).view(np.uint32)
        nothing = np.empty(0)
        starts = _starts(send_counts), _starts(recv_counts)
        route = Route(num_tokens, tokens, send_counts, starts[0], recv_counts, starts[1], nothing, nothing)
        meta = self._exchange(meta, self._meta_sent, self._meta_received, route)
        local_idx = meta[:, : self.num_topk].view(np.int32) - self.comm.rank * self.num_local_experts
        elsewhere = (local_idx < 0) | (local_idx >= self.num_local_experts)
        local_idx[elsewhere] = -1
        weights = np.where(elsewhere, np.float32(0), meta[:, self.num_topk :].view(np.float32))
        return route._replace(recv_topk_idx=local_idx.astype(np.int64), recv_topk_weights=weights)

    def _exchange(self, source: Array, sent: Array, received: Array, route: Route) -> Array:
        """Pack the rows of ``source`` that ``route`` names, exchange them, return the rows received."""
        unit, size = _unsigned(source.dtype), source.shape[1]
        mpi_type = _MPI_TYPES[source.dtype.itemsize]
        packed = sent[: len(route.tokens)].view(unit)
        np.take(source.view(unit), route.tokens, axis=0, out=packed, mode="clip")
        self.comm.Alltoallv(
            [packed, route.send_counts * size, route.send_starts * size, mpi_type],
            [received.view(unit), route.recv_counts * size, route.recv_starts * size, mpi_type],
        )
        return received[: route.num_recv_tokens]


_MPI_TYPES = {1: MPI.UINT8_T, 2: MPI.UINT16_T, 4: MPI.UINT32_T}


def _unsigned(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"u{dtype.itemsize}")


def _starts(counts: Array) -> Array:
    return (np.cumsum(counts) - counts).astype(np.int32)


def _as_bytes(buffer: Array) -> Array:
    """Give e4m3 rows the first half (or quarter) of the memory that wider rows use."""
    return buffer.reshape(-1).view(np.uint8)[: buffer.size].reshape(buffer.shape)
