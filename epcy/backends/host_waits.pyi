from typing_extensions import disjoint_base

from epcy.backends.host_heap import HostHeap

@disjoint_base
class HostWaits(HostHeap): ...

def bound_exit() -> None: ...
