"""Low-latency calls in flight: hooks, areas, what the state of the Buffer does not allow; reset and free."""

import numpy as np
import pytest

import epcy
from mpi.cases import DTYPES, address_of, draw, mine, raised, to_device, to_host
from mpi.low_latency_cases import (
    check_combine,
    check_dispatch,
    compare_received,
    expected,
    expert_rows,
    late_error,
    works,
)


@pytest.fixture
def make(make_buffer):
    def build(**options):
        return make_buffer(low_latency_mode=True, **options)

    return build


def sends(buf, sent, **options):
    x, idx, weights = mine(buf, sent)
    return buf.low_latency_dispatch(x, idx, weights, use_fp8=False, return_recv_hook=True, **options)


def refused(call, *texts):
    error = raised(call)
    assert type(error) is epcy.StateError, repr(error)
    for text in texts:
        assert text in str(error), error


def test_without_the_mode(comm, make_buffer):
    buf = make_buffer()
    x, idx = to_device(buf, (np.ones((1, 512), DTYPES["bfloat16"]), np.zeros((1, 2), np.int64)))
    for name, call in (
        ("low_latency_dispatch", lambda: buf.low_latency_dispatch(x, idx)),
        ("low_latency_combine", lambda: buf.low_latency_combine(x, idx, None, None)),
        ("low_latency_combine_input", lambda: buf.low_latency_combine_input(None)),
    ):
        refused(call, f"{name}: ", "low_latency_mode=True", f"rank {comm.rank}")
    assert buf.low_latency_transport is None and buf.options["num_max_low_latency_tokens_per_rank"] is None
    buf.barrier()


def test_options(comm, make, make_buffer, backend):
    buf = make(num_max_tokens_per_rank=300)
    assert buf.options["num_max_low_latency_tokens_per_rank"] == 256 and buf.low_latency_transport
    assert make().options["num_max_low_latency_tokens_per_rank"] == 16
    without_nvlink = {"num_max_low_latency_tokens_per_rank": 31, "allow_nvlink_for_low_latency_mode": False}
    buf = make(**without_nvlink)
    assert buf.low_latency_transport == ("shared memory" if backend == "host" else "NVSHMEM put")
    sent = draw(1, comm.size, 31, num_experts=4 * comm.size)  # more than the other calls have room for
    handle, routing = check_dispatch(buf, sent)
    check_combine(buf, handle, routing, 1, dispatched=sent.weights)
    hint = epcy.Buffer.size_hint(
        comm.size,
        num_max_tokens_per_rank=16,
        hidden=512,
        num_experts=4 * comm.size,
        num_topk=2,
        low_latency_mode=True,
        num_max_low_latency_tokens_per_rank=31,
        backend=backend,
    )
    assert hint["low_latency"] >= 4 * 4 * comm.size * 31 * 1024
    assert hint["total"] == sum(hint[name] for name in ("control", "receive", "combine", "low_latency"))
    if comm.size > 1:
        options = {"num_max_low_latency_tokens_per_rank": 8 + (comm.rank == 0)}
        error = raised(lambda: make_buffer(low_latency_mode=True, **options))
        assert isinstance(error, epcy.MismatchError) and "num_max_low_latency_tokens_per_rank" in str(error)


def test_two_dispatches_in_flight(comm, make):
    buf = make()
    sents = [draw(seed, comm.size, 5 + seed, num_experts=4 * comm.size) for seed in range(3)]
    for _ in range(2):
        first, second = sends(buf, sents[0]), sends(buf, sents[1])
        refused(lambda: sends(buf, sents[2]), "low_latency_dispatch: ", "two calls", "hook")
        refused(lambda: check_dispatch(buf, sents[2]), "low_latency_dispatch: ", "hook of an earlier call")
        refused(second[4], "earlier low_latency_dispatch", "order")
        first[4]()
        refused(first[4], "received already", "once")
        third = sends(buf, sents[2])  # takes the first one's place, and its area
        second[4]()
        compare_received(second[0], second[1], expected(buf, sents[1], use_fp8=False)[0])
        third[4]()
        compare_received(third[0], third[1], expected(buf, sents[2], use_fp8=False)[0])
    assert first[2].received and "received" in repr(first[2]) and "hook" in repr(first[4]).lower()
    works(buf)


