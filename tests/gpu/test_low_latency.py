"""Low-latency calls on a GPU: graphs in any number and order, hooks between replays, streams, odd arrays."""

import numpy as np
import pytest

import epcy
from epcy import reference
from mpi.cases import draw, mine, to_device, to_host
from mpi.low_latency_cases import check_combine, check_dispatch, compare_received, expected, late_error

cupy = pytest.importorskip("cupy")
BF16 = reference.BFLOAT16


@pytest.fixture
def make(make_buffer, backend):
    if backend != "nvshmem":
        pytest.skip("graphs and streams are the GPU backend's")

    def build(**options):
        return make_buffer(low_latency_mode=True, timeout=20, **options)

    return build


class Case:
    """Inputs in place, a graph over them, and what it must give."""

    def __init__(self, buf, tokens, body, hidden=512, num_topk=2):
        self.buf, self.tokens, self.hidden, self.num_topk = buf, tokens, hidden, num_topk
        self.x = cupy.zeros((tokens, hidden), BF16)
        self.idx = cupy.full((tokens, num_topk), -1, np.int64)
        self.weights = cupy.zeros((tokens, num_topk), np.float32)
        self.out = cupy.zeros((tokens, hidden), BF16)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        with self.stream:
            self.stream.begin_capture()
            self.results = body(self)
            self.graph = self.stream.end_capture()

    def dispatch(self, **options):
        return self.buf.low_latency_dispatch(self.x, self.idx, self.weights, use_fp8=False, **options)

    def combine(self, y, handle, **options):
        return self.buf.low_latency_combine(y, None, None, handle, out=self.out, **options)

    def replay(self, seed):
        """Draw, replay, and compare the last dispatch and the last combine."""
        buf, size = self.buf, self.buf.size
        sent = draw(seed, size, self.tokens, num_experts=buf.num_local_experts * size, num_topk=self.num_topk,
                    hidden=self.hidden)  # fmt: skip
        self.x[...], self.idx[...], self.weights[...] = mine(buf, sent)
        self.out[...] = np.nan
        cupy.cuda.Device().synchronize()
        self.graph.launch(self.stream)
        self.stream.synchronize()
        want, routing = expected(buf, sent, use_fp8=False)
        recv_x, recv_count, combines = self.results
        compare_received(recv_x, recv_count, want)
        if combines:
            received, _ = reference.low_latency_dispatch(
                sent.xs, sent.idxs, num_experts=buf.num_local_experts * size, use_fp8=False,
                num_max_tokens_per_rank=buf.options["num_max_low_latency_tokens_per_rank"],
            )  # fmt: skip
            ys = [r.recv_x for r in received]
            summed = reference.low_latency_combine(ys, routing, sent.weights)[buf.rank]
            assert to_host(self.out).tobytes() == summed.tobytes()


def calls_in_turn(number):
    def body(case):
        for turn in range(number):
            if turn % 2 == 0:
                recv_x, recv_count, handle, _, _ = case.dispatch()
            else:
                case.combine(recv_x, handle)
        return recv_x, recv_count, number > 1 and number % 2 == 0

    return body


@pytest.mark.parametrize("calls", [1, 2, 3, 4, 7])
def test_graphs_replay_with_new_data_and_routing(comm, make, calls):
    """Several graphs of different batch sizes on one Buffer, odd numbers of calls, eager calls between replays."""
    buf = make()
    cases = {tokens: Case(buf, tokens, calls_in_turn(calls)) for tokens in (1, 2, 16)}
    for turn, tokens in enumerate((16, 1, 2, 16, 1, 1, 2, 2, 2)):
        cases[tokens].replay(turn)
        if turn % 3 == 0:
            sent = draw(50 + turn, comm.size, 7, num_experts=4 * comm.size)
            handle, routing = check_dispatch(buf, sent)
            if turn % 2:
                check_combine(buf, handle, routing, turn, dispatched=sent.weights)


def test_hooks_inside_a_graph(comm, make):
    buf = make()

    def body(case):
        first = case.dispatch(return_recv_hook=True)
        second = case.dispatch(return_recv_hook=True)
        first[4]()
        _, _, hook = case.combine(first[0], first[2], return_recv_hook=True)
        second[4]()
        hook()
        return second[0], second[1], True

    case = Case(buf, 9, body)
    for seed in range(5):
        case.replay(seed)
        sent = draw(20 + seed, comm.size, 5, num_experts=4 * comm.size)
        check_dispatch(buf, sent, hook=seed % 2 == 0)


def test_a_replay_between_send_and_hook(comm, make):
    """An eager dispatch is in flight while a graph of combines runs: the kinds do not disturb each other."""
    buf = make()
    sent = draw(1, comm.size, 8, num_experts=4 * comm.size)
    x, idx, weights = mine(buf, sent)
    recv_x, _, handle, _, _ = buf.low_latency_dispatch(x, idx, weights, use_fp8=False)
    y, out = recv_x.copy(), cupy.zeros((8, 512), BF16)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        for _ in range(3):
            buf.low_latency_combine(y, None, None, handle, out=out)
        graph = stream.end_capture()
    want, routing = expected(buf, sent, use_fp8=False)
    for _ in range(4):
        later = draw(2, comm.size, 5, num_experts=4 * comm.size)
        flight = buf.low_latency_dispatch(*mine(buf, later), use_fp8=False, return_recv_hook=True)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        flight[4]()
        compare_received(flight[0], flight[1], expected(buf, later, use_fp8=False)[0])
        received, _ = reference.low_latency_dispatch(
            sent.xs, sent.idxs, num_experts=4 * comm.size, use_fp8=False, num_max_tokens_per_rank=16
        )
        summed = reference.low_latency_combine([r.recv_x for r in received], routing, sent.weights)[comm.rank]
        assert to_host(out).tobytes() == summed.tobytes()


