"""Arrays of every kind as inputs: strided, column-major, read-only, misaligned, DLPack, the buffer protocol."""

import array
import ctypes

import numpy as np
import pytest

import epcy
from epcy import reference
from mpi.cases import BFLOAT16, Sent, assert_bits, draw, raised, to_host


def fortran(a):
    return np.asfortranarray(a)


def strided_rows(a):
    wide = np.zeros((len(a), 2 * a.shape[1] + 3), a.dtype)
    wide[:, : a.shape[1]] = a
    return wide[:, : a.shape[1]]


def every_second_row(a):
    tall = np.zeros((2 * len(a), a.shape[1]), a.dtype)
    tall[::2] = a
    return tall[::2]


def every_second_column(a):
    wide = np.zeros((len(a), 2 * a.shape[1]), a.dtype)
    wide[:, ::2] = a
    return wide[:, ::2]


def backwards(a):
    return np.ascontiguousarray(a[::-1])[::-1]


def read_only(a):
    a = a.copy()
    a.flags.writeable = False
    return a


def misaligned(a):
    raw = np.zeros(a.nbytes + 1, np.uint8)
    raw[1:] = np.frombuffer(a.tobytes(), np.uint8)
    return raw[1:].view(a.dtype).reshape(a.shape)


def subclass(a):
    return a.view(type("Mine", (np.ndarray,), {}))


KINDS = [
    fortran,
    strided_rows,
    every_second_row,
    every_second_column,
    backwards,
    read_only,
    misaligned,
    subclass,
]


def sent_and_wanted(comm, dtype, layout):
    sent = draw(1, comm.size, 7, num_experts=4 * comm.size, dtype=dtype, special=True)
    received, routing = reference.dispatch(
        sent.xs, sent.idxs, sent.weights, num_experts=4 * comm.size, layout=layout
    )
    return sent, received[comm.rank], routing


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_kinds_of_arrays(comm, make_buffer, dtype, layout):
    buf = make_buffer()
    sent, want, _ = sent_and_wanted(comm, dtype, layout)
    x, idx, weights = (one[comm.rank] for one in (sent.xs, sent.idxs, sent.weights))
    for kind in KINDS:
        given = tuple(map(kind, x)) if dtype == "fp8" else kind(x)
        r = buf.dispatch(given, kind(idx), kind(weights), layout=layout)
        assert_bits(r.recv_x, want.recv_x, f"{kind.__name__}: recv_x")
        assert_bits(r.recv_topk_idx, want.recv_topk_idx, f"{kind.__name__}: recv_topk_idx")
        assert_bits(r.recv_topk_weights, want.recv_topk_weights, f"{kind.__name__}: recv_topk_weights")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kinds_of_arrays_in_combine(comm, make_buffer, dtype):
    buf = make_buffer()
    sent, _, routing = sent_and_wanted(comm, dtype, "rank")
    rng = np.random.default_rng(1)
    ys = [rng.standard_normal((routing.num_rows(r), 512)).astype(sent.xs[0].dtype) for r in range(comm.size)]
    ws = [rng.standard_normal((routing.num_rows(r), 2)).astype(np.float32) for r in range(comm.size)]
    want, want_weights = reference.combine(ys, routing, ws, bias=sent.xs)[comm.rank]
    handle = buf.dispatch(sent.xs[comm.rank], sent.idxs[comm.rank]).handle
    for kind in KINDS:
        y, w, bias = kind(ys[comm.rank]), kind(ws[comm.rank]), kind(sent.xs[comm.rank])
        c = buf.combine(y, handle, w, bias=bias)
        assert_bits(c.combined_x, want, f"{kind.__name__}: combined_x")
        assert_bits(c.combined_topk_weights, want_weights, f"{kind.__name__}: combined_topk_weights")


class Exporter:
    """An array that shows itself through one protocol alone."""

    def __init__(self, a, **methods):
        self.a = a

    def __array__(self, *args, **kwargs):
        raise AssertionError("copied through __array__")


class DLPack(Exporter):
    def __dlpack__(self, **kwargs):
        return self.a.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.a.__dlpack_device__()


class Interface(Exporter):
    @property
    def __array_interface__(self):
        return self.a.__array_interface__


