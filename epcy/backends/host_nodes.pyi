from typing import Any

from typing_extensions import disjoint_base

from epcy.backends.host_low_latency import HostLowLatencyBackend
from epcy.backends.network import Network
from epcy.topology import Topology

@disjoint_base
class HostNodes(HostLowLatencyBackend):
    @property
    def network(self) -> Network | None: ...
    def __init__(
        self,
        topology: Topology,
        comm: Any,
        shape: dict[str, int],
        options: dict[str, Any],
        identities: list[Any],
        token: object,
    ) -> None: ...
    def find_links(self, topology: Topology, path: str) -> None: ...
    def open_network(self, comm: Any, options: dict[str, Any]) -> None: ...
    def low_latency_channels(self) -> list[tuple[int, int, int, int, bool]]: ...
    def node_of(self, rank: int) -> str: ...
    def break_off(self, first: int) -> None: ...
