"""Every wrong argument: its class, its name, what was seen and expected; on one rank and on all; the Buffer goes on."""

import functools

import ml_dtypes
import numpy as np
import pytest

import epcy
from mpi.cases import BFLOAT16, check_combine, check_dispatch, draw, raised, to_device, told

T, H, K = 4, 512, 2
X = np.ones((T, H), BFLOAT16)
IDX = np.zeros((T, K), np.int64)
W = np.ones((T, K), np.float32)
PAYLOAD, SCALES = np.ones((T, H), np.uint8), np.ones((T, 4), np.float32)


def place(buf, options):
    """The options with their arrays in the backend's memory; a function is called with the array module."""
    return {
        name: to_device(buf, value(buf.xp) if callable(value) else value) for name, value in options.items()
    }


def d(*texts, error=epcy.ArgumentError, x=X, idx=IDX, w=None, **options):
    """A dispatch that is wrong; the texts that its error must hold, the argument's name first."""
    options |= {"x": x, "topk_idx": idx, "topk_weights": w}
    return texts, error, lambda buf, handle: buf.dispatch(**place(buf, options))


def again(*texts, x=X, **options):
    """A dispatch on a handle that is wrong."""
    options["x"] = x
    return texts, epcy.ArgumentError, lambda buf, handle: buf.dispatch(handle=handle, **place(buf, options))


def c(*texts, rows=None, **options):
    """A combine that is wrong; `rows` makes y of the handle's number of rows."""

    def call(buf, handle):
        y = np.ones((handle.num_rows, H), BFLOAT16)
        y = to_device(buf, y if rows is None else rows(y))
        return buf.combine(y, handle, **place(buf, options))

    return texts, epcy.ArgumentError, call


