"""Low-latency dispatch and combine give the reference's bits, for every option, routing and size, every time."""

from itertools import product

import numpy as np
import pytest

from mpi.cases import DTYPES, Sent, counted_rows, draw, mine, to_device, to_host
from mpi.low_latency_cases import check_combine, check_dispatch, expert_rows, host_list

CASTS = [
    {"use_fp8": False},
    {},
    {"round_scale": True},
    {"round_scale": True, "use_ue8m0": True},
]


@pytest.fixture
def make(make_buffer):
    """A function like `make_buffer` whose Buffers have the mode, and room for 16 tokens a rank."""

    def build(**options):
        return make_buffer(low_latency_mode=True, **options)

    return build


def unequal(size):
    return [(5 * rank + 3) % 17 for rank in range(size)]


@pytest.mark.parametrize("casts", CASTS, ids=["plain", "fp8", "round_scale", "ue8m0"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dispatch(comm, make, casts, dtype):
    buf = make(num_topk=3, dtype="float32")
    for seed, (ids, special) in enumerate(product((np.int64, np.int32), (False, True))):
        sent = draw(
            seed, comm.size, unequal(comm.size), num_experts=4 * comm.size, num_topk=3, dtype=dtype, ids=ids,
            special=special,
        )  # fmt: skip
        check_dispatch(buf, sent, hook=seed % 2 == 1, **casts)


@pytest.mark.parametrize("reduction", ["rank", "source"])
@pytest.mark.parametrize("use_logfmt", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_combine(comm, make, reduction, use_logfmt, dtype):
    buf = make(num_topk=4, dtype="float32")
    size = {"num_experts": 4 * comm.size, "num_topk": 4}
    here = draw(99, comm.size, unequal(comm.size), special=True, **size).weights
    for seed, (at_dispatch, at_combine, special) in enumerate(
        product((False, True), (False, True), (False, True))
    ):
        sent = draw(seed, comm.size, unequal(comm.size), weights=at_dispatch, **size)
        handle, routing = check_dispatch(buf, sent)
        check_combine(
            buf, handle, routing, seed, dispatched=sent.weights, weights=here if at_combine else None, dtype=dtype,
            special=special, zero_copy=seed % 2 == 1, hook=seed % 3 == 1, reduction=reduction, use_logfmt=use_logfmt,
        )  # fmt: skip


def test_unused_lanes_of_weights_given_here(comm, make):
    """A weight of an unused lane may be NaN, whichever call it is given to."""
    buf = make()
    sent = draw(2, comm.size, 9, num_experts=4 * comm.size, unused=0.5)
    handle, routing = check_dispatch(buf, Sent(sent.xs, sent.idxs, None), use_fp8=False)
    for reduction in ("rank", "source"):
        z = check_combine(
            buf, handle, routing, 2, weights=sent.weights, reduction=reduction, idx=mine(buf, sent)[1]
        )
        assert np.isfinite(to_host(z).astype(np.float32)).all()


def test_out_and_handles_live_on(comm, make):
    """A handle serves any number of combines, also after later dispatches, and with `out`."""
    buf = make()
    kept = []
    for seed in range(3):
        sent = draw(seed, comm.size, 7, num_experts=4 * comm.size)
        kept.append((sent, *check_dispatch(buf, sent, use_fp8=seed != 1)))
    out = buf.xp.empty((7, 512), DTYPES["bfloat16"])
    for seed, (sent, handle, routing) in enumerate(kept):
        for again in range(2):
            check_combine(buf, handle, routing, seed + again, dispatched=sent.weights, out=out)


def test_a_result_lives_until_the_second_next_dispatch(comm, make):
    buf = make()
    sents = [draw(seed, comm.size, 5, num_experts=4 * comm.size) for seed in range(3)]
    x, idx, _ = mine(buf, sents[0])
    recv_x, recv_count, *_ = buf.low_latency_dispatch(x, idx, use_fp8=False)
    rows = [to_host(recv_x[e, :n]).tobytes() for e, n in enumerate(host_list(recv_count))]
    check_dispatch(buf, sents[1])
    assert rows == [to_host(recv_x[e, :n]).tobytes() for e, n in enumerate(host_list(recv_count))]


def test_stats(comm, make):
    buf = make()
    for dtype in (np.int32, np.int64):
        stats = buf.xp.full(4, 3, dtype)
        total = np.full(4, 3, dtype)
        for seed in range(3):
            sent = draw(seed, comm.size, 8, num_experts=4 * comm.size)
            handle, _ = check_dispatch(buf, sent, stats=stats, hook=seed == 1)
            total += to_host(handle.num_tokens_per_expert).astype(dtype)
        assert host_list(stats) == total.tolist()


def test_events_and_async(comm, make):
    buf = make()
    sent = draw(1, comm.size, 8, num_experts=4 * comm.size)
    x, idx, weights = mine(buf, sent)
    before = buf.capture()
    recv_x, _, handle, event, hook = buf.low_latency_dispatch(
        x, idx, weights, use_fp8=False, previous_event=before, async_finish=True
    )
    assert hook is None
    x[...] = np.nan  # legal only after the event on a GPU
    event.current_stream_wait()
    event.synchronize()
    assert event.query()
    y = recv_x.copy()
    combined_x, event, _ = buf.low_latency_combine(y, idx, None, handle, async_finish=True)
    event.synchronize()
    assert combined_x.shape == (8, 512)


def test_the_input_is_freed_at_once(comm, make):
    buf = make()
    sent = draw(5, comm.size, 16, num_experts=4 * comm.size)
    x, idx, weights = mine(buf, sent)
    results = []
    for _ in range(2):
        a = x.copy()
        results.append(buf.low_latency_dispatch(a, idx, weights, use_fp8=False, return_recv_hook=True))
        del a
        buf.xp.full(x.shape, np.nan, x.dtype)
    for result in results:
        result[4]()
    rows = [[to_host(r[0][e, :n]).tobytes() for e, n in enumerate(host_list(r[1]))] for r in results]
    assert rows[0] == rows[1]
    again = buf.low_latency_dispatch(x, idx, weights, use_fp8=False)
    assert rows[0] == [to_host(again[0][e, :n]).tobytes() for e, n in enumerate(host_list(again[1]))]


# ---- the listed cases


def test_a_rank_with_nothing(comm, make):
    if comm.size != 2:
        pytest.skip("two ranks")
    buf = make()
    for round_number in range(4):
        sender = round_number // 3
        tokens = [8 if rank == sender else 0 for rank in range(2)]
        sent = draw(round_number, 2, tokens, num_experts=8)
        sent.idxs[sender][...] = np.array([0, 1]) + 4 * sender
        handle, routing = check_dispatch(buf, sent, use_fp8=round_number % 2 == 0)
        counts = [8, 8, 0, 0] if buf.rank == sender else [0] * 4
        assert host_list(handle.num_tokens_per_expert) == counts
        z = check_combine(
            buf, handle, routing, 1, dispatched=sent.weights, reduction=("rank", "source")[sender]
        )
        assert z.shape == (tokens[buf.rank], 512)


def test_nobody_has_a_token(comm, make):
    buf = make()
    sent = draw(0, comm.size, 0, num_experts=4 * comm.size)
    handle, routing = check_dispatch(buf, sent)
    for reduction, zero_copy in product(("rank", "source"), (False, True)):
        check_combine(buf, handle, routing, 0, reduction=reduction, zero_copy=zero_copy)


def test_unused_lanes(comm, make):
    buf = make()
    sent = draw(8, comm.size, 7, num_experts=4 * comm.size, unused=1.0)
    handle, routing = check_dispatch(buf, sent)
    out = buf.xp.full((7, 512), np.nan, DTYPES["bfloat16"])
    for reduction, use_logfmt in product(("rank", "source"), (False, True)):
        out[...] = np.nan
        check_combine(
            buf,
            handle,
            routing,
            8,
            dispatched=sent.weights,
            out=out,
            reduction=reduction,
            use_logfmt=use_logfmt,
        )
        assert not np.any(to_host(out).view(np.uint16))
    sent = draw(9, comm.size, 7, num_experts=4 * comm.size, unused=0.0)
    for rank in range(comm.size):
        sent.idxs[rank][3] = -1
        sent.idxs[rank][4, 1] = -1
        sent.weights[rank][3:5, 1] = np.nan
    handle, routing = check_dispatch(buf, sent)
    check_combine(buf, handle, routing, 9, dispatched=sent.weights)


def test_a_repeated_expert(comm, make):
    buf = make()
    xs = [counted_rows_of(rank) for rank in range(comm.size)]
    expert = 4 * comm.size - 1
    idxs = [np.full((8, 2), expert) for _ in xs]
    weights = [np.tile(np.array([0.5, 0.25], np.float32), (8, 1)) for _ in xs]
    handle, routing = check_dispatch(buf, Sent(xs, idxs, weights), use_fp8=False)
    assert host_list(handle.num_tokens_per_expert)[3] == (8 * comm.size if buf.rank == comm.size - 1 else 0)
    for reduction in ("rank", "source"):
        check_combine(buf, handle, routing, 4, dispatched=weights, reduction=reduction)
    x, idx, w = mine(buf, Sent(xs, idxs, weights))
    recv_x, _, handle, *_ = buf.low_latency_dispatch(x, idx, w, use_fp8=False)
    z, *_ = buf.low_latency_combine(recv_x, None, None, handle)
    want = (0.75 * xs[buf.rank].astype(np.float32)).astype(xs[0].dtype)
    assert np.array_equal(to_host(z).astype(np.float32), want.astype(np.float32))


def counted_rows_of(rank):
    class Comm:
        pass

    comm = Comm()
    comm.rank = rank
    return counted_rows(comm, 8)


def test_shapes_change_on_one_job(comm, make):
    for turn in range(6):
        most, hidden, local = [(16, 2048, 4), (4, 4096, 8), (16, 512, 2)][turn % 3]
        experts = local * comm.size
        buf = make(num_max_tokens_per_rank=most, hidden=hidden, num_experts=experts)
        sent = draw(turn, comm.size, [most, 1, most // 2][turn % 3], num_experts=experts, hidden=hidden)
        handle, routing = check_dispatch(buf, sent)
        check_combine(
            buf, handle, routing, turn, dispatched=sent.weights, reduction=("rank", "source")[turn % 2]
        )
        buf.free()


@pytest.mark.parametrize("num_tokens", [600, 1024])
def test_all_to_one_expert(comm, make, num_tokens):
    buf = make(
        num_max_tokens_per_rank=num_tokens,
        num_max_low_latency_tokens_per_rank=num_tokens,
        hidden=128,
        num_topk=1,
    )
    for tokens in (num_tokens, [num_tokens if rank == 0 else num_tokens // 100 for rank in range(comm.size)]):
        sent = draw(1, comm.size, tokens, num_experts=4 * comm.size, hidden=128, num_topk=1, unused=0.0)
        for idx in sent.idxs:
            idx[...] = 2
        handle, routing = check_dispatch(buf, sent)
        check_combine(buf, handle, routing, 1, dispatched=sent.weights)


@pytest.mark.parametrize("hidden", [8, 24, 128, 384, 1536, 2880, 4608, 6400, 7168, 8192])
def test_odd_hidden(comm, make, hidden):
    buf = make(hidden=hidden, num_max_tokens_per_rank=5)
    sent = draw(hidden, comm.size, 5, num_experts=4 * comm.size, hidden=hidden)
    for casts in CASTS:
        multiple = 512 if "use_ue8m0" in casts else 128 if casts.get("use_fp8", True) else 1
        if hidden % multiple == 0:
            handle, routing = check_dispatch(buf, sent, **casts)
    for reduction, use_logfmt in product(("rank", "source"), (False, hidden % 128 == 0)):
        check_combine(
            buf, handle, routing, 1, dispatched=sent.weights, reduction=reduction, use_logfmt=use_logfmt
        )


@pytest.mark.parametrize("num_topk", [1, 12, 16, 32])
@pytest.mark.parametrize("local", [1, 129])
def test_odd_numbers_of_lanes_and_experts(comm, make, num_topk, local):
    experts = local * comm.size
    buf = make(hidden=128, num_experts=experts, num_topk=num_topk, num_max_tokens_per_rank=6)
    sent = draw(1, comm.size, 6, num_experts=experts, num_topk=num_topk, hidden=128)
    for reduction in ("rank", "source"):
        handle, routing = check_dispatch(buf, sent, use_fp8=reduction == "rank")
        check_combine(buf, handle, routing, 1, dispatched=sent.weights, reduction=reduction)


@pytest.mark.parametrize("num_tokens", [1, 2, 127, 128, 129, 255, 256, 257])
def test_odd_numbers_of_tokens(comm, make, num_tokens):
    buf = make(num_max_tokens_per_rank=300, num_max_low_latency_tokens_per_rank=257, hidden=128, num_topk=3)
    sent = draw(num_tokens, comm.size, num_tokens, num_experts=4 * comm.size, hidden=128, num_topk=3)
    handle, routing = check_dispatch(buf, sent)
    check_combine(buf, handle, routing, 1, dispatched=sent.weights)


def test_the_same_bits_every_time(comm, make):
    buf = make()
    sent = draw(3, comm.size, 16, num_experts=4 * comm.size)
    x, idx, weights = mine(buf, sent)
    first = None
    for _ in range(50):
        (payload, scales), count, handle, _, _ = buf.low_latency_dispatch(x, idx, weights)
        y = to_device(buf, np.full((4, comm.size * 16, 512), 0.3, DTYPES["bfloat16"]))
        z, _, _ = buf.low_latency_combine(y, idx, None, handle, use_logfmt=True)
        rows = [to_host(payload[e, :n]).tobytes() + to_host(scales[e, :n]).tobytes()
                for e, n in enumerate(host_list(count))]  # fmt: skip
        seen = (rows, to_host(z).tobytes())
        first = first or seen
        assert seen == first


def test_threads_change_no_bit(comm, make):
    buf = make(num_sms=3, num_max_tokens_per_rank=100, hidden=128)
    for seed, tokens in enumerate((97, 40, 1)):
        sent = draw(seed, comm.size, tokens, num_experts=4 * comm.size, hidden=128)
        handle, routing = check_dispatch(buf, sent)
        check_combine(buf, handle, routing, seed, dispatched=sent.weights, use_logfmt=seed == 0)


def test_beside_the_other_calls(comm, make):
    """High-throughput calls between a low-latency call and its hook."""
    buf = make()
    sent = draw(3, comm.size, 6, num_experts=4 * comm.size)
    x, idx, weights = mine(buf, sent)
    for _ in range(4):
        recv_x, _, handle, _, hook = buf.low_latency_dispatch(
            x, idx, weights, use_fp8=False, return_recv_hook=True
        )
        r = buf.dispatch(x, idx)
        buf.barrier()
        c = buf.combine(r.recv_x, r.handle)
        hook()
        z, _, hook = buf.low_latency_combine(recv_x, idx, None, handle, return_recv_hook=True)
        buf.barrier()
        hook()
        assert z.shape == c.combined_x.shape
    handle, routing = check_dispatch(buf, sent)
    check_combine(buf, handle, routing, 3, dispatched=sent.weights)


def test_preinitialize_and_warmup(comm, make):
    buf = make(preinitialize=True)
    sent = draw(3, comm.size, 6, num_experts=4 * comm.size)
    check_dispatch(buf, sent)
    buf.warmup()
    handle, routing = check_dispatch(buf, sent)
    check_combine(buf, handle, routing, 3, dispatched=sent.weights)


def test_m_of_1024_and_rows_that_nobody_reads(comm, make):
    buf = make(
        num_max_tokens_per_rank=1024, num_max_low_latency_tokens_per_rank=1024, hidden=128, num_topk=2,
        num_experts=2 * comm.size,
    )  # fmt: skip
    sent = draw(
        7, comm.size, [1024 - 3 * rank for rank in range(comm.size)], num_experts=2 * comm.size, hidden=128
    )
    handle, routing = check_dispatch(buf, sent, use_fp8=False)
    check_combine(buf, handle, routing, 7, dispatched=sent.weights, zero_copy=True, reduction="source")
    assert len(expert_rows(buf, routing, 1, "bfloat16")) == comm.size
