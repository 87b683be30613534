from typing_extensions import disjoint_base

from epcy.low_latency import LowLatencyCalls
from epcy.model import Explanation

@disjoint_base
class SmsPlan(LowLatencyCalls):
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
        is_staged: bool = False,
    ) -> Explanation: ...
    def _num_blocks(self, op: str, layout: str) -> int: ...
    def _most_sms(self, op: str, layout: str) -> int: ...
    def _use_knobs(self, **values: float) -> None: ...
    def _use_usual_sms(self) -> None: ...
