from typing import Any

from typing_extensions import disjoint_base

from epcy.backends.base import Backend

@disjoint_base
class NvshmemHeap(Backend):
    def __init__(
        self, comm: Any, shape: dict[str, int], options: dict[str, Any], identities: list[Any], token: object
    ) -> None: ...
    def use_sms(self, num_sms: int | None) -> None: ...
    def num_blocks(self, op: str, layout: str) -> int: ...
    def peer_address(self, rank: int) -> int: ...
