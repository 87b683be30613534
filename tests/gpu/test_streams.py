"""Streams, events and graphs of the GPU backend: what is ordered after what, and replays with new data."""

import numpy as np
import pytest

import epcy
from epcy import reference
from mpi.cases import draw, to_device, to_host

cupy = pytest.importorskip("cupy")


@pytest.fixture
def buf(make_buffer, backend):
    if backend != "nvshmem":
        pytest.skip("streams are the GPU backend's")
    return make_buffer(num_max_tokens_per_rank=64, hidden=1024, num_topk=3, timeout=20)


def expected(sent, num_experts, rank):
    received, routing = reference.dispatch(sent.xs, sent.idxs, sent.weights, num_experts=num_experts)
    sums = reference.combine([r.recv_x for r in received], routing)
    return received[rank], sums[rank][0]


def test_async_calls_run_beside_the_current_stream(buf, comm):
    num_experts = 4 * comm.size
    for seed in range(5):
        sent = draw(seed, comm.size, [int(t) for t in np.random.default_rng(seed).integers(0, 65, comm.size)],
                    num_experts=num_experts, num_topk=3, hidden=1024)  # fmt: skip
        received, summed = expected(sent, num_experts, comm.rank)
        x = to_device(buf, sent.xs[comm.rank])
        r = buf.dispatch(x, to_device(buf, sent.idxs[comm.rank]), async_finish=True)
        del x  # freed at once: the library keeps it
        cupy.full((64, 1024), np.nan, np.float32)
        r.event.current_stream_wait()
        z = buf.combine(r.recv_x, r.handle, previous_event=r.event, async_finish=True)
        z.event.synchronize()
        assert z.event.query()
        assert to_host(r.recv_x).tobytes() == received.recv_x.tobytes()
        assert to_host(z.combined_x).tobytes() == summed.tobytes()


def test_calls_on_different_streams_are_chained(buf, comm):
    num_experts = 4 * comm.size
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    for seed in range(6):
        sent = draw(seed, comm.size, 40, num_experts=num_experts, num_topk=3, hidden=1024)
        received, summed = expected(sent, num_experts, comm.rank)
        x, idx = to_device(buf, sent.xs[comm.rank]), to_device(buf, sent.idxs[comm.rank])
        cupy.cuda.get_current_stream().synchronize()
        with streams[seed % 3]:
            r = buf.dispatch(x, idx)
        z = buf.combine(r.recv_x, r.handle, stream=streams[(seed + 1) % 3])
        z.event.synchronize()
        assert to_host(z.combined_x).tobytes() == summed.tobytes()
        assert to_host(r.recv_x).tobytes() == received.recv_x.tobytes()


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_graphs_replay_with_new_data_and_routing(buf, comm, calls):
    """Graphs of several batch sizes, replayed in any order, with eager calls between; odd numbers of calls too."""
    num_experts, rank = 4 * comm.size, comm.rank
    graphs = {}
    for tokens in (1, 2, 4):
        x = cupy.zeros((tokens, 1024), reference.BFLOAT16)
        idx = cupy.full((tokens, 3), -1, np.int64)
        stream = cupy.cuda.Stream(non_blocking=True)
        results = []
        # The memory pools are warm now.
        buf.combine(*_pair(buf.dispatch(x, idx, num_worst_tokens=4 * comm.size)))
        with stream:
            stream.begin_capture()
            for number in range(calls):
                if number % 2 == 0:
                    r = buf.dispatch(x, idx, num_worst_tokens=4 * comm.size)
                    # Views: a graph's result lives until its next replay.
                    results.append((r.recv_x, r.handle))
                else:
                    results.append(buf.combine(r.recv_x, r.handle).combined_x)
            graph = stream.end_capture()
        graphs[tokens] = graph, stream, x, idx, results
    for turn, tokens in enumerate((4, 1, 2, 4, 1, 1, 2)):
        graph, stream, x, idx, results = graphs[tokens]
        sent = draw(turn, comm.size, tokens, num_experts=num_experts, num_topk=3, hidden=1024)
        received, summed = expected(sent, num_experts, rank)
        x[...] = to_device(buf, sent.xs[rank])
        idx[...] = to_device(buf, sent.idxs[rank])
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        rows, handle = results[0] if calls < 3 else results[2]
        count = int(handle.num_recv_tokens)
        assert count == received.num_recv_tokens
        assert to_host(rows[:count]).tobytes() == received.recv_x.tobytes()
        if calls >= 2:
            assert to_host(results[1]).tobytes() == summed.tobytes()
        eager = draw(100 + turn, comm.size, 7, num_experts=num_experts, num_topk=3, hidden=1024)
        received, summed = expected(eager, num_experts, rank)
        r = buf.dispatch(to_device(buf, eager.xs[rank]), to_device(buf, eager.idxs[rank]))
        assert to_host(r.recv_x).tobytes() == received.recv_x.tobytes()


def _pair(r):
    return r.recv_x, r.handle


def test_a_capture_never_waits(buf, comm):
    x, idx = cupy.zeros((4, 1024), reference.BFLOAT16), cupy.zeros((4, 3), np.int64)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(epcy.StateError, match="num_worst_tokens"):
            buf.dispatch(x, idx)
        stream.end_capture()
    assert buf.dispatch(x, idx).num_recv_tokens_per_expert is not None


def test_streams_of_every_kind(buf, comm):
    x, idx = cupy.ones((2, 1024), reference.BFLOAT16), cupy.zeros((2, 3), np.int64)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()

    class Foreign:
        def __cuda_stream__(self):
            return 0, stream.ptr

    for given in (stream, stream.ptr, Foreign(), 0):
        r = buf.dispatch(x, idx, stream=given)
        r.event.synchronize()
        assert sum(r.num_recv_tokens_per_expert) == (6 * comm.size if comm.rank == 0 else 0)
    with pytest.raises((epcy.ArgumentError, epcy.PeerError)):
        buf.dispatch(x, idx, stream="default")
