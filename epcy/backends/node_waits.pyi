from typing_extensions import disjoint_base

from epcy.backends.host_waits import HostWaits

@disjoint_base
class NodeWait:
    def __init__(self, of: HostWaits, op: int, phase: str, word: int, value: int, limit: float) -> None: ...
