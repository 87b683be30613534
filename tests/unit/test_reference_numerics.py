"""Bits: rounding, NaN, zero, the order of sums, and the e4m3 casts of the reference."""

import ctypes
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epcy import reference

BF16 = np.dtype(ml_dtypes.bfloat16)
FP16 = np.dtype(np.float16)
FP32 = np.dtype(np.float32)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOATS = [BF16, FP16, FP32]
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def bits(x):
    return np.ascontiguousarray(x).view(BITS[x.dtype.itemsize])


def f32(*values):
    return np.array(values, dtype=np.float32)


def f32_bits(*values):
    return np.array(values, dtype=np.uint32).view(np.float32)


# ---------------------------------------------------------------- one rounding


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0x3F808000, 0x3F80),  # half way: to even, down
        (0x3F818000, 0x3F82),  # half way: to even, up
        (0x3F808001, 0x3F81),
        (0x3F807FFF, 0x3F80),
        (0x7F7F7FFF, 0x7F7F),
        (0x7F7F8000, 0x7F80),  # overflow to infinity
        (0x00008000, 0x0000),  # subnormals round like the rest
        (0x00018000, 0x0002),
        (0x80000001, 0x8000),  # -0 stays -0
        (0xFFFFFFFF, 0x7FC0),
        (0x7F800001, 0x7FC0),  # its upper half alone would read as infinity
    ],
)
def test_round_to_bf16(value, expected):
    assert bits(reference.round_to(f32_bits(value), BF16)).tolist() == [expected]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1 + 2.0**-11, 0x3C00),
        (1 + 3 * 2.0**-11, 0x3C02),
        (65519.0, 0x7BFF),
        (65520.0, 0x7C00),
        (-1e10, 0xFC00),
        (2.0**-25, 0x0000),  # half of the smallest subnormal: to even
        (3 * 2.0**-25, 0x0002),
        (2.0**-24, 0x0001),
        (-(2.0**-26), 0x8000),
        (-math.nan, 0x7E00),
    ],
)
def test_round_to_fp16(value, expected):
    assert bits(reference.round_to(f32(value), FP16)).tolist() == [expected]


def test_round_to_fp32_changes_only_nan():
    x = f32_bits(0x80000000, 0x00000001, 0xFF800000, 0x7F800001, 0xFFC12345)
    out = reference.round_to(x, FP32)
    assert bits(out).tolist() == [0x80000000, 0x00000001, 0xFF800000, 0x7FC00000, 0x7FC00000]
    assert not np.shares_memory(out, x)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (448, 0x7E),
        (465, 0x7E),  # saturates; half way to the next code and beyond is still 448
        (1e30, 0x7E),
        (-1e30, 0xFE),
        (math.inf, 0x7E),
        (-math.inf, 0xFE),
        (math.nan, 0x7F),
        (-math.nan, 0x7F),
        (1.0625, 0x38),  # half way between 1 and 1.125: to even
        (1.1875, 0x3A),
        (2.0**-9, 0x01),  # smallest subnormal
        (2.0**-10, 0x00),
        (3 * 2.0**-10, 0x02),
        (-(2.0**-10), 0x80),
    ],
)
def test_round_to_e4m3(value, expected):
    assert bits(reference.round_to(f32(value), E4M3)).tolist() == [expected]


def test_round_to_takes_float32_to_a_payload_type_only():
    with pytest.raises(ValueError, match="float64"):
        reference.round_to(np.zeros(1), BF16)
    with pytest.raises(ValueError, match="int32"):
        reference.round_to(f32(0), np.int32)


# ---------------------------------------------------------------- what is copied, and what is computed


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_dispatch_copies_every_bit_pattern(dtype, layout):
    if dtype == FP32:
        nan_payloads = np.arange(0x7F800000, 0x7F800000 + 2**23, 4099, dtype=np.uint32)
        x = np.concatenate(
            [nan_payloads, nan_payloads | np.uint32(0x80000000), np.arange(9, dtype=np.uint32)]
        )
    else:
        x = np.arange(2**16, dtype=np.uint16)
    x = x.reshape(1, -1).view(dtype)
    w = f32_bits(0xFFC12345, 0x7F800001).reshape(1, 2)
    idxs = [np.array([[1, 0]]), np.zeros((0, 2), np.int64)]
    (r0, r1), routing = reference.dispatch([x, x[:0]], idxs, [w, w[:0]], num_experts=2, layout=layout)
    for r in (r0, r1):
        assert r.recv_x.tobytes() == x.tobytes()
    if layout == "rank":
        assert bits(r0.recv_topk_weights).tolist() == [[0, 0x7F800001]]
        assert bits(r1.recv_topk_weights).tolist() == [[0xFFC12345, 0]]
        back = reference.combine(
            [r0.recv_x, r1.recv_x], routing, [r0.recv_topk_weights, r1.recv_topk_weights]
        )
        assert back[0][1].tobytes() == w.tobytes()
    else:
        assert bits(r0.recv_topk_weights).tolist() == [0x7F800001]


