"""The number formats of the specification: rounding, and the cast to e4m3 with a scale for each 128 columns.

Plain NumPy, for all paths to be compared with; epcy.fp8 has the fast casts. Arguments that make no sense raise
ValueError.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Payload: TypeAlias = "Array | tuple[Array, Array]"  # (T, H), or e4m3 bytes (T, H) with their scales

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)

# What a NaN that was computed is stored as.
CANONICAL_NAN = {BFLOAT16: 0x7FC0, FLOAT16: 0x7E00, FLOAT32: 0x7FC00000, E4M3: 0x7F}
GROUP = 128  # columns that share one scale
E4M3_MAX = np.float32(448)
AMAX_FLOOR = np.float32(1e-4)


def parts_of(x: Payload) -> list[Array]:
    """Return the arrays of a payload that travel, each (T, columns); e4m3 as uint8."""
    if not isinstance(x, tuple):
        if x.ndim != 2 or x.dtype not in (BFLOAT16, FLOAT16, FLOAT32):
            raise ValueError(f"x must be (T, H) bfloat16, float16 or float32, got {x.shape} {x.dtype}")
        return [x]
    payload, scales = x
    if payload.ndim != 2 or payload.dtype not in (np.uint8, E4M3):
        raise ValueError(f"an e4m3 payload must be (T, H) uint8, got {payload.shape} {payload.dtype}")
    num_groups = -(-payload.shape[1] // GROUP)
    if scales.dtype != FLOAT32 or scales.shape != (len(payload), num_groups):
        want = (len(payload), num_groups)
        raise ValueError(f"scales must be {want} float32, got {scales.shape} {scales.dtype}")
    return [payload.view(np.uint8), scales]


def bits_of(x: Array) -> Array:
    """Return x as unsigned integers, so that moving it cannot touch a NaN; a view where x is contiguous."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def round_to(acc_float32: Array, dtype: npt.DTypeLike) -> Array:
    """Round float32 once, to nearest even; a NaN becomes the canonical one of `dtype`.

    What is too large becomes an infinity, except in e4m3, which has none: there it becomes +-448.
    """
    dtype = np.dtype(dtype)
    if acc_float32.dtype != FLOAT32 or dtype not in CANONICAL_NAN:
        got = f"{acc_float32.dtype} to {dtype}"
        raise ValueError(f"round_to takes float32 to bfloat16, float16, float32 or e4m3, got {got}")
    with np.errstate(all="ignore"):
        value = np.clip(acc_float32, -E4M3_MAX, E4M3_MAX) if dtype == E4M3 else acc_float32
        out = value.astype(dtype, order="C")  # a copy, also from float32 to float32
    bits_of(out)[np.isnan(acc_float32)] = CANONICAL_NAN[dtype]
    return out


def cast_to_fp8(x: Array, *, round_scale: bool = False, use_ue8m0: bool = False) -> tuple[Array, Array]:
    """Cast (T, H) to e4m3 with a scale for each 128 columns.

    Returns the payload (T, H) uint8 and the scales: (T, H / 128) float32, or with `use_ue8m0`
    (T, H / 512) int32 that hold the biased exponents of the scales of groups 4i..4i+3 in bytes 0..3, low
    first.
    """
    if use_ue8m0 and not round_scale:
        raise ValueError("use_ue8m0 needs round_scale: only a power of two has no mantissa to lose")
    (x,) = parts_of(x)
    multiple = 4 * GROUP if use_ue8m0 else GROUP
    if x.shape[1] % multiple:
        raise ValueError(f"hidden must be a multiple of {multiple} for this cast, got {x.shape[1]}")
    groups = x.astype(np.float32).reshape(len(x), x.shape[1] // GROUP, GROUP)
    with np.errstate(all="ignore"):
        # np.max and np.maximum hand a NaN on, as the rule wants.
        amax = np.maximum(np.max(np.abs(groups), axis=2), AMAX_FLOOR)
        scales = amax / E4M3_MAX
        if round_scale:
            scales = _power_of_two_at_least(scales)
            inverse = np.float32(1) / scales
        else:
            inverse = E4M3_MAX / amax
        payload = round_to(groups * inverse[:, :, None], E4M3).view(np.uint8).reshape(x.shape)
    scales = round_to(scales, np.float32)
    if not use_ue8m0:
        return payload, scales
    exponents = (bits_of(scales) >> 23).astype(np.uint8)  # the scale is positive: no sign bit
    return payload, exponents.view("<i4").astype(np.int32)


def _power_of_two_at_least(scale: Array) -> Array:
    """Return the smallest power of two >= scale, for normal scale > 0; infinity and NaN stay.

    The floor of amax keeps scale above 2e-7, and scale <= max / 448 leaves room above: nothing is lost.
    """
    bits = bits_of(scale)
    # The sum carries into the exponent unless the mantissa is 0.
    up = (bits + np.uint32(0x007FFFFF)) & np.uint32(0xFF800000)
    power: Array = np.where(np.isfinite(scale), up.view(np.float32), scale)
    return power


def cast_from_fp8(payload: Array, scales: Array, dtype: npt.DTypeLike) -> Array:
    """Undo the cast: float32(payload) * scale, rounded to float32 and then once to `dtype`.

    Takes (..., H) uint8 or float8_e4m3fn, with scales (..., ceil(H / 128)) float32 or, as ue8m0,
    (..., H / 512) int32.
    """
    hidden = payload.shape[-1]
    if scales.dtype == np.int32:
        exponents = np.ascontiguousarray(scales.astype("<i4")).view(np.uint8)
        scales = (exponents.astype(np.uint32) << 23).view(np.float32)
    value = payload.view(E4M3).astype(np.float32)
    with np.errstate(all="ignore"):
        return round_to(value * np.repeat(scales, GROUP, axis=-1)[..., :hidden], dtype)