DISPATCH = {
    "x is a list of numbers": d("x: ", "array", x=3.5),
    "x is None": d("x: ", "NoneType", x=None),
    "x has one dimension": d("x: ", "(T, 512)", "(512,)", x=X[0]),
    "x has three dimensions": d("x: ", "(T, 512)", "(1, 4, 512)", x=X[None]),
    "x has another H": d("x: ", "(T, 512)", "(4, 256)", x=np.ones((T, 256), BFLOAT16)),
    "x is float64": d("x: ", "bfloat16", "float64", x=np.ones((T, H))),
    "x is of the other byte order": d("x: ", "float16", ">f2", x=np.ones((T, H), ">f2")),
    "x is wider than the Buffer": d("x: ", "bfloat16", "float32", x=np.ones((T, H), np.float32)),
    "x is fp8 without scales": d("x: ", "uint8", "pair", x=PAYLOAD),
    "x is a triple": d("x: ", "pair", "3 items", x=(X, X, X)),
    "payload is bf16": d("x[0]: ", "uint8", "bfloat16", x=(X, SCALES)),
    "payload has another H": d("x[0]: ", "(T, 512)", "(4, 8)", x=(PAYLOAD[:, :8], SCALES)),
    "scales of another shape": d("x[1]: ", "(4, 4)", "(4, 3)", x=(PAYLOAD, SCALES[:, :3])),
    "scales are float64": d("x[1]: ", "float32", "float64", x=(PAYLOAD, SCALES.astype(np.float64))),
    "too many tokens": d(
        "x: ",
        "17 tokens",
        "num_max_tokens_per_rank=16",
        x=np.ones((17, H), BFLOAT16),
        error=epcy.CapacityError,
    ),
    "no ids": d("topk_idx: ", "(4, 2)", "handle=", "None", idx=None),
    "ids of another T": d("topk_idx: ", "(4, 2)", "(3, 2)", idx=IDX[:3]),
    "ids of another K": d("topk_idx: ", "(4, 2)", "(4, 1)", idx=IDX[:, :1]),
    "ids are float": d("topk_idx: ", "int64", "int32", "float32", idx=IDX.astype(np.float32)),
    "ids are uint64": d("topk_idx: ", "int64", "uint64", idx=IDX.astype(np.uint64)),
    "ids are int16": d("topk_idx: ", "int64", "int16", idx=IDX.astype(np.int16)),
    "ids are a string": d("topk_idx: ", "str", idx="01"),
    "an id is E": d("topk_idx[0, 0]: ", "-1", idx=IDX + 10**6),
    "weights of another shape": d("topk_weights: ", "(4, 2)", "(2, 4)", w=W.T),
    "weights are float64": d("topk_weights: ", "float32", "float64", w=W.astype(np.float64)),
    "no such layout": d("layout: ", "'rank' or 'expert'", "'row'", layout="row"),
    "alignment 0": d("expert_alignment: ", "from 1", "0", layout="expert", expert_alignment=0),
    "alignment is float": d(
        "expert_alignment: ", "whole number", "1.5", layout="expert", expert_alignment=1.5
    ),
    "alignment in the rank layout": d("expert_alignment: ", "1 in the rank layout", "8", expert_alignment=8),
    "num_worst_tokens below 0": d("num_worst_tokens: ", "from 0", "-1", num_worst_tokens=-1),
    "num_worst_tokens too large": d(
        "num_worst_tokens: ", "num_max_recv_tokens", str(10**9), num_worst_tokens=10**9
    ),
    "num_worst_tokens is a string": d("num_worst_tokens: ", "whole number", "'8'", num_worst_tokens="8"),
    "a stream": d("stream: ", "None", "7", stream=7),
    "a stream by name": d("stream: ", "stream", "'s'", stream="s"),
    "an event that is none": d("previous_event: ", "Event", "'now'", previous_event="now"),
    "out is a string": d("out: ", "array", "str", out="mine"),
    "out of another H": d("out: ", "512", "(64, 256)", out=np.zeros((64, 256), BFLOAT16)),
    "out of another dtype": d("out: ", "dtype", "float16", out=np.zeros((64, H), np.float16)),
    "out is a pair": d("out: ", "array", "tuple", out=(X, X)),
    "out is one for a pair": d(
        "out: ", "pair", "ndarray", x=(PAYLOAD, SCALES), out=np.zeros((64, H), np.uint8)
    ),
    "handle of another kind": d("handle: ", "handle of a dispatch", "str", idx=None, handle="h"),
    "handle and ids": again("topk_idx: ", "None with handle=", topk_idx=IDX),
    "handle of another T": again("x: ", "the handle's 4 tokens", "3", x=X[:3]),
    "handle of another layout": again("layout: ", "'rank'", "'expert'", layout="expert"),
    "handle of another alignment": again("expert_alignment: ", "1", "4", expert_alignment=4),
    "handle without num_worst_tokens": again("num_worst_tokens: ", "0", "8", num_worst_tokens=8),
}
COMBINE = {
    "x is a pair": c("x: ", "array", "tuple", rows=lambda y: (y, y)),
    "x has another N": c("x: ", "512", rows=lambda y: np.ones((len(y) + 1, H), BFLOAT16)),
    "x has another H": c("x: ", "512", "256", rows=lambda y: y[:, :256]),
    "x is float64": c("x: ", "float64", "bfloat16", rows=lambda y: y.astype(np.float64)),
    "x is uint8": c("x: ", "uint8", rows=lambda y: y.astype(np.uint8)),
    "x is wider than the Buffer": c("x: ", "bfloat16", "float32", rows=lambda y: y.astype(np.float32)),
    "x is None": c("x: ", "NoneType", rows=lambda y: None),
    "weights of another N": c("topk_weights: ", "2", "(1, 3)", topk_weights=np.ones((1, 3), np.float32)),
    "bias of another T": c("bias: ", "(4, 512)", "(3, 512)", bias=X[:3]),
    "bias of another dtype": c("bias: ", "bfloat16", "float16", bias=X.astype(np.float16)),
    "three biases": c("bias: ", "pair", "3 items", bias=(X, X, X)),
    "second bias is wrong": c("bias[1]: ", "(4, 512)", "(4, 8)", bias=(X, X[:, :8])),
    "out of another T": c("out: ", "(4, 512)", "(5, 512)", out=np.zeros((5, H), BFLOAT16)),
    "out of another dtype": c("out: ", "bfloat16", "float32", out=np.zeros((T, H), np.float32)),
    "out is not contiguous": c("out: ", "contiguous", out=lambda xp: xp.zeros((T, 2 * H), BFLOAT16)[:, ::2]),
    "out is True": c("out: ", "array", "bool", out=True),
    "a stream": c("stream: ", "None", "'s'", stream="s"),
    "an event that is none": c("previous_event: ", "Event", "1", previous_event=1),
    "handle is None": (
        ("handle: ", "NoneType"),
        epcy.ArgumentError,
        lambda buf, handle: buf.combine(to_device(buf, X), None),
    ),
}
# CuPy has no arrays of the other byte order, and a number may be a stream's address.
HOST_ONLY = {"x is of the other byte order", "a stream"}


@pytest.fixture
def buf(make_buffer):
    return make_buffer(num_max_recv_tokens=512, timeout=20)


