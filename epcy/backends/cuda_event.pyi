from typing_extensions import disjoint_base

from epcy.event import Event

@disjoint_base
class CudaEvent(Event): ...

class Foreign:
    def __init__(self, address: int) -> None: ...
    def __cuda_stream__(self) -> tuple[int, int]: ...
