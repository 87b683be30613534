"""Rows drawn by a hash of (seed, row, column), and compared, where they lie: NumPy on a host, CuPy on a GPU.

Any rank can draw any row of any other rank, so no payload travels for a check. All values are finite, and groups of
128 columns differ in magnitude. ``xp`` is numpy or cupy; functions are local, and stream-ordered with cupy. Sums and
roundings are written with unsigned integers and single float32 operations, which both modules round alike.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from epcy.bench.workload import DTYPES, num_scales

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ROWS_AT_ONCE = 8192  # bounds the memory of the intermediate integers


def seed_of(*numbers: int) -> int:
    """Mix numbers into one 32-bit seed."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def hash_of(xp: Any, seed: int, rows: Any, num_columns: int) -> Any:
    """Return (n, num_columns) uint32, well mixed; row i depends on ``rows[i]`` and not on its place."""
    h = rows.astype(np.uint32)[:, None] * np.uint32(num_columns) + xp.arange(num_columns, dtype=np.uint32)
    h ^= np.uint32(seed)
    for multiplier, shift in ((0x9E3779B1, 15), (0x85EBCA77, 13), (0xC2B2AE3D, 16)):
        h *= np.uint32(multiplier)
        h ^= h >> np.uint32(shift)
    return h


def draw_rows(xp: Any, seed: int, rows: Any, hidden: int, dtype: str) -> Any:
    """Return (n, H) of bf16, fp16 or fp32, or e4m3 bytes for "fp8"; ``rows`` (n,) are row numbers."""
    out = xp.empty((len(rows), hidden), DTYPES[dtype])
    for first in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[first : first + ROWS_AT_ONCE]
        h = hash_of(xp, seed, some, hidden)
        bits = out[first : first + ROWS_AT_ONCE].view(f"u{out.dtype.itemsize}")
        if dtype == "fp8":  # every byte but the two NaNs
            bits[...] = xp.minimum(h & np.uint32(0x7F), np.uint32(0x7E)) | (
                h >> np.uint32(8) & np.uint32(0x80)
            )
            continue
        # 24 random bits make sign, a 3-bit step of the exponent and the mantissa; the group's own exponent is added.
        low, mantissa_bits = {"bf16": (110, 7), "fp16": (2, 10), "fp32": (110, 23)}[dtype]
        group = hash_of(xp, seed ^ 0x5BD1E995, some, num_scales(hidden)) & np.uint32(7)
        exponent = xp.repeat(group, 128, axis=1)[:, :hidden]
        exponent += np.uint32(low)
        exponent += h >> np.uint32(24) & np.uint32(7)
        exponent <<= np.uint32(mantissa_bits)
        exponent |= h & np.uint32((1 << mantissa_bits) - 1)
        exponent |= (h >> np.uint32(31)) << np.uint32(8 * out.dtype.itemsize - 1)
        bits[...] = exponent
    return out


def draw_scales(xp: Any, seed: int, rows: Any, hidden: int) -> Any:
    """Return (n, ceil(H / 128)) positive float32."""
    h = hash_of(xp, seed ^ 0x27D4EB2F, rows, num_scales(hidden))
    return ((h & np.uint32(0x03FFFFFF)) | np.uint32(0x3C000000)).view(np.float32)


def to_float32(xp: Any, rows: Any) -> Any:
    """Return the rows as float32, exactly."""
    if rows.dtype == BFLOAT16:
        return (xp.ascontiguousarray(rows).view(np.uint16).astype(np.uint32) << np.uint32(16)).view(
            np.float32
        )
    return rows.astype(np.float32)


def round_to(xp: Any, total: Any, dtype: Any) -> Any:
    """Round finite float32 sums once, to nearest even."""
    if np.dtype(dtype) != BFLOAT16:
        return total.astype(dtype)
    bits = xp.ascontiguousarray(total).view(np.uint32)
    odd = bits >> np.uint32(16) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16).view(dtype)


def words(xp: Any, rows: Any) -> Any:
    """Return rows (n, ...) as (n, bytes / 4) uint32, or bytes where a row is no multiple of four; a view if it can."""
    flat = xp.ascontiguousarray(rows).reshape(rows.shape[0], math.prod(rows.shape[1:]))
    whole = flat.shape[1] * flat.dtype.itemsize % 4 == 0
    return flat.view(np.uint32 if whole else np.uint8)


def take(xp: Any, rows: Any, index: Any) -> Any:
    """Return rows (n, columns) by their numbers, copied as integers."""
    return words(xp, rows)[xp.asarray(index)].view(rows.dtype)


def copy_into(xp: Any, into: Any, rows: Any) -> None:
    """Copy contiguous rows as integers."""
    words(xp, into)[...] = words(xp, rows)


def differ(xp: Any, got: Any, expected: Any) -> Any:
    """Return for each row whether any bit of it differs; all do where the shape or the size of a value does."""
    if got.shape != expected.shape or got.dtype.itemsize != expected.dtype.itemsize:
        return xp.ones(max(len(got), len(expected)), np.bool_)
    if got.size == 0:
        return xp.zeros(len(got), np.bool_)
    return (words(xp, got) != words(xp, expected)).any(axis=1)


def address_of(array: Any) -> int:
    """Return where an array of NumPy or CuPy lies."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)