@pytest.mark.parametrize("protocol", [DLPack, Interface])
def test_exporters(comm, make_buffer, protocol):
    buf = make_buffer(dtype="float32")
    for dtype in ("float16", "float32"):
        sent, want, _ = sent_and_wanted(comm, dtype, "rank")
        x, idx, weights = (one[comm.rank] for one in (sent.xs, sent.idxs, sent.weights))
        for kind in (np.ascontiguousarray, fortran, every_second_row):
            r = buf.dispatch(protocol(kind(x)), protocol(kind(idx)), protocol(kind(weights)))
            assert_bits(r.recv_x, want.recv_x, "recv_x")
            assert_bits(r.recv_topk_idx, want.recv_topk_idx, "recv_topk_idx")
            assert_bits(r.recv_topk_weights, want.recv_topk_weights, "recv_topk_weights")


class Raises(DLPack):
    def __dlpack__(self, **kwargs):
        raise BufferError("a gradient is required")


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (Raises(np.zeros((4, 512), np.float32)), "a gradient is required"),
        (DLPack(np.array(1.0, np.float32)), "shape ()"),
        (np.zeros((4, 512), [("packed", np.uint8), ("field", np.float32)]), "packed"),  # never aligned
        (np.zeros((4, 512), ">f4"), ">f4"),
    ],
    ids=["raises", "0-d", "structure", "big-endian"],
)
def test_arrays_that_cannot_be_used(comm, make_buffer, x, text):
    buf = make_buffer(dtype="float32")
    error = raised(lambda: buf.dispatch(x, np.zeros((4, 2), np.int64)))
    assert type(error) is epcy.ArgumentError, error
    assert str(error).startswith("x: ") and text in str(error) and f"rank {comm.rank}" in str(error)


def test_empty_exporter(comm, make_buffer):
    buf = make_buffer(dtype="float32")
    r = buf.dispatch(DLPack(np.zeros((0, 512), np.float32)), DLPack(np.zeros((0, 2), np.int64)))
    assert r.recv_x.shape == (0, 512)


def test_buffer_protocol(comm, make_buffer):
    buf = make_buffer(dtype="float32")
    num_experts = 4 * comm.size
    x = np.arange(3 * 512, dtype=np.float32).reshape(3, 512)
    idx = array.array("q", [(comm.rank + lane) % num_experts for lane in range(6)])
    weights = ((ctypes.c_float * 2) * 3)(*[(ctypes.c_float * 2)(0.5, 0.25) for _ in range(3)])
    r = buf.dispatch(memoryview(x), memoryview(idx).cast("B").cast("q", (3, 2)), weights)
    every = [
        np.array([(rank + lane) % num_experts for lane in range(6)]).reshape(3, 2)
        for rank in range(comm.size)
    ]
    sent = Sent([x] * comm.size, every, [np.tile(np.float32([0.5, 0.25]), (3, 1))] * comm.size)
    received, _ = reference.dispatch(sent.xs, sent.idxs, sent.weights, num_experts=num_experts)
    assert_bits(r.recv_x, received[comm.rank].recv_x, "recv_x")
    assert_bits(r.recv_topk_idx, received[comm.rank].recv_topk_idx, "recv_topk_idx")
    assert_bits(r.recv_topk_weights, received[comm.rank].recv_topk_weights, "recv_topk_weights")


def test_float8_arrays(comm, make_buffer):
    import ml_dtypes

    buf = make_buffer()
    sent, want, _ = sent_and_wanted(comm, "fp8", "rank")
    payload, scales = sent.xs[comm.rank]
    r = buf.dispatch((payload.view(ml_dtypes.float8_e4m3fn), fortran(scales)), sent.idxs[comm.rank])
    assert_bits(r.recv_x, want.recv_x, "recv_x")


def test_one_row_for_all_tokens(comm, make_buffer):
    buf = make_buffer()
    x = np.broadcast_to(np.full(512, comm.rank, BFLOAT16), (8, 512))
    r = buf.dispatch(x, np.zeros((8, 2), np.int64))
    got = to_host(r.recv_x).astype(np.float32)
    if comm.rank == 0:
        assert np.array_equal(got[:, 3], np.repeat(np.arange(comm.size), 8))
