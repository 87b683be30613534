from typing_extensions import disjoint_base

from epcy.backends.host_low_latency import HostLowLatencyBackend
from epcy.backends.network import Network

@disjoint_base
class HostSnapshots(HostLowLatencyBackend):
    @property
    def network(self) -> Network | None: ...
