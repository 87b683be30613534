"""A late peer, and the GIL during a wait. Killed ranks and Ctrl-C: test_jobs.py."""

import time

import pytest

import epcy
from mpi import low_latency_cases as low_latency
from mpi.cases import check_combine, check_dispatch, counting, draw, raised, to_expert_0, told


@pytest.fixture(autouse=True)
def two_ranks(comm):
    if comm.size == 1:
        pytest.skip("two ranks")


def test_a_rank_that_comes_too_late(comm, make_buffer):
    buf = make_buffer(timeout=0.5)
    x, idx = to_expert_0(buf, 2)
    buf.barrier()
    late = comm.size - 1
    start = time.monotonic()
    if comm.rank != late:
        error = raised(lambda: buf.dispatch(x, idx))
        assert time.monotonic() - start < 1.5
        assert type(error) is epcy.PeerTimeoutError and isinstance(error, TimeoutError)
        assert error.ranks == (late,) and error.phase == "arrival" and error.epoch == 2
        for text in (
            f"rank {late}",
            "arrival",
            "timeout=0.5",
            f"rank {comm.rank}",
            "dispatch (call 2)",
            "reset()",
        ):
            assert text in str(error), error
    comm.Barrier()
    buf.reset()
    sent = draw(3, comm.size, 6, num_experts=4 * comm.size)
    r, routing = check_dispatch(buf, sent)
    check_combine(buf, r.handle, routing, 3)


def test_a_rank_that_comes_late_but_in_time(comm, make_buffer):
    buf = make_buffer(timeout=10)
    sent = draw(3, comm.size, 6, num_experts=4 * comm.size)
    for late in (0, comm.size - 1):
        if comm.rank == late:
            time.sleep(0.5)
        r, routing = check_dispatch(buf, sent)
        if comm.rank == late:
            time.sleep(0.2)
        check_combine(buf, r.handle, routing, 3)


@pytest.mark.parametrize("operation", ["combine", "barrier", "reset", "free"])
def test_every_collective_call_is_bounded(comm, make_buffer, operation):
    buf = make_buffer(timeout=0.3)
    r = buf.dispatch(*to_expert_0(buf, 2))
    calls = {"combine": lambda: buf.combine(r.recv_x, r.handle), "barrier": buf.barrier}
    calls |= {"reset": buf.reset, "free": buf.free}
    start = time.monotonic()
    if comm.rank == 0:
        error = told(buf, calls[operation]) if operation == "combine" else raised(calls[operation])
        assert isinstance(error, epcy.PeerTimeoutError), error
        assert error.ranks == tuple(range(1, comm.size)) and time.monotonic() - start < 1.5
    comm.Barrier()
    if operation == "free":
        if comm.rank:
            assert isinstance(raised(buf.free), epcy.PeerError)
    else:
        buf.reset()
        buf.barrier()


@pytest.mark.parametrize("timeout", [0.02, 0.05])
@pytest.mark.parametrize("operation", ["dispatch", "combine", "barrier", "reset", "low_latency_dispatch"])
def test_short_timeouts(comm, make_buffer, operation, timeout):
    """Over when they are, neither before nor after: of some tries one at least is not disturbed."""
    buf = make_buffer(timeout=20, low_latency_mode=True)
    took = []
    for _ in range(5):
        buf.reset()
        x, idx = to_expert_0(buf, 2)
        r = buf.dispatch(x, idx)
        comm.Barrier()
        calls = {
            "dispatch": lambda: buf.dispatch(x, idx, timeout=timeout),  # noqa: B023
            "combine": lambda: buf.combine(r.recv_x, r.handle, timeout=timeout),  # noqa: B023
            "barrier": lambda: buf.barrier(timeout=timeout),  # noqa: B023
            "reset": lambda: buf.reset(timeout=timeout),  # noqa: B023
            "low_latency_dispatch": lambda: buf.low_latency_dispatch(x, idx, timeout=timeout),  # noqa: B023
        }
        if comm.rank == 0:
            start = time.monotonic()
            error = low_latency.late_error(buf, calls[operation])
            took.append(time.monotonic() - start)
            assert type(error) is epcy.PeerTimeoutError and f"timeout={timeout:g} s" in str(error), repr(
                error
            )
        comm.Barrier()
    buf.reset()
    buf.free()
    if comm.rank == 0:
        assert min(took) >= 0.95 * timeout and min(took) < timeout + 0.03, took


def test_constructor_is_bounded(comm, backend):
    sizes = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_experts": comm.size, "num_topk": 1}
    lonely = comm.Dup()  # broken by this test, so never freed
    if comm.rank == 0:
        error = raised(lambda: epcy.Buffer(lonely, backend=backend, timeout=0.3, **sizes))
        assert isinstance(error, epcy.PeerTimeoutError) and error.phase == "bootstrap", error
    comm.Barrier()


def test_other_threads_run_during_a_wait(comm, make_buffer):
    buf = make_buffer(timeout=20)
    x, idx = to_expert_0(buf, 2)
    buf.barrier()
    late = comm.size - 1
    if comm.rank == late:
        time.sleep(1)
    with counting() as counts:
        start = time.monotonic()
        buf.dispatch(x, idx)
        waited, reached = time.monotonic() - start, counts[0]
    if comm.rank == 0:
        assert waited > 0.7
        assert reached > 100
