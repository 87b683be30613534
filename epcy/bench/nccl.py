"""NCCL beside epcy: the bare exchange of the same bytes, and the transport of the CuPy baseline.

NCCL comes with CuPy as cupy.cuda.nccl where its library is installed (nvidia-nccl-cu13). Nothing here reduces, so
NVLink multicast is left off: a program that uses it may put GPUs out of service that others share.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np
from mpi4py import MPI

from epcy.bench.datasets import DataSet
from epcy.bench.draws import address_of
from epcy.bench.measure import Array


class Nccl:
    """A NCCL communicator over the ranks of an MPI communicator, on the current device."""

    def __init__(self, library: Any, comm: MPI.Intracomm) -> None:
        """Collective, blocking."""
        self.library, self.comm = library, comm
        unique_id = comm.bcast(library.get_unique_id() if comm.rank == 0 else None)
        self.communicator = library.NcclCommunicator(comm.size, unique_id, comm.rank)

    def exchange(self, sent: Any, send_bytes: Array, received: Any, recv_bytes: Array) -> None:
        """Send and receive consecutive pieces, one for each rank, the own one included; stream-ordered."""
        import cupy

        stream = cupy.cuda.get_current_stream().ptr
        out, into, uint8 = address_of(sent), address_of(received), self.library.NCCL_UINT8
        self.library.groupStart()
        for peer, (num_out, num_in) in enumerate(zip(send_bytes.tolist(), recv_bytes.tolist(), strict=True)):
            if num_out:
                self.communicator.send(out, num_out, uint8, peer, stream)
            if num_in:
                self.communicator.recv(into, num_in, uint8, peer, stream)
            out, into = out + num_out, into + num_in
        self.library.groupEnd()

    def free(self) -> None:
        """Collective."""
        self.communicator.destroy()


def start(comm: MPI.Intracomm) -> tuple[Nccl | None, str]:
    """Return NCCL and its version, or None and why it does not work here. Collective, blocking."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    found, text = None, ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from cupy.cuda import nccl as library
    # The answer is one for all ranks before anybody enters a collective of NCCL's.
    if not all(comm.allgather(bool(library.available))):
        return None, "CuPy has no NCCL here (cupy.cuda.nccl): pip install nvidia-nccl-cu13"
    try:
        found = Nccl(library, comm)
    except library.NcclError as error:
        text = f"NCCL does not start: {error}"
    texts = [text for text in comm.allgather(text) if text]
    if found is None or texts:
        return None, texts[0]
    number = int(library.get_version())  # 22809 is 2.28.9
    return found, f"{number // 10000}.{number // 100 % 100}.{number % 100}"


class AllToAll:
    """Time grouped sends and receives of the bytes that a case moves: no counting, no packing, no sums.

    Rows that stay on their rank are exchanged too, as in NCCL's all-to-all.
    """

    num_generations = 1

    def __init__(self, nccl: Any, xp: Any, data: DataSet, row_bytes: list[int], num_calls: int) -> None:
        """`row_bytes`: of a row there (dispatch), and of a row back (combine); either or both, 0 for none."""
        setting = data.setting
        self.nccl, self.num_calls = nccl, num_calls
        every_lane = setting.mode == "ll" and setting.reduction == "source"
        there, back = row_bytes
        me, ranks = setting.rank, range(setting.size)
        self.pieces: list[tuple[Array, Array]] = []
        if there:
            self.pieces.append(
                (
                    np.array([data.rows_between(me, r) for r in ranks]) * there,
                    np.array([data.rows_between(r, me) for r in ranks]) * there,
                )
            )
        if back:
            self.pieces.append(
                (
                    np.array([data.rows_between(r, me, every_lane) for r in ranks]) * back,
                    np.array([data.rows_between(me, r, every_lane) for r in ranks]) * back,
                )
            )
        most = max(int(counts.sum()) for pair in self.pieces for counts in pair)
        self.sent, self.received = (xp.zeros(max(most, 1), np.uint8) for _ in range(2))

    def open(self, capture: Any) -> None:
        """Nothing is shared by all runs."""

    def load(self, generation: int) -> None:
        """Nothing is loaded: what the bytes are is all the same to NCCL."""

    def issue(self) -> None:
        for _ in range(self.num_calls):
            for send_bytes, recv_bytes in self.pieces:
                self.nccl.exchange(self.sent, send_bytes, self.received, recv_bytes)

    def collect(self) -> None:
        """Nothing is looked at."""

    def wrong(self) -> int:
        return 0
