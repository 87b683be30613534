from typing import Any

from typing_extensions import disjoint_base

from epcy.backends.nvshmem_low_latency import LowLatencyNvshmemBackend
from epcy.topology import Topology

@disjoint_base
class NodesRouting: ...

@disjoint_base
class NodesNvshmemBackend(LowLatencyNvshmemBackend):
    def __init__(
        self,
        topology: Topology,
        comm: Any,
        shape: dict[str, int],
        options: dict[str, Any],
        identities: list[Any],
        token: object,
    ) -> None: ...
