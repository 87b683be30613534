from typing import Any

from typing_extensions import disjoint_base

from epcy.event import Event
from epcy.handle import LowLatencyHandle
from epcy.state import BufferState

OP_DISPATCH: int
OP_COMBINE: int

class LowLatencyCalls(BufferState):
    @property
    def low_latency_transport(self) -> str | None: ...
    def low_latency_dispatch(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any = None,
        *,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        stats: Any = None,
        return_recv_hook: bool = False,
        previous_event: Event | None = None,
        async_finish: bool = False,
        stream: Any = None,
        timeout: float | None = None,
    ) -> tuple[Any, Any, LowLatencyHandle, Event, Hook | None]: ...
    def low_latency_combine(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        handle: LowLatencyHandle,
        *,
        reduction: str = "rank",
        zero_copy: bool = False,
        use_logfmt: bool = False,
        out: Any = None,
        renormalize: bool = False,
        return_recv_hook: bool = False,
        previous_event: Event | None = None,
        async_finish: bool = False,
        stream: Any = None,
        timeout: float | None = None,
    ) -> tuple[Any, Event, Hook | None]: ...
    def low_latency_combine_input(self, handle: LowLatencyHandle, dtype: Any = None) -> Any: ...

@disjoint_base
class Hook:
    def __call__(self, timeout: float | None = None) -> None: ...
