from enum import IntFlag
from typing import Any

import numpy as np
from typing_extensions import disjoint_base

class Kind(IntFlag):
    KIND_BF16 = 0
    KIND_FP16 = 1
    KIND_FP32 = 2
    KIND_FP8 = 3
    KIND_INT32 = 4
    KIND_INT64 = 5
    KIND_OTHER = -1

BFLOAT16: np.dtype[Any]
DTYPES: dict[int, np.dtype[Any]]

@disjoint_base
class Array:
    @property
    def owner(self) -> Any: ...
    @property
    def ndim(self) -> int: ...
    @property
    def kind(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def is_writable(self) -> bool: ...
    @property
    def is_contiguous(self) -> bool: ...

@disjoint_base
class Memory:
    @property
    def owner(self) -> Any: ...
    @property
    def num_exports(self) -> int: ...

def rows_of(obj: Any, name: str, device: int = -1) -> Array: ...
