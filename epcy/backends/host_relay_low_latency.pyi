from typing import Any

from typing_extensions import disjoint_base

from epcy.backends.host_relay import HostRelay

@disjoint_base
class HostRelayLowLatency(HostRelay):
    def __init__(self, *args: Any) -> None: ...
    def low_latency_channels(self) -> list[tuple[int, int, int, int, bool]]: ...
