from typing_extensions import disjoint_base

from epcy.handle import Handle

@disjoint_base
class CudaHandle(Handle): ...
