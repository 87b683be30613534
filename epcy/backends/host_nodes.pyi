from typing import Any

from typing_extensions import disjoint_base

from epcy.backends.host_snapshots import HostSnapshots
from epcy.topology import Topology

@disjoint_base
class HostNodes(HostSnapshots):
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