def test_two_combines_in_flight(comm, make):
    buf = make()
    sents = [draw(seed, comm.size, 5 + seed, num_experts=4 * comm.size) for seed in range(3)]
    made = [check_dispatch(buf, sent) for sent in sents]
    ys = [to_device(buf, expert_rows(buf, routing, 1, "bfloat16")[buf.rank]) for _, routing in made]

    def combine(at, **options):
        return buf.low_latency_combine(ys[at], None, None, made[at][0], return_recv_hook=True, **options)

    first, second = combine(0), combine(1)
    refused(lambda: combine(2), "low_latency_combine: ", "two calls")
    refused(
        lambda: buf.low_latency_combine(ys[2], None, None, made[2][0]),
        "low_latency_combine: ",
        "earlier call",
    )
    refused(lambda: buf.low_latency_combine_input(made[2][0]), "both combine areas")
    refused(second[2], "earlier low_latency_combine", "order")
    first[2]()
    second[2]()
    refused(second[2], "received already")
    for at, (z, _, _) in enumerate((first, second)):
        again, _, _ = buf.low_latency_combine(ys[at], None, None, made[at][0])
        assert to_host(z).tobytes() == to_host(again).tobytes()
    works(buf)


def test_combine_before_the_dispatch_is_received(comm, make):
    buf = make()
    sent = draw(1, comm.size, 5, num_experts=4 * comm.size)
    recv_x, _, handle, _, hook = sends(buf, sent)
    assert not handle.received and "not yet received" in repr(handle)
    error = raised(lambda: buf.low_latency_combine(recv_x, None, None, handle))
    assert type(error) is epcy.StateError and "handle: " in str(error) and "hook" in str(error)
    hook()
    buf.low_latency_combine(recv_x, None, None, handle)
    assert comm.size == 1 or isinstance(raised(buf.check), (epcy.PeerError, type(None)))
    works(buf)


def test_double_batch_overlap(comm, make):
    """Two micro-batches: each one's calls fly while the other one's experts work."""
    buf = make(num_topk=3)
    size = {"num_experts": 4 * comm.size, "num_topk": 3}
    for step in range(4):
        sents = [draw(10 * step + batch, comm.size, [7, 16][batch], **size) for batch in range(2)]
        flights = [sends(buf, sent) for sent in sents]
        combines = []
        for batch, (recv_x, recv_count, handle, _, hook) in enumerate(flights):
            hook()
            want, _ = expected(buf, sents[batch], use_fp8=False)
            compare_received(recv_x, recv_count, want)
            y = buf.low_latency_combine_input(handle)
            y[...] = recv_x
            combines.append(
                buf.low_latency_combine(y, None, None, handle, zero_copy=True, return_recv_hook=True)
            )
        for _, _, hook in combines:
            hook()
        for batch, (z, _, _) in enumerate(combines):
            again, _, _ = buf.low_latency_combine(flights[batch][0], None, None, flights[batch][2])
            assert to_host(z).tobytes() == to_host(again).tobytes()


def test_skew_between_ranks(comm, make):
    """Ranks that run ahead by as much as the protocol lets them."""
    import time

    buf = make()
    sents = [draw(seed, comm.size, 5, num_experts=4 * comm.size) for seed in range(6)]
    rng = np.random.default_rng(comm.rank)
    for turn in range(30):
        if rng.random() < 0.3:
            time.sleep(0.002 * rng.random())
        sent = sents[turn % 6]
        handle, routing = check_dispatch(buf, sent, hook=turn % 2 == 0, use_fp8=turn % 3 == 0)
        if rng.random() < 0.3:
            time.sleep(0.002 * rng.random())
        check_combine(
            buf, handle, routing, turn, dispatched=sent.weights, zero_copy=turn % 4 == 0, hook=turn % 5 == 0
        )


