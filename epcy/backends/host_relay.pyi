from typing_extensions import disjoint_base

from epcy.backends.host_nodes import HostNodes

PHASE: str

@disjoint_base
class Relayed:
    def __new__(cls, num_links: int) -> Relayed: ...

@disjoint_base
class Streams:
    def __new__(cls, num_links: int) -> Streams: ...

@disjoint_base
class HostRelay(HostNodes): ...