def gather(rows, dtype, bias=None, **kwargs):
    """Combine one token that rank 0 sent to every rank; rows[r] is what rank r answers."""
    num_ranks = len(rows)
    idxs = [np.zeros((0, num_ranks), np.int64) for _ in rows]
    idxs[0] = np.arange(num_ranks).reshape(1, -1)
    xs = [np.zeros((len(idx), len(rows[0])), dtype) for idx in idxs]
    _, routing = reference.dispatch(xs, idxs, num_experts=num_ranks, layout=kwargs.pop("layout", "rank"))
    ys = [np.array([row]).astype(dtype) for row in rows]
    biases = None if bias is None else [bias, *[None] * (num_ranks - 1)]
    return reference.combine(ys, routing, bias=biases, **kwargs)[0][0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_combine_computes_so_nan_is_canonical_and_minus_zero_is_plus_zero(dtype, layout):
    inf = math.inf
    out = gather([[inf, -0.0, 1.0], [-inf, -0.0, -math.nan]], dtype, layout=layout)
    nan = {BF16: 0x7FC0, FP16: 0x7E00, FP32: 0x7FC00000}[dtype]
    assert bits(out).tolist() == [[nan, 0, nan]]


def test_a_token_routed_nowhere_gives_the_bias_rounded_from_plus_zero():
    x = np.ones((1, 3), BF16)
    _, routing = reference.dispatch([x], [np.array([[-1]])], num_experts=1)
    bias = np.array([[0x8000, 0xFFC1, 0x0001]], np.uint16).view(BF16)
    ((out, _),) = reference.combine([x[:0]], routing, bias=[bias])
    assert bits(out).tolist() == [[0x0000, 0x7FC0, 0x0001]]


def test_ranks_are_added_in_ascending_order():
    big = 2.0**24
    assert gather([[big], [1.0], [-big]], FP32).tolist() == [[0.0]]
    assert gather([[big], [-big], [1.0]], FP32).tolist() == [[1.0]]


def test_bias_is_added_before_the_ranks():
    bias = np.array([[2.0**24]], np.float32)
    assert gather([[1.0], [1.0]], FP32, bias=bias).tolist() == [[2.0**24]]
    assert gather([[1.0], [1.0]], FP32, bias=(bias, -bias)).tolist() == [[2.0]]


def test_rank_layout_rounds_once_and_not_a_rank():
    # 1 + 2^-8 + 2^-8: each step alone would tie to even and be lost in bf16.
    assert gather([[1.0], [2.0**-8], [2.0**-8]], BF16).tolist() == [[1 + 2.0**-7]]
    assert gather([[65504.0], [65504.0], [-65504.0]], FP16).tolist() == [[65504.0]]


def test_hierarchical_path_rounds_a_node_and_one_node_is_direct():
    rows = [[1.0], [2.0**-8], [2.0**-8], [0.0]]
    assert gather(rows, BF16, ranks_per_node=2).tolist() == [[1 + 2.0**-7]]
    assert gather(rows, BF16, ranks_per_node=2, path="hierarchical").tolist() == [[1.0]]
    # (1 + 2^-8 + 2^-8) in a node of three, and in a node of all: nothing is lost.
    assert gather(rows, BF16, ranks_per_node=3, path="hierarchical").tolist() == [[1 + 2.0**-7]]
    assert gather(rows, BF16, ranks_per_node=1, path="hierarchical").tolist() == [[1 + 2.0**-7]]
    bias = np.array([[2.0**-8]]).astype(BF16)
    for ranks_per_node in (None, 2, 4):
        one_node = gather(rows[:2], BF16, bias=bias, ranks_per_node=ranks_per_node, path="hierarchical")
        assert one_node.tolist() == [[1 + 2.0**-7]]
    assert gather(rows[:2], BF16, bias=bias, ranks_per_node=1, path="hierarchical").tolist() == [
        [1 + 2.0**-7]
    ]
    assert gather(
        [*rows[:2], [0.0], [0.0]], BF16, bias=bias, ranks_per_node=2, path="hierarchical"
    ).tolist() == [[1.0]]


def one_rank(ys, w, layout="expert"):
    """Combine one token whose lanes all live on one rank."""
    num_topk = len(ys)
    y = np.array(ys).reshape(num_topk, 1)
    x = np.zeros((1, 1), y.dtype)
    _, routing = reference.dispatch(
        [x], [np.arange(num_topk).reshape(1, -1)], num_experts=num_topk, layout=layout
    )
    return reference.combine([y], routing, [np.array([w], np.float32)])[0][0]


def test_a_product_is_rounded_before_it_is_added():
    # Fused, (1 + 2^-12)^2 - (1 + 2^-11) would keep the last bit, 2^-24.
    a = np.float32(1 + 2.0**-12)
    assert one_rank([np.float32(-(1 + 2.0**-11)), a], [1.0, a]).tolist() == [[0.0]]
    assert Fraction(float(a)) ** 2 - Fraction(1 + 2.0**-11) == Fraction(1, 2**24)


def test_lanes_are_added_in_ascending_order_and_subnormals_are_kept():
    big, one = np.float32(2.0**24), np.float32(1)
    assert one_rank([big, one, -big], [1, 1, 1]).tolist() == [[0.0]]
    assert one_rank([big, -big, one], [1, 1, 1]).tolist() == [[1.0]]
    tiny = one_rank([np.float32(2.0**-126), np.float32(0)], [2.0**-10, 1])
    assert bits(tiny).tolist() == [[1 << 13]]


def test_reduction_at_the_source_rounds_once_and_at_the_rank_once_a_rank():
    # Ranks 0 and 1 own two experts each; lanes 0 and 1 live on rank 0, lane 2 on rank 1.
    x = np.ones((1, 1), BF16)
    idxs = [np.array([[0, 1, 2]]), np.zeros((0, 3), np.int64)]
    _, routing = reference.low_latency_dispatch(
        [x, x[:0]], idxs, num_experts=4, num_max_tokens_per_rank=1, use_fp8=False
    )
    ys = [np.zeros((2, 2, 1), BF16), np.zeros((2, 2, 1), BF16)]
    ys[0][:, 0] = [[1.0], [2.0**-8]]
    ys[1][0, 0] = 2.0**-8
    for reduction, expected in (("rank", 1.0), ("source", 1 + 2.0**-7)):
        out = reference.low_latency_combine(ys, routing, None, reduction=reduction)
        assert out[0].tolist() == [[expected]]
    with pytest.raises(ValueError, match="reduction"):
        reference.low_latency_combine(ys, routing, None, reduction="node")


# ---------------------------------------------------------------- e4m3 with scales


def e4m3_value(code):
    exponent, mantissa = code >> 3 & 15, code & 7
    value = (
        Fraction(mantissa, 8) * Fraction(2) ** -6
        if exponent == 0
        else Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)
    )
    return -value if code & 0x80 else value


