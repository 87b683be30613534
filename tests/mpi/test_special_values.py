"""NaN payloads, infinities, -0, subnormals, under any control word and instruction set: the same bits."""

import contextlib
import ctypes
import mmap
import platform
from itertools import product

import numpy as np
import pytest

from epcy import reference
from mpi import low_latency_cases as low_latency
from mpi.cases import DTYPES, assert_bits, check_combine, check_dispatch, draw, draw_rows, to_device, to_host

CODE = {  # x86-64 machine code, System V calls
    "set": b"\x0f\xae\x17\xc3",  # ldmxcsr [rdi]; ret
    "get": b"\x0f\xae\x1f\xc3",  # stmxcsr [rdi]; ret
}
FTZ_DAZ, UPWARD = 0x8040, 0x4000


@contextlib.contextmanager
def control_word(extra):
    """Set bits of this thread's MXCSR, as a library built with -ffast-math does."""
    if platform.machine() != "x86_64":
        pytest.skip("x86-64 code")
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page[:8] = CODE["set"] + CODE["get"]
    start = ctypes.addressof(ctypes.c_char.from_buffer(page))
    write, read = (ctypes.CFUNCTYPE(None, ctypes.c_void_p)(start + at) for at in (0, 4))
    word = ctypes.c_uint32()
    read(ctypes.addressof(word))
    before = word.value
    try:
        write(ctypes.addressof(ctypes.c_uint32(before | extra)))
        yield lambda: (read(ctypes.addressof(word)), word.value & extra == extra)[1]
    finally:
        write(ctypes.addressof(ctypes.c_uint32(before)))


@pytest.fixture(params=[0, 1, 2])
def simd(request, backend):
    """Each instruction set in turn; those that this processor lacks are the one below again."""
    if backend != "host":
        if request.param:
            pytest.skip("a GPU has one instruction set")
        yield None
        return
    from epcy.backends.casts import simd_level

    best = simd_level()
    yield simd_level(request.param)
    simd_level(best)


@pytest.mark.parametrize("hidden", [8, 248])
def test_any_bits(comm, make_buffer, simd, hidden):
    buf = make_buffer(hidden=hidden, num_topk=4, dtype="float32")
    size = {"num_experts": 4 * comm.size, "num_topk": 4, "hidden": hidden}
    for seed, (layout, dtype) in enumerate(product(("rank", "expert"), ("bfloat16", "float16", "float32"))):
        sent = draw(seed, comm.size, 12, dtype=dtype, special=True, **size)
        r, routing = check_dispatch(buf, sent, layout=layout, alignment=1 if layout == "rank" else 4)
        for num_biases in range(3):
            check_combine(buf, r.handle, routing, seed, dtype=dtype, num_biases=num_biases, special=True)


def test_fp8_bytes_and_scales_are_only_copied(comm, make_buffer, simd):
    buf = make_buffer()
    for layout in ("rank", "expert"):
        sent = draw(1, comm.size, 16, num_experts=4 * comm.size, dtype="fp8", special=True)
        check_dispatch(buf, sent, layout=layout)


@pytest.mark.host_only("the processor's control word")
@pytest.mark.parametrize("num_sms", [1, 2])
def test_callers_control_word(comm, make_buffer, simd, num_sms):
    buf = make_buffer(hidden=64, dtype="float32", num_sms=num_sms, num_max_tokens_per_rank=64)
    for dtype in ("bfloat16", "float16", "float32"):
        size = {"num_experts": 4 * comm.size, "hidden": 64, "unused": 0.0}
        sent = draw(2, comm.size, 64, dtype=dtype, special=True, **size)
        r, routing = check_dispatch(buf, sent, layout="expert")
        rng = np.random.default_rng(3)
        rows = [draw_rows(rng, routing.num_rows(rank), 64, dtype, True) for rank in range(comm.size)]
        want = reference.combine(rows, routing, sent.weights)[comm.rank][0]
        for extra in (FTZ_DAZ, UPWARD):
            with control_word(extra) as is_set:
                got = buf.combine(rows[comm.rank], r.handle, sent.weights[comm.rank]).combined_x
                kept = is_set()
            assert kept, "the caller's control word is not as it was"
            assert_bits(got, want, "combined_x")


def test_subnormal_sums_are_kept(comm, make_buffer, simd):
    buf = make_buffer(dtype="float32", num_topk=1, hidden=8)
    rows = np.full((2, 8), 1e-40, np.float32)
    x, idx = to_device(buf, (rows, np.zeros((2, 1), np.int64)))
    r = buf.dispatch(x, idx)
    got = to_host(buf.combine(r.recv_x, r.handle, bias=x).combined_x)
    assert np.array_equal(got, rows + rows) and got.all()


# ---- low latency


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_low_latency_any_bits(comm, make_buffer, simd, dtype):
    buf = make_buffer(dtype="float32", num_topk=4, low_latency_mode=True)
    size = {"num_experts": 4 * comm.size, "num_topk": 4, "dtype": dtype, "special": True}
    for seed, scales in enumerate(({}, {"round_scale": True}, {"round_scale": True, "use_ue8m0": True})):
        sent = draw(seed, comm.size, 12, **size)
        handle, routing = low_latency.check_dispatch(buf, sent, **scales)
        for reduction, use_logfmt in product(("rank", "source"), (False, True)):
            low_latency.check_combine(
                buf, handle, routing, seed, dispatched=sent.weights, dtype=dtype, special=True,
                reduction=reduction, use_logfmt=use_logfmt,
            )  # fmt: skip


def wide_rows(rng, shape, dtype):
    """Finite rows, each group of 128 about an exponent of its own, from subnormals to the largest."""
    kind = DTYPES[dtype]
    bits = 8 * kind.itemsize
    mantissa = {"bfloat16": 7, "float16": 10, "float32": 23}[dtype]
    top = 2 ** (bits - 1 - mantissa) - 1  # the exponent of infinities
    about = np.repeat(rng.integers(0, top, (*shape[:-1], shape[-1] // 128)), 128, axis=-1)
    exponent = np.clip(about - rng.integers(0, 20, shape), 0, top - 1).astype(f"u{kind.itemsize}")
    rest = rng.integers(0, 2**mantissa, shape, f"u{kind.itemsize}")
    sign = rng.integers(0, 2, shape, f"u{kind.itemsize}")
    return (sign << (bits - 1) | exponent << mantissa | rest).view(kind)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_logfmt_of_every_exponent(comm, make_buffer, simd, dtype):
    buf = make_buffer(dtype="float32", num_topk=3, hidden=1024, low_latency_mode=True)
    sent = draw(1, comm.size, 16, num_experts=4 * comm.size, num_topk=3, hidden=1024)
    handle, routing = low_latency.check_dispatch(buf, sent)
    rng = np.random.default_rng(5)
    ys = [wide_rows(rng, (4, 16 * comm.size, 1024), dtype) for _ in range(comm.size)]
    y = to_device(buf, ys[comm.rank])
    for reduction in ("rank", "source"):
        options = {"reduction": reduction, "use_logfmt": True}
        got, _, _ = buf.low_latency_combine(y, None, None, handle, **options)
        assert_bits(
            got, reference.low_latency_combine(ys, routing, sent.weights, **options)[comm.rank], "combined_x"
        )
