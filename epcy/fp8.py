"""Casts between rows and (e4m3, scales) pairs, for dispatching half the bytes.

A group of 128 elements shares a scale: amax / 448, with amax floored at 1e-4 (OCP 8-bit floating point, 1.0: e4m3
reaches 448). docs/numerics.md has the rules to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from epcy.arrays import DTYPES, rows_of
from epcy.backends.casts import from_fp8, to_fp8
from epcy.errors import ArgumentError

__all__ = ["cast_from_fp8", "cast_to_fp8"]

GROUP = 128  # EPCY_SCALE_GROUP of epcy/layout.h


def cast_to_fp8(
    x: Any, *, round_scale: bool = False, use_ue8m0: bool = False
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Cast rows to e4m3 with a scale for each group of 128 elements.

    Local, blocking.

    Parameters
    ----------
    x : array (T, H) of bfloat16, float16 or float32
        H a multiple of 128 (512 with `use_ue8m0`).
    round_scale : bool
        Round scales up to powers of two.
    use_ue8m0 : bool
        Give the scales as biased exponents, four in an int32, low byte first; needs `round_scale`.

    Returns
    -------
    payload : (T, H) uint8, the e4m3 bytes
    scales : (T, H / 128) float32, or (T, H / 512) int32

    Raises
    ------
    ArgumentError
    """
    rows = rows_of(x, "x")
    num_rows, hidden = rows.owner.shape
    if not 0 <= rows.kind <= 2:
        raise ArgumentError(f"x: expected bfloat16, float16 or float32, got {rows.owner.dtype}")
    step = 4 * GROUP if use_ue8m0 else GROUP
    if hidden % step:
        raise ArgumentError(f"x: expected a hidden size of a multiple of {step}, got {hidden}")
    if use_ue8m0 and not round_scale:
        raise ArgumentError("use_ue8m0: expected round_scale=True beside it, got False")
    payload = np.empty((num_rows, hidden), np.uint8)
    scales = np.empty((num_rows, hidden // GROUP), np.float32)
    to_fp8(rows, round_scale, payload, scales)
    if use_ue8m0:
        exponents = (scales.view(np.uint32) >> np.uint32(23)).astype(np.uint8)
        return payload, exponents.view("<i4").astype(np.int32, copy=False)
    return payload, scales


def cast_from_fp8(payload: Any, scales: Any, dtype: Any = np.float32) -> NDArray[Any]:
    """Cast (e4m3, scales) rows back: float32(payload) * scale, rounded once to `dtype`.

    Local, blocking.

    Parameters
    ----------
    payload : array (T, H) of uint8 or float8_e4m3fn
    scales : array (T, ceil(H / 128)) of float32

    Returns
    -------
    array (T, H) of `dtype` (bfloat16, float16 or float32)

    Raises
    ------
    ArgumentError
    """
    rows, factors = rows_of(payload, "payload"), rows_of(scales, "scales")
    num_rows, hidden = rows.owner.shape
    if rows.kind != 3:
        raise ArgumentError(f"payload: expected uint8 or float8_e4m3fn, got {rows.owner.dtype}")
    if factors.kind != 2 or factors.owner.shape != (num_rows, -(-hidden // GROUP)):
        raise ArgumentError(
            f"scales: expected float32 ({num_rows}, {-(-hidden // GROUP)}), "
            f"got {factors.owner.dtype} {factors.owner.shape}"
        )
    if np.dtype(dtype) not in [DTYPES[kind] for kind in range(3)]:
        raise ArgumentError(f"dtype: expected bfloat16, float16 or float32, got {dtype!r}")
    out = np.empty((num_rows, hidden), dtype)
    from_fp8(rows, factors, out)
    return out
