from typing_extensions import disjoint_base

from epcy.errors import HeapError

@disjoint_base
class Heap: ...

def no_room(nbytes: int, size: int) -> HeapError | None: ...
