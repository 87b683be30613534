from typing_extensions import disjoint_base

from epcy.backends.host import HostBackend
from epcy.handle import LowLatencyHandle

@disjoint_base
class HostLowLatencyHandle(LowLatencyHandle): ...

@disjoint_base
class HostLowLatencyBackend(HostBackend):
    def refuse(self, op: int, text: str) -> None: ...
