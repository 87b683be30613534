from typing import Any

from typing_extensions import disjoint_base

from epcy.backends.base import Backend

NAMES: tuple[str, str]

@disjoint_base
class LowLatency:
    @property
    def num_sent(self) -> list[int]: ...
    @property
    def num_received(self) -> list[int]: ...
    def __init__(self, backend: Backend, owner: Any) -> None: ...
