"""Torch tensors on the GPU as inputs, results as tensors over the same memory, and what is refused."""

import numpy as np
import pytest

import epcy
from epcy import reference
from mpi.cases import BFLOAT16, assert_bits, draw, raised

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")


@pytest.fixture
def buf(make_buffer, backend):
    if backend != "nvshmem" or not torch.cuda.is_available():
        pytest.skip("tensors on a GPU are the GPU backend's")
    return make_buffer(timeout=20)


def tensor(buf, a):
    """A NumPy array, or a pair of fp8 payload and scales, as tensors on the Buffer's GPU."""
    if isinstance(a, tuple):
        return tensor(buf, a[0]).view(torch.float8_e4m3fn), tensor(buf, a[1])
    device = f"cuda:{buf.options['device']}"
    if a.dtype == BFLOAT16:
        return torch.from_numpy(a.view(np.int16)).to(device).view(torch.bfloat16)
    return torch.from_numpy(a).to(device)


def bits(t):
    """The bytes of a tensor."""
    return t.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def columns(t):
    """The same numbers, column after column in memory."""
    return t.T.contiguous().T


def sent_and_wanted(comm, dtype, layout="rank"):
    sent = draw(5, comm.size, 7, num_experts=4 * comm.size, dtype=dtype)
    received, routing = reference.dispatch(
        sent.xs, sent.idxs, sent.weights, num_experts=4 * comm.size, layout=layout
    )
    return sent, received[comm.rank], routing


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("ids", [np.int32, np.int64])
@pytest.mark.parametrize("arrange", [lambda t: t, columns], ids=["rows", "columns"])
def test_bfloat16_there_and_back(buf, comm, layout, ids, arrange):
    sent, want, routing = sent_and_wanted(comm, "bfloat16", layout)
    x, idx, weights = (
        arrange(tensor(buf, a))
        for a in (sent.xs[comm.rank], sent.idxs[comm.rank].astype(ids), sent.weights[comm.rank])
    )
    r = buf.dispatch(x, idx, weights, layout=layout)
    for got, wanted, dtype in ((r.recv_x, want.recv_x, torch.bfloat16),
                               (r.recv_topk_idx, want.recv_topk_idx, torch.int64),
                               (r.recv_topk_weights, want.recv_topk_weights, torch.float32)):  # fmt: skip
        seen = torch.from_dlpack(got)
        assert seen.dtype == dtype and seen.shape == wanted.shape
        assert seen.data_ptr() == got.data.ptr or seen.numel() == 0, "copied"
        assert bits(seen) == wanted.tobytes()
    ys = [draw(6, 1, routing.num_rows(rank), num_experts=1).xs[0] for rank in range(comm.size)]
    summed, _ = reference.combine(ys, routing, bias=sent.xs)[comm.rank]
    z = buf.combine(arrange(tensor(buf, ys[comm.rank])), r.handle, bias=x)
    seen = torch.from_dlpack(z.combined_x)
    assert seen.data_ptr() == z.combined_x.data.ptr
    assert bits(seen) == summed.tobytes()


def test_fp8_pairs_in_and_out(buf, comm):
    sent, want, _ = sent_and_wanted(comm, "fp8")
    payload, scales = tensor(buf, sent.xs[comm.rank])
    idx = tensor(buf, sent.idxs[comm.rank])
    for x in ((payload, scales), (columns(payload), columns(scales))):
        r = buf.dispatch(x, idx)
        seen = torch.from_dlpack(r.recv_x[0]).view(torch.float8_e4m3fn)
        assert seen.data_ptr() == r.recv_x[0].data.ptr
        assert bits(seen) == want.recv_x[0].tobytes()
        assert bits(torch.from_dlpack(r.recv_x[1])) == want.recv_x[1].tobytes()


def test_experts_in_torch_write_into_combine_input(buf, comm):
    sent, _, routing = sent_and_wanted(comm, "bfloat16")
    r = buf.dispatch(tensor(buf, sent.xs[comm.rank]), tensor(buf, sent.idxs[comm.rank]))
    y = torch.from_dlpack(buf.combine_input(r.handle))
    torch.mul(torch.from_dlpack(r.recv_x), 2, out=y)
    z = buf.combine(y, r.handle).combined_x
    received, _ = reference.dispatch(sent.xs, sent.idxs, num_experts=4 * comm.size)
    ys = [(2 * part.recv_x.astype(np.float32)).astype(BFLOAT16) for part in received]
    assert_bits(z, reference.combine(ys, routing)[comm.rank][0], "combined_x")


def test_a_stream_of_torch(buf, comm):
    sent, want, _ = sent_and_wanted(comm, "bfloat16")
    stream = torch.cuda.Stream(device=buf.options["device"])
    with torch.cuda.stream(stream):
        x, idx = tensor(buf, sent.xs[comm.rank]), tensor(buf, sent.idxs[comm.rank])
        r = buf.dispatch(x, idx, stream=stream.cuda_stream)
        seen = torch.from_dlpack(r.recv_x).clone()
    stream.synchronize()
    assert bits(seen) == want.recv_x.tobytes()


def test_tensors_that_cannot_be_used(buf, comm):
    sent, want, _ = sent_and_wanted(comm, "bfloat16")
    x, idx = tensor(buf, sent.xs[comm.rank]), tensor(buf, sent.idxs[comm.rank])
    wrong = {
        "detach()": x.clone().requires_grad_(),
        "host memory": x.cpu(),
        "float64": x.to(torch.float64),
        "Tensor": x.to(torch.float32).to(torch.float8_e5m2),
    }
    for text, given in wrong.items():
        error = raised(lambda given=given: buf.dispatch(given, idx))
        assert type(error) is epcy.ArgumentError, error
        assert str(error).startswith("x: ") and text in str(error) and f"rank {comm.rank}" in str(error)
    assert_bits(buf.dispatch(x, idx).recv_x, want.recv_x, "recv_x")


def test_a_tensor_on_another_gpu(buf, comm):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    here = buf.options["device"]
    other = (here + 1) % cupy.cuda.runtime.getDeviceCount()
    sent, want, _ = sent_and_wanted(comm, "bfloat16")
    x, idx = tensor(buf, sent.xs[comm.rank]), tensor(buf, sent.idxs[comm.rank])
    for name, given in {"x": (x.to(f"cuda:{other}"), idx), "topk_idx": (x, idx.to(f"cuda:{other}"))}.items():
        error = raised(lambda given=given: buf.dispatch(*given))
        assert type(error) is epcy.ArgumentError, error
        for text in (f"GPU {here}", f"GPU {other}", "copy it", f"device={other}", f"rank {comm.rank}"):
            assert text in str(error)
        assert str(error).startswith(f"{name}: ")
    assert_bits(buf.dispatch(x, idx).recv_x, want.recv_x, "recv_x")