@pytest.mark.parametrize("hidden", [8, 56, 64, 120, 128, 1000, 3584, 7168, 7176, 16384])
def test_rows_of_any_length(comm, make, hidden):
    """Tails of lines, and rows of more parts than one."""
    buf = make(hidden=hidden, num_topk=3)
    for seed, dtype in enumerate(("bfloat16", "float16")):
        sent = draw(seed, comm.size, 11, num_experts=4 * comm.size, num_topk=3, hidden=hidden, dtype=dtype)
        handle, routing = check_dispatch(buf, sent, use_fp8=hidden % 128 == 0)
        for reduction in ("rank", "source"):
            check_combine(buf, handle, routing, seed, dispatched=sent.weights, reduction=reduction, dtype=dtype,
                          use_logfmt=hidden % 128 == 0)  # fmt: skip


@pytest.mark.parametrize("num_topk", [1, 8, 9, 32])
def test_lanes_and_tokens_beyond_a_grid(comm, make, num_topk):
    """K up to 32, and more tokens than blocks: a block has several items, its own rank's too."""
    buf = make(num_max_tokens_per_rank=1024, num_max_low_latency_tokens_per_rank=1024, hidden=256, num_topk=num_topk,
               num_experts=32 * comm.size)  # fmt: skip
    for seed, tokens in enumerate((1024, 700, 1)):
        unequal = [tokens if rank % 2 == 0 else 1 + tokens // 3 for rank in range(comm.size)]
        sent = draw(seed, comm.size, unequal, num_experts=32 * comm.size, num_topk=num_topk, hidden=256)
        handle, routing = check_dispatch(buf, sent, hook=seed == 1)
        for reduction in ("rank", "source"):
            check_combine(
                buf, handle, routing, seed, dispatched=sent.weights, reduction=reduction, hook=seed == 2
            )


@pytest.mark.parametrize("num_local", [1, 129])
def test_local_experts(comm, make, num_local):
    buf = make(num_experts=num_local * comm.size)
    sent = draw(3, comm.size, 13, num_experts=num_local * comm.size)
    handle, routing = check_dispatch(buf, sent)
    check_combine(buf, handle, routing, 3, dispatched=sent.weights)


def test_x_that_16_byte_loads_cannot_read(comm, make):
    buf = make()
    sent = draw(4, comm.size, 6, num_experts=4 * comm.size)
    x, idx, weights = mine(buf, sent)
    want, _ = expected(buf, sent, use_fp8=False)
    for offset, width in ((1, 513), (8, 520), (0, 516)):
        wide = cupy.zeros((6, offset + width), BF16)
        wide[:, offset : offset + 512] = x
        recv_x, recv_count, *_ = buf.low_latency_dispatch(
            wide[:, offset : offset + 512], idx, weights, use_fp8=False
        )
        compare_received(recv_x, recv_count, want)


def test_streams_are_chained(comm, make):
    buf = make()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    for seed in range(6):
        sent = draw(seed, comm.size, 12, num_experts=4 * comm.size)
        x, idx, weights = mine(buf, sent)
        cupy.cuda.get_current_stream().synchronize()
        with streams[seed % 3]:
            recv_x, recv_count, handle, _, _ = buf.low_latency_dispatch(x, idx, weights, use_fp8=False)
        z, event, _ = buf.low_latency_combine(recv_x, None, None, handle, stream=streams[(seed + 1) % 3])
        event.synchronize()
        want, routing = expected(buf, sent, use_fp8=False)
        compare_received(recv_x, recv_count, want)
        received, _ = reference.low_latency_dispatch(
            sent.xs, sent.idxs, num_experts=4 * comm.size, use_fp8=False, num_max_tokens_per_rank=16
        )
        summed = reference.low_latency_combine([r.recv_x for r in received], routing, sent.weights)[comm.rank]
        assert to_host(z).tobytes() == summed.tobytes()


def test_a_late_rank(comm, make_buffer, backend):
    """The kernel gives up, the Buffer says who was late, and reset() makes it work again."""
    if backend != "nvshmem" or comm.size == 1:
        pytest.skip("two ranks on GPUs")
    buf = make_buffer(low_latency_mode=True, timeout=0.5)
    x, idx = to_device(buf, [np.ones((4, 512), BF16), np.zeros((4, 2), np.int64)])
    _, _, handle, _, _ = buf.low_latency_dispatch(x, idx)
    late = comm.size - 1
    y = cupy.ones((4, comm.size * 16, 512), BF16)
    for kind in ("dispatch", "combine"):
        if comm.rank != late:
            if kind == "dispatch":
                error = late_error(buf, lambda: buf.low_latency_dispatch(x, idx))
            else:
                error = late_error(buf, lambda: buf.low_latency_combine(y, None, None, handle))  # noqa: B023
            assert type(error) is epcy.PeerTimeoutError and error.ranks == (late,), error
        comm.Barrier()
        buf.reset()
        for seed in range(3):
            sent = draw(seed, comm.size, 6, num_experts=4 * comm.size)
            made, routing = check_dispatch(buf, sent)
            check_combine(buf, made, routing, seed, dispatched=sent.weights)
        _, _, handle, _, _ = buf.low_latency_dispatch(x, idx)
