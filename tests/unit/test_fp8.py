"""Casts to and from e4m3 with scales equal the reference on every instruction set."""

import ml_dtypes
import numpy as np
import pytest

import epcy
from epcy import reference
from epcy.backends.casts import simd_level
from mpi.cases import assert_bits, draw_rows


@pytest.fixture(params=[0, 1, 2])
def simd(request):
    best = simd_level()
    yield simd_level(request.param)
    simd_level(best)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("options", [{}, {"round_scale": True}, {"round_scale": True, "use_ue8m0": True}])
def test_to_fp8(simd, dtype, special, options):
    x = draw_rows(np.random.default_rng(1), 40, 1024, dtype, special)
    x[3] = 0
    x[4, :128] = x.dtype.type(1e-6)
    assert_bits(epcy.cast_to_fp8(x, **options), reference.cast_to_fp8(x, **options), "pair")


@pytest.mark.parametrize("round_scale", [False, True])
def test_groups_of_every_magnitude(simd, round_scale):
    x = np.ldexp(np.float32(1), np.arange(-149, 128))[:, None] * np.linspace(
        -1.999, 1.999, 128, dtype=np.float32
    )
    x = x.astype(np.float32)
    want = reference.cast_to_fp8(x, round_scale=round_scale)
    assert_bits(epcy.cast_to_fp8(x, round_scale=round_scale), want, "pair")


def test_every_fp16_value(simd):
    x = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(512, 128)
    assert_bits(epcy.cast_to_fp8(x), reference.cast_to_fp8(x), "pair")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("hidden", [128, 200, 8])
def test_from_fp8(simd, dtype, hidden):
    payload = np.arange(64 * hidden, dtype=np.uint32).astype(np.uint8).reshape(64, hidden)
    _, scales = draw_rows(np.random.default_rng(2), 64, hidden, "fp8", True)
    kind = np.dtype(dtype if dtype != "bfloat16" else ml_dtypes.bfloat16)
    want = reference.cast_from_fp8(payload, scales, kind)
    assert_bits(epcy.cast_from_fp8(payload, scales, kind), want, "rows")
    as_float8 = np.asfortranarray(payload.view(ml_dtypes.float8_e4m3fn))
    assert_bits(epcy.cast_from_fp8(as_float8, np.asfortranarray(scales), kind), want, "rows")


def test_no_rows():
    payload, scales = epcy.cast_to_fp8(np.zeros((0, 256), np.float32))
    assert payload.shape == (0, 256) and scales.shape == (0, 2)
    assert epcy.cast_from_fp8(payload, scales).shape == (0, 256)


X = np.ones((4, 128), np.float32)
PAIR = np.ones((4, 128), np.uint8), np.ones((4, 1), np.float32)


@pytest.mark.parametrize(
    "call, texts",
    [
        (lambda: epcy.cast_to_fp8(X.astype(np.float64)), ("x: ", "bfloat16", "float64")),
        (lambda: epcy.cast_to_fp8(X[:, :100]), ("x: ", "multiple of 128", "100")),
        (lambda: epcy.cast_to_fp8(X[0]), ("x: ", "2 dimensions", "(128,)")),
        (lambda: epcy.cast_to_fp8(X, use_ue8m0=True, round_scale=True), ("x: ", "multiple of 512", "128")),
        (
            lambda: epcy.cast_to_fp8(np.ones((1, 512), "f4"), use_ue8m0=True),
            ("use_ue8m0: ", "round_scale=True"),
        ),
        (lambda: epcy.cast_from_fp8(X, PAIR[1]), ("payload: ", "uint8", "float32")),
        (lambda: epcy.cast_from_fp8(PAIR[0], PAIR[1][:3]), ("scales: ", "(4, 1)", "(3, 1)")),
        (lambda: epcy.cast_from_fp8(*PAIR, np.int8), ("dtype: ", "float32", "int8")),
    ],
)
def test_wrong_arguments(call, texts):
    with pytest.raises(epcy.ArgumentError) as caught:
        call()
    for text in texts:
        assert text in str(caught.value)
