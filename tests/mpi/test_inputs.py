"""Arrays of every kind as inputs: strided, column-major, read-only, misaligned, DLPack, the buffer protocol.

A kind is a function of the array module and a contiguous array.
"""

import array
import ctypes

import numpy as np
import pytest

import epcy
from epcy import reference
from mpi.cases import BFLOAT16, Sent, assert_bits, draw, mine, raised, to_device, to_host


def contiguous(xp, a):
    return xp.ascontiguousarray(a)


def fortran(xp, a):
    return xp.asfortranarray(a)


def strided_rows(xp, a):
    wide = xp.zeros((len(a), 2 * a.shape[1] + 3), a.dtype)
    wide[:, : a.shape[1]] = a
    return wide[:, : a.shape[1]]


def every_second_row(xp, a):
    tall = xp.zeros((2 * len(a), a.shape[1]), a.dtype)
    tall[::2] = a
    return tall[::2]


def every_second_column(xp, a):
    wide = xp.zeros((len(a), 2 * a.shape[1]), a.dtype)
    wide[:, ::2] = a
    return wide[:, ::2]


def backwards(xp, a):
    return xp.ascontiguousarray(a[::-1])[::-1]


def one_element_on(xp, a):
    raw = xp.zeros(a.size + 1, a.dtype)
    raw[1:] = a.ravel()
    return raw[1:].reshape(a.shape)


def read_only(xp, a):
    a = a.copy()
    a.flags.writeable = False
    return a


def misaligned(xp, a):
    raw = np.zeros(a.nbytes + 1, np.uint8)
    raw[1:] = np.frombuffer(a.tobytes(), np.uint8)
    return raw[1:].view(a.dtype).reshape(a.shape)


def subclass(xp, a):
    return a.view(type("Mine", (np.ndarray,), {}))


KINDS = [fortran, strided_rows, every_second_row, every_second_column, backwards, one_element_on]
HOST_KINDS = [read_only, misaligned, subclass]


def shaped(kind, xp, a):
    """The array in another shape of memory, moved as whole numbers: CuPy's kernels make every NaN the same."""
    return kind(xp, a.view(f"u{a.dtype.itemsize}")).view(a.dtype)


def kinds(buf):
    """Every kind of array that the backend's array module has, as functions of an array or a pair."""
    for kind in KINDS + (HOST_KINDS if buf.xp is np else []):

        def apply(a, kind=kind):
            return tuple(map(apply, a)) if isinstance(a, tuple) else shaped(kind, buf.xp, a)

        yield kind.__name__, apply


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
    x, idx, weights = mine(buf, sent)
    for name, kind in kinds(buf):
        r = buf.dispatch(kind(x), kind(idx), kind(weights), layout=layout)
        assert_bits(r.recv_x, want.recv_x, f"{name}: recv_x")
        assert_bits(r.recv_topk_idx, want.recv_topk_idx, f"{name}: recv_topk_idx")
        assert_bits(r.recv_topk_weights, want.recv_topk_weights, f"{name}: recv_topk_weights")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kinds_of_arrays_in_combine(comm, make_buffer, dtype):
    buf = make_buffer()
    sent, _, routing = sent_and_wanted(comm, dtype, "rank")
    rng = np.random.default_rng(1)
    ys = [rng.standard_normal((routing.num_rows(r), 512)).astype(sent.xs[0].dtype) for r in range(comm.size)]
    ws = [rng.standard_normal((routing.num_rows(r), 2)).astype(np.float32) for r in range(comm.size)]
    want, want_weights = reference.combine(ys, routing, ws, bias=sent.xs)[comm.rank]
    x, idx, _ = mine(buf, sent)
    y, w = to_device(buf, (ys[comm.rank], ws[comm.rank]))
    handle = buf.dispatch(x, idx).handle
    for name, kind in kinds(buf):
        c = buf.combine(kind(y), handle, kind(w), bias=kind(x))
        assert_bits(c.combined_x, want, f"{name}: combined_x")
        assert_bits(c.combined_topk_weights, want_weights, f"{name}: combined_topk_weights")


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

    @property
    def __cuda_array_interface__(self):
        return self.a.__cuda_array_interface__


