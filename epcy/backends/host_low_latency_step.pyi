from typing_extensions import disjoint_base

from epcy.backends.host import HostBackend

@disjoint_base
class HostLowLatencyStep(HostBackend):
    def refuse(self, op: int, text: str) -> None: ...