def test_combine_inputs(comm, make):
    buf = make(dtype="float32")
    sent = draw(1, comm.size, 5, num_experts=4 * comm.size)
    handle, routing = check_dispatch(buf, sent)
    first, second = buf.low_latency_combine_input(handle), buf.low_latency_combine_input(handle, "float16")
    assert (
        first.dtype == np.float32 and second.dtype == np.float16 and address_of(first) != address_of(second)
    )
    refused(
        lambda: buf.low_latency_combine_input(handle), "low_latency_combine_input: ", "both combine areas"
    )
    outside = to_device(buf, expert_rows(buf, routing, 1, "bfloat16")[buf.rank])
    error = raised(lambda: buf.low_latency_combine(outside, None, None, handle))
    assert type(error) is epcy.StateError and "x: " in str(error), error
    error = raised(lambda: buf.low_latency_combine(outside, None, None, handle, zero_copy=True))
    assert type(error) is epcy.ArgumentError and "zero_copy" in str(error), error
    for y in (first, second):
        y[...] = 1
        buf.low_latency_combine(y, None, None, handle, zero_copy=True)
    error = raised(lambda: buf.low_latency_combine(second, None, None, handle, zero_copy=True))
    assert type(error) is epcy.ArgumentError and "not combined yet" in str(error), error
    raised(buf.check)
    check_combine(buf, handle, routing, 2, dispatched=sent.weights, zero_copy=True, dtype="float32")
    y = buf.low_latency_combine_input(handle)
    y[...] = 1
    buf.low_latency_combine(y, None, None, handle)  # it is the area, said or not
    check_combine(buf, handle, routing, 3, dispatched=sent.weights)


def test_handles_of_the_other_mode(comm, make):
    buf = make()
    sent = draw(1, comm.size, 5, num_experts=4 * comm.size)
    x, idx, _ = mine(buf, sent)
    handle, _ = check_dispatch(buf, sent)
    r = buf.dispatch(x, idx)
    for call in (
        lambda: buf.combine(r.recv_x, handle),
        lambda: buf.dispatch(x, handle=handle),
        lambda: buf.combine_input(handle),
        lambda: buf.low_latency_combine_input(r.handle),
    ):
        error = raised(call)
        assert type(error) is epcy.ArgumentError and "handle: expected the handle of a " in str(error), error
    raised(buf.check)
    other = make()
    error = raised(lambda: other.low_latency_combine_input(handle))
    assert type(error) is epcy.ArgumentError and "another Buffer" in str(error)


def test_reset_gives_up_what_is_in_flight(comm, make):
    buf = make()
    sents = [draw(seed, comm.size, 5, num_experts=4 * comm.size) for seed in range(2)]
    handle, routing = check_dispatch(buf, sents[0])
    buf.low_latency_combine_input(handle)
    flights = [sends(buf, sent) for sent in sents]
    buf.reset()
    for flight in flights:
        refused(flight[4], "given up by reset()")
    for seed in range(3):
        works(buf, seed)
    check_combine(buf, handle, routing, 3, dispatched=sents[0].weights)  # a handle is no view
    buf.low_latency_combine_input(handle), buf.low_latency_combine_input(handle)


def test_free_with_calls_in_flight(comm, make):
    buf = make()
    sent = draw(1, comm.size, 5, num_experts=4 * comm.size)
    _, _, handle, _, hook = sends(buf, sent)
    buf.free()
    refused(hook, "hook: ", "freed")
    refused(lambda: buf.low_latency_combine_input(handle), "low_latency_combine_input: ", "freed")
    assert handle.num_tokens == 5 and buf.low_latency_transport is None


def test_a_dropped_hook(comm, make):
    """Nothing is lost but the order: the Buffer says which hook it waits for, and reset() helps."""
    buf = make()
    sent = draw(1, comm.size, 5, num_experts=4 * comm.size)
    sends(buf, sent)
    second = sends(buf, sent)
    refused(second[4], "earlier low_latency_dispatch")
    assert late_error(buf, lambda: None) is None
    buf.reset()
    works(buf)
