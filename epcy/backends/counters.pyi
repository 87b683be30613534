from typing_extensions import disjoint_base

@disjoint_base
class Counters:
    def read(self) -> None: ...
