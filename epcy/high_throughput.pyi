from typing import Any

from epcy.event import Event
from epcy.handle import Combine, Dispatch, Handle
from epcy.sms import SmsPlan

OP_DISPATCH: int
OP_COMBINE: int
OP_BARRIER: int

class HighThroughputCalls(SmsPlan):
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
    def capture(self) -> Event: ...
