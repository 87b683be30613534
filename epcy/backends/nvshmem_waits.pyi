from typing_extensions import disjoint_base

from epcy.backends.nvshmem_heap import NvshmemHeap
from epcy.event import Event

@disjoint_base
class NvshmemWaits(NvshmemHeap):
    def capture(self) -> Event: ...
