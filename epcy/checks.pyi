from typing import Any

from typing_extensions import disjoint_base

from epcy.backends.base import Backend

@disjoint_base
class Checker:
    def __init__(self, backend: Backend, shape: dict[str, int], options: dict[str, Any]) -> None: ...
    def stream_pointer(self, stream: Any) -> int: ...