E4M3_CODES = [(e4m3_value(code), code) for code in range(0x7F)]


def nearest_e4m3(value):
    """The code of a finite value: nearest, ties to the even code, saturating."""
    magnitude = abs(Fraction(value))
    code = min(E4M3_CODES, key=lambda pair: (abs(pair[0] - magnitude), pair[1] & 1))[1]
    return code | (0x80 if math.copysign(1, value) < 0 else 0)


def to_f32(x):
    return ctypes.c_float(x).value


def group(*values):
    """One token of one group of 128, with these values first."""
    x = np.zeros((1, 128), np.float32)
    x[0, : len(values)] = values
    return x


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=150, deadline=None)
@given(st.lists(finite, min_size=1, max_size=8), st.booleans())
def test_cast_against_exact_fractions(values, round_scale):
    payload, scales = reference.cast_to_fp8(group(*values), round_scale=round_scale)
    amax = max([abs(v) for v in values] + [to_f32(1e-4)])
    scale = to_f32(amax / 448)
    factor = to_f32(448 / amax)
    if round_scale:
        mantissa, exponent = math.frexp(scale)
        scale = math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)
        factor = to_f32(1 / scale)
    assert scales.tolist() == [[scale]]
    expected = [nearest_e4m3(to_f32(v * factor)) for v in values]
    assert payload[0, : len(values)].tolist() == expected
    back = reference.cast_from_fp8(payload, scales, np.float32)[0, : len(values)].tolist()
    assert back == [to_f32(float(e4m3_value(code)) * scale) for code in expected]


