"""A rank that replays its graph too late: everybody hears of it, and after reset() the same graph is right again."""

import time

import numpy as np
import pytest

import epcy
from epcy import reference
from mpi.cases import raised, to_device, to_host
from mpi.low_latency_cases import works

cupy = pytest.importorskip("cupy")
BF16 = reference.BFLOAT16


def high_throughput(buf, x, idx):
    r = buf.dispatch(x, idx, num_worst_tokens=4 * buf.size)
    return [r.recv_x, buf.combine(r.recv_x, r.handle).combined_x]


def low_latency(buf, x, idx, hook=False):
    recv_x, _, handle, _, receive = buf.low_latency_dispatch(x, idx, use_fp8=False, return_recv_hook=hook)
    if hook:
        receive()
    out, _, receive = buf.low_latency_combine(recv_x, None, None, handle, return_recv_hook=hook)
    if hook:
        receive()
    return [recv_x, out]


def hooks(buf, x, idx):
    return low_latency(buf, x, idx, hook=True)


@pytest.mark.parametrize("calls", [high_throughput, low_latency, hooks])
def test_a_late_rank_in_a_replay(comm, make_buffer, backend, calls):
    if backend != "nvshmem" or comm.size == 1:
        pytest.skip("two ranks on GPUs")
    buf = make_buffer(low_latency_mode=True, timeout=0.5)
    x, idx = to_device(buf, [np.ones((4, 512), BF16), np.zeros((4, 2), np.int64)])
    calls(buf, x, idx)  # memory pools are warm then
    stream, late = cupy.cuda.Stream(non_blocking=True), comm.size - 1
    with stream:
        stream.begin_capture()
        results = calls(buf, x, idx)
        graph = stream.end_capture()

    def replay():
        results[1][...] = 0
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        return raised(buf.check), to_host(results[1]).tobytes()

    error, want = replay()
    assert error is None and np.frombuffer(want, BF16).any()
    comm.Barrier()
    if comm.rank == late:
        time.sleep(1.2)
    error, _ = replay()
    assert type(error) is epcy.PeerTimeoutError, repr(error)
    if comm.rank != late:
        assert error.ranks == (late,) and "timeout=0.5" in str(error), error
    comm.Barrier()
    buf.reset()
    for _ in range(3):
        assert replay() == (None, want)
        works(buf)
