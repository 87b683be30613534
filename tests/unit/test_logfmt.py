"""LogFMT-10: the table, nearest codes, ties, what travels raw, the error bound, and the generated header."""

import subprocess
import sys
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from epcy import logfmt, reference
from parallel import ROOT

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [BF16, np.dtype(np.float16), np.dtype(np.float32)]
RATIO = 2 ** (1 / 32)


def through(x):
    return reference.cast_from_logfmt(*reference.cast_to_logfmt(x), x.dtype)


def group(*values, dtype=np.float32):
    """One row of one group that begins with these values."""
    x = np.zeros((1, 128), dtype)
    x[0, : len(values)] = values
    return x


def test_table():
    table = logfmt.TABLE
    assert table.dtype == np.float32 and len(table) == 512 and np.all(np.diff(table) > 0)
    assert table[0] == 0 and table[479] == 1 and table[511] == 2 and table[479 - 32 * 14] == 2**-14
    assert np.allclose(
        table[1:].astype(np.float64), 2.0 ** ((np.arange(1, 512) - 479) / 32), rtol=2**-24, atol=0
    )


def test_header_is_current():
    done = subprocess.run([sys.executable, "tools/generate_logfmt.py", "--check"], cwd=ROOT, timeout=60)
    assert done.returncode == 0, "run python tools/generate_logfmt.py"


def test_nearest_code_and_ties():
    """Against exact fractions, for every code, its thresholds and their neighbours."""
    table = [Fraction(float(t)) for t in logfmt.TABLE]
    for code in range(511):
        middle = logfmt.MIDPOINTS[code]
        for x in (np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(2))):
            codes, exponents = reference.cast_to_logfmt(group(1.0, x))  # the exponent is 0, whatever x is
            assert exponents[0, 0] == 127
            if x == middle:
                assert codes[0, 1] == code + code % 2
                continue
            exact = Fraction(float(x))
            below, above = exact - table[code], table[code + 1] - exact
            # midpoints are float32, so beside one the nearest may be either only if both are equally near
            assert codes[0, 1] == code + (below > above) or abs(below - above) <= Fraction(1, 2**24)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_error_bound(dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 512)) * np.exp(rng.standard_normal((64, 512)) * 4)
    x = np.clip(x, -6e4, 6e4).astype(dtype)
    got, want = through(x).astype(np.float64), x.astype(np.float64)
    top = np.repeat(np.abs(want).reshape(64, 4, 128).max(2), 128, axis=1)
    scale = 2.0 ** np.floor(np.log2(top))
    error = np.abs(got - want)
    large = np.abs(want) >= 2**-14.9 * scale
    assert np.all(error[large] <= 0.0109 * np.abs(want[large]))
    assert np.all(error[~large] <= 2**-15.9 * scale[~large])
    assert np.all(np.signbit(got) == np.signbit(want))
    assert error[large].max() > 0.9 * ((RATIO - 1) / (RATIO + 1)) * np.abs(want[large]).min()


def test_powers_of_two_are_exact():
    for e in (-100, -1, 0, 7, 100):
        x = group(*[s * 2.0 ** (e - i) for i in range(15) for s in (1, -1)])
        assert np.array_equal(through(x), x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_raw_groups(dtype):
    top = np.finfo(np.float32).max
    for special in [np.nan, np.inf, -np.inf] + ([2.0**127, -top] if dtype != np.float16 else []):
        x = np.zeros((2, 256), dtype)
        x[0, :3] = [special, 0.3, -1e-3]
        x[0, 128:131] = [0.3, -0.3, 1]
        _, exponents = reference.cast_to_logfmt(x)
        assert exponents.tolist()[0] == [logfmt.RAW, 127]
        got = through(x)
        assert np.array_equal(got[0, :128], x[0, :128].astype(np.float32), equal_nan=True)
        assert got[0, 128] != x[0, 128].astype(np.float32) and got[0, 130] == 1


def test_zeros_and_subnormals():
    x = group(-0.0, 0.0, 1e-45, -1e-45, 1e-40, np.float32(2**-127))
    codes, exponents = reference.cast_to_logfmt(x)
    assert exponents[0, 0] == 1  # that of 2**-126
    assert codes[0, 0] == 512 and codes[0, 1] == 0
    got = through(x)
    assert np.signbit(got[0]).tolist()[:4] == [True, False, False, True]
    assert got[0, 5] == np.float32(2**-127) and abs(got[0, 4] - 1e-40) < 1.1e-42
    assert np.array_equal(through(group()), group())


def test_wrong_shapes():
    with pytest.raises(ValueError, match="multiple of 128"):
        reference.cast_to_logfmt(np.zeros((1, 64), np.float32))
