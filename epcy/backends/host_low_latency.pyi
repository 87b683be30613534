from typing_extensions import disjoint_base

from epcy.backends.host_low_latency_step import HostLowLatencyStep
from epcy.handle import LowLatencyHandle

@disjoint_base
class HostLowLatencyHandle(LowLatencyHandle): ...

@disjoint_base
class HostLowLatencyBackend(HostLowLatencyStep): ...