@pytest.mark.parametrize("protocol", [DLPack, Interface])
def test_exporters(comm, make_buffer, protocol):
    buf = make_buffer(dtype="float32")
    for dtype in ("float16", "float32"):
        sent, want, _ = sent_and_wanted(comm, dtype, "rank")
        for kind in (contiguous, fortran, every_second_row):
            r = buf.dispatch(*(protocol(shaped(kind, buf.xp, a)) for a in mine(buf, sent)))
            assert_bits(r.recv_x, want.recv_x, "recv_x")
            assert_bits(r.recv_topk_idx, want.recv_topk_idx, "recv_topk_idx")
            assert_bits(r.recv_topk_weights, want.recv_topk_weights, "recv_topk_weights")


class Raises(DLPack):
    def __dlpack__(self, **kwargs):
        raise BufferError("a gradient is required")


@pytest.mark.host_only("NumPy's arrays and exporters of them")
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
    r = buf.dispatch(DLPack(buf.xp.zeros((0, 512), np.float32)), DLPack(buf.xp.zeros((0, 2), np.int64)))
    assert r.recv_x.shape == (0, 512)


@pytest.mark.host_only("the buffer protocol is for host memory")
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


@pytest.mark.host_only("CuPy has no float8 arrays")
def test_float8_arrays(comm, make_buffer):
    import ml_dtypes

    buf = make_buffer()
    sent, want, _ = sent_and_wanted(comm, "fp8", "rank")
    payload, scales = sent.xs[comm.rank]
    r = buf.dispatch((payload.view(ml_dtypes.float8_e4m3fn), fortran(np, scales)), sent.idxs[comm.rank])
    assert_bits(r.recv_x, want.recv_x, "recv_x")


def test_one_row_for_all_tokens(comm, make_buffer):
    buf = make_buffer()
    x = buf.xp.broadcast_to(to_device(buf, np.full(512, comm.rank, BFLOAT16)), (8, 512))
    r = buf.dispatch(x, buf.xp.zeros((8, 2), np.int64))
    got = to_host(r.recv_x).astype(np.float32)
    if comm.rank == 0:
        assert np.array_equal(got[:, 3], np.repeat(np.arange(comm.size), 8))


def as_torch(torch, a):
    """The array, or each of a pair, as a torch tensor over the same memory."""
    if isinstance(a, tuple):
        return as_torch(torch, a[0]).view(torch.float8_e4m3fn), as_torch(torch, a[1])
    return (
        torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
        if a.dtype == BFLOAT16
        else torch.from_numpy(a)
    )


@pytest.mark.host_only("tensors on a GPU: tests/gpu/test_torch.py")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "fp8"])
@pytest.mark.parametrize("ids", [np.int32, np.int64])
def test_torch_tensors(comm, make_buffer, dtype, ids):
    torch = pytest.importorskip("torch")
    buf = make_buffer()
    sent, want, routing = sent_and_wanted(comm, dtype, "rank")
    x, idx, weights = (as_torch(torch, a) for a in (sent.xs[comm.rank], sent.idxs[comm.rank].astype(ids),
                                                    sent.weights[comm.rank]))  # fmt: skip
    r = buf.dispatch(x, idx, weights)
    assert_bits(r.recv_x, want.recv_x, "recv_x")
    assert_bits(r.recv_topk_idx, want.recv_topk_idx, "recv_topk_idx")
    assert_bits(r.recv_topk_weights, want.recv_topk_weights, "recv_topk_weights")
    columns = tuple(part.T.contiguous().T for part in x) if dtype == "fp8" else x.T.contiguous().T
    assert_bits(buf.dispatch(columns, handle=r.handle).recv_x, want.recv_x, "recv_x of strided tensors")
    if dtype != "fp8":
        ys = [np.ones((routing.num_rows(rank), 512), sent.xs[0].dtype) for rank in range(comm.size)]
        summed, _ = reference.combine(ys, routing)[comm.rank]
        y = as_torch(torch, ys[comm.rank])
        assert_bits(buf.combine(y, r.handle).combined_x, summed, "combined_x")
        for wrong in (x.clone().requires_grad_(), x.to(torch.float64)):
            error = raised(lambda wrong=wrong: buf.dispatch(wrong, idx))
            assert type(error) is epcy.ArgumentError and str(error).startswith("x: "), error
            assert f"rank {comm.rank}" in str(error) and (not wrong.requires_grad or "detach()" in str(error))
    assert_bits(buf.dispatch(x, idx).recv_x, want.recv_x, "recv_x")
