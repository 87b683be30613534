from types import TracebackType
from typing import Any

from mpi4py import MPI

from epcy.high_throughput import HighThroughputCalls

class Buffer(HighThroughputCalls):
    def __init__(
        self,
        comm: MPI.Comm | None = None,
        *,
        num_max_tokens_per_rank: int | None = None,
        hidden: int | None = None,
        num_experts: int | None = None,
        num_topk: int | None = None,
        dtype: str | None = None,
        **options: Any,
    ) -> None: ...
    @staticmethod
    def size_hint(
        num_ranks: int,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        num_topk: int,
        dtype: str = "bfloat16",
        num_max_recv_tokens: int | None = None,
        low_latency_mode: bool | None = None,
        num_max_low_latency_tokens_per_rank: int | None = None,
        allow_nvlink_for_low_latency_mode: bool | None = None,
        num_max_nvl_peers: int | None = None,
        path: str | None = None,
        node_chunk_tokens: int | None = None,
        num_node_buffers: int | None = None,
        backend: str | None = None,
    ) -> dict[str, int]: ...
    def warmup(self) -> None: ...
    def _align(self, stream: Any) -> None: ...
    def _peer_address(self, rank: int) -> int: ...
    def _put_rows(self, rank: int, num_rows: int, num_blocks: int, stream: Any) -> int: ...
    def reset(self, timeout: float | None = None) -> None: ...
    def free(self, timeout: float | None = None) -> None: ...
    def __enter__(self) -> Buffer: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
    def __bool__(self) -> bool: ...
