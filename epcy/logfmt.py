"""LogFMT-10: ten bits an element, an exponent for each 128; how rows of a low-latency combine may travel.

This is the specification (docs/numerics.md has it in words); include/epcy/logfmt.h is generated out of it by
tools/generate_logfmt.py, and both backends compute with that. Plain NumPy; arguments that make no sense raise
ValueError.
"""

from __future__ import annotations

from decimal import Decimal, localcontext

import numpy as np

from epcy.formats import FLOAT32, GROUP, Array, bits_of, parts_of

__all__ = ["CODES_PER_OCTAVE", "NUM_CODES", "RAW", "TABLE", "cast_from_logfmt", "cast_to_logfmt"]

NUM_CODES = 512
CODES_PER_OCTAVE = 32
ONE = 479  # the code of 1.0; 511 is that of 2.0
RAW = 255  # in place of a group's exponent: its elements are as they were


def _mantissas() -> list[int]:
    """Return 2**(i/32) for i in 0..32 as float32, in units of 2**-23: exact decimal arithmetic, rounded once."""
    with localcontext() as context:
        context.prec = 60
        powers = [Decimal(2) ** (Decimal(i) / CODES_PER_OCTAVE) for i in range(CODES_PER_OCTAVE + 1)]
        return [int((power * 2**23).to_integral_value()) for power in powers]


MANTISSAS = _mantissas()


def _table() -> Array:
    octave, index = np.divmod(np.arange(NUM_CODES) - ONE, CODES_PER_OCTAVE)
    table: Array = np.ldexp(np.array(MANTISSAS, np.float32)[index], octave - 23)
    table[0] = 0
    return table


# What a code stands for, in units of 2**e; the values in between round to the nearest one.
TABLE: Array = _table()
# Midpoints, as float32: what lies above the c-th gets code c + 1 or more, what lies on it the even one of the two.
MIDPOINTS: Array = (TABLE[:-1] + TABLE[1:]) * np.float32(0.5)


def cast_to_logfmt(x: Array) -> tuple[Array, Array]:
    """Cast (T, H) bfloat16, float16 or float32 to LogFMT-10; H a multiple of 128.

    Returns codes (T, H), unsigned integers as wide as x: the sign in bit 9, the code below it; and exponents
    (T, H / 128) uint8: e + 127, or RAW for a group that holds a NaN or what is 2**127 or larger in magnitude, whose
    elements are as they were.
    """
    (x,) = parts_of(x)
    if x.shape[1] % GROUP:
        raise ValueError(f"hidden must be a multiple of {GROUP} for LogFMT, got {x.shape[1]}")
    shape = (len(x), x.shape[1] // GROUP, GROUP)
    value = x.astype(np.float32).reshape(shape)
    magnitude = bits_of(value) & np.uint32(0x7FFFFFFF)
    # The exponent of the largest magnitude; of subnormals that of the smallest normal number.
    exponents = np.maximum(magnitude.max(axis=2) >> np.uint32(23), np.uint32(1)).astype(np.uint8)
    exponents[exponents >= 254] = RAW
    with np.errstate(all="ignore"):
        scaled = np.ldexp(magnitude.view(np.float32), 127 - exponents.astype(np.int32)[:, :, None])
        code = np.searchsorted(MIDPOINTS, scaled)  # the number of midpoints below
        tie = scaled == MIDPOINTS[np.minimum(code, NUM_CODES - 2)]
    code += tie & (code % 2 == 1)  # on the midpoint between an odd code and the next
    sign = bits_of(value) >> np.uint32(31)
    codes = (code | sign.astype(np.int64) << 9).astype(bits_of(x).dtype).reshape(x.shape)
    raw = np.repeat(exponents == RAW, GROUP, axis=1)
    return np.where(raw, bits_of(x), codes), exponents


def cast_from_logfmt(codes: Array, exponents: Array, dtype: np.dtype[np.generic] | type) -> Array:
    """Undo the cast as far as it can be undone: +-TABLE[code] * 2**e, float32; raw elements are of `dtype`."""
    raw = codes.view(dtype).astype(np.float32)
    with np.errstate(all="ignore"):
        value = np.ldexp(
            TABLE[codes & (NUM_CODES - 1)], np.repeat(exponents.astype(np.int32) - 127, GROUP, axis=1)
        )
    bits_of(value)[...] |= (codes >> 9 & 1).astype(np.uint32) << np.uint32(31)
    out: Array = np.where(np.repeat(exponents == RAW, GROUP, axis=1), raw, value)
    return out.astype(FLOAT32, copy=False)