def test_cast_of_hand_worked_groups():
    payload, scales = reference.cast_to_fp8(group(448, -448, 1, -0.0))
    assert scales.tolist() == [[1.0]]
    assert payload[0, :5].tolist() == [0x7E, 0xFE, 0x38, 0x80, 0x00]
    # All zeros: the floor 1e-4 keeps the scale finite.
    payload, scales = reference.cast_to_fp8(group())
    assert not payload.any()
    assert scales[0, 0] == np.float32(1e-4) / np.float32(448)
    # A power of two stays, the next float goes up.
    for amax, scale in ((448 * 4, 4.0), (np.nextafter(np.float32(448 * 4), np.float32(9e9)), 8.0)):
        assert reference.cast_to_fp8(group(amax), round_scale=True)[1].tolist() == [[scale]]


@pytest.mark.parametrize(
    ("amax", "x", "code"),
    [
        (0x3FF4D52D, 0x3EB79FE2, 0x6A),  # x / scale and x * (1 / scale) would both give 0x6B
        (0x3F821D94, 0x3A06C335, 0x27),  # x / scale would give 0x26
        (0x3F914AD8, 0x3B8C1A75, 0x3E),  # x * (1 / scale) would give 0x3D
    ],
)
def test_cast_multiplies_by_448_over_amax(amax, x, code):
    payload, _ = reference.cast_to_fp8(group(*f32_bits(amax, x)))
    assert payload[0, 1] == code


@pytest.mark.parametrize("round_scale", [False, True])
def test_cast_of_nan_and_infinity(round_scale):
    payload, scales = reference.cast_to_fp8(group(1, *f32_bits(0xFFC12345)), round_scale=round_scale)
    assert (payload == 0x7F).all()
    assert bits(scales).tolist() == [[0x7FC00000]]
    payload, scales = reference.cast_to_fp8(group(1, -math.inf, -2), round_scale=round_scale)
    assert payload[0, :4].tolist() == [0x00, 0x7F, 0x80, 0x00]
    assert bits(scales).tolist() == [[0x7F800000]]


def test_ue8m0_packs_four_exponents_low_first():
    x = np.repeat(np.float32([448, 448 * 2, 448 * 2.0**-20, math.nan]), 128).reshape(1, 512)
    payload, scales = reference.cast_to_fp8(x, round_scale=True, use_ue8m0=True)
    assert scales.dtype == np.int32
    assert scales.shape == (1, 1)
    assert int(scales[0, 0]) & 0xFFFFFFFF == 127 | 128 << 8 | 107 << 16 | 255 << 24
    plain, float_scales = reference.cast_to_fp8(x, round_scale=True)
    assert payload.tobytes() == plain.tobytes()
    for dtype in FLOATS:
        back = reference.cast_from_fp8(payload, scales, dtype)
        assert back.tobytes() == reference.cast_from_fp8(plain, float_scales, dtype).tobytes()
        assert bits(back)[0, -1] == reference.CANONICAL_NAN[dtype]


def test_cast_from_takes_a_short_last_group_and_more_dimensions():
    payload = np.full((2, 3, 130), 0x38, np.uint8)
    scales = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    back = reference.cast_from_fp8(payload, scales, BF16)
    assert back.shape == payload.shape
    assert back[1, 2, 127:].astype(np.float32).tolist() == [10, 11, 11]


@pytest.mark.parametrize("dtype", FLOATS)
def test_cast_takes_every_payload_type_any_order_and_no_tokens(dtype):
    x = np.random.default_rng(0).standard_normal((5, 512)).astype(dtype)
    expected = reference.cast_to_fp8(x.astype(np.float32))
    for got in (reference.cast_to_fp8(x), reference.cast_to_fp8(np.asfortranarray(x))):
        assert [a.tobytes() for a in got] == [a.tobytes() for a in expected]
    payload, scales = reference.cast_to_fp8(x[:0], round_scale=True, use_ue8m0=True)
    assert (payload.shape, scales.shape) == ((0, 512), (0, 1))


def test_cast_refuses_sizes_without_whole_groups():
    with pytest.raises(ValueError, match="128"):
        reference.cast_to_fp8(np.zeros((1, 130), np.float32))
    with pytest.raises(ValueError, match="512"):
        reference.cast_to_fp8(np.zeros((1, 128), np.float32), round_scale=True, use_ue8m0=True)
    with pytest.raises(ValueError, match="round_scale"):
        reference.cast_to_fp8(np.zeros((1, 512), np.float32), use_ue8m0=True)
