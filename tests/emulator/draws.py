"""Random inputs for the emulated kernels."""

from __future__ import annotations

from typing import Any

import numpy as np


def floats(rng: Any, shape: tuple[int, ...], dtype: Any, special: bool = False) -> Any:
    """Values of many magnitudes; `special`: NaN, infinities, zeros of both signs and subnormals among them."""
    v = rng.standard_normal(shape, dtype=np.float32)
    if len(v):
        v *= np.exp2(rng.integers(-12, 12, (len(v),) + (1,) * (len(shape) - 1))).astype(np.float32)
    if special:
        v[rng.random(shape) < 0.004] = np.nan
        v[rng.random(shape) < 0.004] = np.inf
        v[rng.random(shape) < 0.004] = -np.inf
        v[rng.random(shape) < 0.03] = -0.0
        v[rng.random(shape) < 0.03] *= np.float32(1e-39)
    with np.errstate(all="ignore"):
        return v.astype(dtype)


def lanes(
    rng: Any, T: int, K: int, E: int, dtype: Any = np.int64, unused: float = 0.1, repeated: float = 0.1
) -> Any:
    """(T, K) expert ids, some of them -1 and some named twice by a token."""
    if K <= E:
        idx = np.argsort(rng.random((T, E)), axis=1)[:, :K]
    else:
        idx = rng.integers(0, E, (T, K))
    again = rng.random((T, K)) < repeated
    again[:, 0] = False
    idx = np.where(again, np.roll(idx, 1, 1), idx)
    idx[rng.random((T, K)) < unused] = -1
    return idx.astype(dtype)


def weights(rng: Any, idx: Any) -> Any:
    """float32 like idx; those of unused lanes are NaN, since nobody may read them."""
    w = rng.standard_normal(idx.shape).astype(np.float32)
    w[idx < 0] = np.nan
    return w


def same_bits(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()
