from typing_extensions import disjoint_base

from epcy.handle import LowLatencyHandle

@disjoint_base
class CudaLowLatencyHandle(LowLatencyHandle): ...