@pytest.mark.parametrize("everybody", [False, True])
@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_wrong_argument(comm, buf, everybody, operation):
    handle = buf.dispatch(*to_device(buf, (X, IDX))).handle
    for number, (title, (texts, kind, wrong)) in enumerate(
        (DISPATCH if operation == "dispatch" else COMBINE).items()
    ):
        if title in HOST_ONLY and buf.backend != "host":
            continue
        culprit = number % comm.size
        if everybody or comm.rank == culprit:
            error = raised(lambda: wrong(buf, handle))  # noqa: B023
            assert type(error) is kind, f"{title}: {error!r}"
            assert str(error).startswith(texts[0]), f"{title}: {error}"
            for text in (*texts, f"rank {comm.rank}"):
                assert text in str(error), f"{title}: {error}"
            words = str(error)
        else:
            good = np.ones((handle.num_rows, H), BFLOAT16)
            right = {"dispatch": (buf.dispatch, X, IDX), "combine": (buf.combine, good, handle)}[operation]
            error = told(buf, functools.partial(*to_device(buf, right)))
            assert type(error) is epcy.PeerError and error.ranks == (culprit,), f"{title}: {error!r}"
            assert f"rank {culprit} refused {operation}" in str(error), f"{title}: {error}"
            words = str(error).partition(": ")[2]
        if not everybody and number % 8 == 0:
            assert len(set(comm.allgather(words))) == 1, f"{title}: {words}"
    sent = draw(1, comm.size, 5, num_experts=4 * comm.size)
    r, routing = check_dispatch(buf, sent)
    check_combine(buf, r.handle, routing, 1)


def test_wrong_arguments_of_local_calls(comm, buf):
    handle = buf.dispatch(*to_device(buf, (X, IDX))).handle
    wide, weights, negative = to_device(buf, (np.zeros((4, 3), np.int64), W, IDX - 2))
    for texts, call in (
        (("handle", "int"), lambda: buf.combine_input(3)),
        (("dtype", "float32", "bfloat16"), lambda: buf.combine_input(handle, np.float32)),
        (("dtype", "int8"), lambda: buf.combine_input(handle, "int8")),
        (("dtype", "nonsense"), lambda: buf.combine_input(handle, "nonsense")),
        (("topk_idx", "(T, 2)", "(4, 3)"), lambda: buf.get_dispatch_layout(wide)),
        (("topk_idx", "float32"), lambda: buf.get_dispatch_layout(weights)),
        (("topk_idx[0, 0]", "-2"), lambda: buf.get_dispatch_layout(negative)),
    ):
        error = raised(call)
        assert type(error) is epcy.ArgumentError, repr(error)
        for text in texts:
            assert text in str(error), error
    buf.combine_input(handle, BFLOAT16)  # no area was lost


def test_error_after_the_exchange_keeps_the_others_right(comm, buf):
    """`out` turns out too small on one rank when the rows have come: that rank alone raises."""
    out = buf.xp.zeros((1, H), BFLOAT16) if comm.rank == 0 else True
    x, idx = to_device(buf, (X, IDX))
    error = raised(lambda: buf.dispatch(x, idx, out=out))
    if comm.rank == 0:
        assert type(error) is epcy.ArgumentError and "out" in str(error) and str(4 * comm.size) in str(error)
    else:
        assert error is None
    sent = draw(1, comm.size, 5, num_experts=4 * comm.size)
    check_dispatch(buf, sent)


def test_rows_that_are_no_multiple_of_16_bytes(comm, backend):
    for hidden, dtype, seen in (
        (12, "bfloat16", "24 bytes"),
        (6, "float32", "24 bytes"),
        (1, "float16", "2 bytes"),
    ):
        options = {"num_max_tokens_per_rank": 4, "num_experts": comm.size, "num_topk": 1, "dtype": dtype}
        error = raised(lambda: epcy.Buffer(comm, hidden=hidden, backend=backend, **options))  # noqa: B023
        assert type(error) is epcy.ArgumentError
        for text in ("hidden", "16 bytes", str(hidden), seen):
            assert text in str(error)


@pytest.mark.host_only("CuPy has no float8 arrays")
def test_float8_out_takes_bytes(comm, buf):
    sent = draw(2, comm.size, 5, num_experts=4 * comm.size, dtype="fp8", special=True)
    out = np.zeros((64, H), ml_dtypes.float8_e4m3fn), np.zeros((64, 4), np.float32)
    r, idx = sent.xs[comm.rank], sent.idxs[comm.rank]
    plain = buf.dispatch(r, idx)
    own = buf.dispatch(r, idx, out=list(out))
    assert np.array_equal(own.recv_x[0].view(np.uint8), plain.recv_x[0]) and own.recv_x[0].base is out[0]
