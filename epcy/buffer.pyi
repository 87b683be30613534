from types import TracebackType
from typing import Any

from mpi4py import MPI
from typing_extensions import disjoint_base

from epcy.event import Event
from epcy.handle import Combine, Dispatch, Handle
from epcy.low_latency import LowLatencyCalls
from epcy.model import Explanation
from epcy.stats import Stats
from epcy.topology import Topology

@disjoint_base
class Buffer(LowLatencyCalls):
    @property
    def size(self) -> int: ...
    @property
    def num_local_experts(self) -> int: ...
    @property
    def backend(self) -> str: ...
    @property
    def comm(self) -> MPI.Intracomm: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def options(self) -> dict[str, Any]: ...
    @property
    def num_sms(self) -> int: ...
    def set_num_sms(self, num_sms: int | None) -> None: ...
    def explain(
        self,
        op: str,
        num_tokens: int,
        *,
        dtype: str | None = None,
        layout: str = "rank",
        num_sms: int | None = None,
    ) -> Explanation: ...
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
        backend: str | None = None,
    ) -> dict[str, int]: ...
    def dispatch(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        handle: Handle | None = None,
        layout: str | None = None,
        expert_alignment: int | None = None,
        num_worst_tokens: int = 0,
        num_sms: int | None = None,
        previous_event: Event | None = None,
        async_finish: bool = False,
        stream: Any = None,
        out: Any = None,
        timeout: float | None = None,
    ) -> Dispatch: ...
    def combine(
        self,
        x: Any,
        handle: Handle,
        topk_weights: Any = None,
        *,
        bias: Any = None,
        num_sms: int | None = None,
        previous_event: Event | None = None,
        async_finish: bool = False,
        stream: Any = None,
        out: Any = None,
        timeout: float | None = None,
    ) -> Combine: ...
    def combine_input(self, handle: Handle, dtype: Any = None) -> Any: ...
    def get_dispatch_layout(self, topk_idx: Any) -> tuple[Any, Any, Any, Any]: ...
    def barrier(self, timeout: float | None = None) -> None: ...
    def check(self) -> None: ...
    def stats(self, *, reset: bool = False) -> Stats: ...
    def capture(self) -> Event: ...
    def warmup(self) -> None: ...
    def _align(self, stream: Any) -> None: ...
    def _num_blocks(self, op: str, layout: str) -> int: ...
    def _most_sms(self, op: str, layout: str) -> int: ...
    def _use_usual_sms(self) -> None: ...
    def _use_knobs(self, **values: float) -> None: ...
    def _peer_address(self, rank: int) -> int: ...
    def reset(self, timeout: float | None = None) -> None: ...
    def free(self, timeout: float | None = None) -> None: ...
    def __enter__(self) -> Buffer: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
    def __bool__(self) -> bool: ...
