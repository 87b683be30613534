"""Ctrl-C on one rank while it waits, in every call that does: a KeyboardInterrupt at once, everybody else is told, and
reset() on all ranks makes the Buffer usable again."""

import os
import signal
import threading
import time

import pytest

import epcy
from mpi import test_faults
from mpi.cases import works
from mpi.low_latency_cases import works as low_latency_works

pytestmark = pytest.mark.host_only("the host waits in some of a GPU's calls alone")
SOON = 0.3  # s from the signal to the exception
ATTEMPTS = 3  # one of which nothing else on this machine disturbs


@pytest.fixture(autouse=True)
def several_ranks(comm):
    if comm.size == 1:
        pytest.skip("two ranks")


@pytest.fixture(params=["one node", "nodes"])
def layout(request):
    return {} if request.param == "one node" else {"num_max_nvl_peers": 1, "path": "direct"}


def interrupted(comm, call):
    """Make a call on all ranks, with SIGINT for rank 0 while it waits; its error, and how long that took to come."""
    sent = []

    def strike():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.1, strike)
    comm.Barrier()
    error = None
    try:
        if comm.rank == 0:
            timer.start()
        call()
    except (KeyboardInterrupt, epcy.EpcyError) as caught:
        error, came = caught, time.monotonic()
    finally:
        timer.join() if comm.rank == 0 else None
        signal.signal(signal.SIGINT, handler)
    if comm.rank == 0:
        assert isinstance(error, KeyboardInterrupt), repr(error)
        return error, came - sent[0]
    return error, None


NAMES = [*test_faults.HIGH_THROUGHPUT, *test_faults.LOW_LATENCY]
CELLS = [(name, phase) for name in NAMES for phase in ("arrival", "data")]
CELLS += [("barrier", "arrival"), *(("reset", phase) for phase in ("arrival", "data", "completion"))]


@pytest.mark.parametrize("name, phase", CELLS)
def test_in_a_call(comm, make_buffer, layout, name, phase):
    """The last rank is late on its way to this phase: rank 0 waits for it there, or for its end."""
    operation = name.split(",")[0]
    first = {"dispatch": 3, "low_latency_dispatch": 2}.get(operation, 1)
    took = []
    for _ in range(ATTEMPTS):
        fault = f"late:rank={comm.size - 1},operation={operation},phase={phase},call={first},ms=400"
        buf = make_buffer(low_latency_mode=True, faults=fault, timeout=20, **layout)
        calls = test_faults.Calls(buf)
        error, seconds = interrupted(comm, lambda: test_faults.with_timeout(buf, name, calls, None))  # noqa: B023
        if comm.rank == 0:
            took.append(seconds)
            assert not buf
            if name == "reset":
                buf.reset()  # it goes on where it was
        elif name == "reset":
            assert error is None
        elif error is None:  # it had all it needed of this call
            with pytest.raises(epcy.PeerTimeoutError, match="gave up"):
                buf.barrier()
        else:
            assert type(error) is epcy.PeerTimeoutError and "gave up" in str(error), repr(error)
        comm.Barrier()
        if name != "reset":
            assert not buf
            buf.reset()
        assert buf
        works(buf)
        low_latency_works(buf)
        buf.free()
        if comm.bcast(bool(took) and min(took) < SOON):
            return
    pytest.fail(f"the exceptions came after {took} s")


def test_in_free(comm, make_buffer, layout):
    """Who leaves has left: the Buffer is freed on every rank, and the next one works."""
    took = []
    for _ in range(ATTEMPTS):
        buf = make_buffer(timeout=20, **layout)

        def free():
            if comm.rank == comm.size - 1:
                time.sleep(0.4)
            buf.free()  # noqa: B023

        error, seconds = interrupted(comm, free)
        if comm.rank == 0:
            took.append(seconds)
        else:
            assert isinstance(error, epcy.PeerTimeoutError) and "gave up" in str(error), repr(error)
            assert "reset()" not in str(error)
        assert not buf
        comm.Barrier()
        with pytest.raises(epcy.StateError, match="freed"):
            buf.reset()
        works(make_buffer(**layout))
        if comm.bcast(bool(took) and min(took) < SOON):
            return
    pytest.fail(f"the exceptions came after {took} s")


@pytest.mark.parametrize("late", ["before it", "in it", "in its warmup"])
def test_in_the_constructor(comm, make_buffer, layout, late, tmp_path):
    """Before there is a Buffer to tell the others by, they end with their limit. No status page stays."""
    took, pages = [], tmp_path / "pages"
    for _ in range(ATTEMPTS):
        operation = {"in it": "constructor", "in its warmup": "dispatch"}.get(late)
        fault = f"late:rank={comm.size - 1},operation={operation},ms=400,call=1" if operation else None

        def construct():
            if comm.rank == comm.size - 1 and late == "before it":
                time.sleep(0.4)
            options = {"preinitialize": late == "in its warmup", "status_dir": str(pages), **layout}
            make_buffer(timeout=1.5, faults=fault, **options)  # noqa: B023

        error, seconds = interrupted(comm, construct)
        if comm.rank == 0:
            took.append(seconds)
        else:
            assert type(error) is epcy.PeerTimeoutError, repr(error)
            assert (error.phase == "bootstrap") == (late != "in its warmup"), repr(error)
        comm.Barrier()
        assert not pages.exists() or not list(pages.iterdir())
        works(make_buffer(timeout=20, **layout))
        if comm.bcast(bool(took) and min(took) < SOON):
            return
    pytest.fail(f"the exceptions came after {took} s")
