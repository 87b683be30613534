from collections.abc import Sequence
from typing import Any

from typing_extensions import disjoint_base

@disjoint_base
class Network:
    @property
    def name(self) -> str: ...
    def close(self, together: bool) -> None: ...

@disjoint_base
class MpiNetwork(Network):
    def __init__(self, comm: Any, channels: Sequence[tuple[int, int, int, int, bool]]) -> None: ...
