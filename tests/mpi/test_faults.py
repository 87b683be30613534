"""Faults on purpose (the option `faults`), at every phase of every operation: nobody hangs, the right rank is named,
and after reset() everything is exact again."""

import os
import signal
import threading
import time

import pytest

import epcy
from mpi import low_latency_cases as low_latency
from mpi.cases import BFLOAT16, check_combine, check_dispatch, draw, raised, to_expert_0
from parallel import AGREEMENT


@pytest.fixture(autouse=True)
def two_or_three_ranks(comm):
    if comm.size not in (2, 3):
        pytest.skip("two or three ranks")


def sent(buf, seed=3):
    return draw(seed, buf.size, 6, num_experts=4 * buf.size)


def works(buf):
    """Everything, compared with the reference."""
    for layout in ("rank", "expert"):
        r, routing = check_dispatch(buf, sent(buf), layout=layout)
        check_combine(buf, r.handle, routing, 3)
        check_dispatch(buf, draw(4, buf.size, 6, num_experts=4 * buf.size), handle=r.handle, routing=routing)
    check_dispatch(buf, sent(buf), worst=16 * buf.size)
    buf.barrier()
    for hook in (False, True):
        handle, routing = low_latency.check_dispatch(buf, sent(buf), hook=hook)
        low_latency.check_combine(buf, handle, routing, 3, dispatched=sent(buf).weights, hook=hook)


class Calls:
    """What the calls need."""

    def __init__(self, buf):
        x, idx = to_expert_0(buf, 2)
        self.buf, self.x, self.idx = buf, x, idx
        self.r, self.e = buf.dispatch(x, idx), buf.dispatch(x, idx, layout="expert")
        _, _, self.handle, _, _ = buf.low_latency_dispatch(x, idx)
        self.y = buf.xp.ones((4, 16 * buf.size, 512), BFLOAT16)


HIGH_THROUGHPUT = ["dispatch", "dispatch, expert layout", "dispatch, cached", "dispatch, worst case"]
HIGH_THROUGHPUT += ["combine", "combine, expert layout"]
LOW_LATENCY = [f"low_latency_{op}{hook}" for op in ("dispatch", "combine") for hook in ("", ", hook")]
LATE = [(name, phase) for name in HIGH_THROUGHPUT for phase in ("arrival", "data", "completion")]
LATE += [(name, phase) for name in LOW_LATENCY for phase in ("arrival", "data")]
LATE += [("barrier", "arrival"), *(("reset", phase) for phase in ("arrival", "data", "completion"))]
DROPPED = [(name, phase) for name in (*HIGH_THROUGHPUT, "reset") for phase in ("arrival", "completion")]
DROPPED += [(name, "arrival") for name in ("barrier", *LOW_LATENCY)]
if AGREEMENT.size > 2:  # a third rank changes little: a part of the cells
    LATE, DROPPED = LATE[::3], DROPPED[::3]


def on_the_host(cell):
    return pytest.param(*cell, marks=pytest.mark.host_only("no fault strikes inside a kernel"))


# On GPUs a rank is late before it launches a kernel, and loses the flags of a whole kernel.
LATE = [cell if cell[1] == "arrival" else on_the_host(cell) for cell in LATE]
DROPPED = [cell if cell != ("reset", "completion") else on_the_host(cell) for cell in DROPPED]


def strike(make_buffer, comm, fault, name, phase, timeout):
    """A Buffer whose last rank has a fault in the next call of an operation, and that call."""
    operation = name.split(",")[0]
    first = {"dispatch": 3, "low_latency_dispatch": 2}.get(operation, 1)
    text = f"{fault}:rank={comm.size - 1},operation={operation},phase={phase},call={first}"
    text += ",ms=350" if fault == "late" else ""
    buf = make_buffer(low_latency_mode=True, faults=text, timeout=20)
    calls = Calls(buf)
    comm.Barrier()
    # `timeout` is the call's: those before it shall not fail on a slow machine.
    return buf, lambda: with_timeout(buf, name, calls, timeout)


def with_timeout(buf, name, calls, timeout):
    x, idx, r, e = calls.x, calls.idx, calls.r.handle, calls.e.handle
    if name.startswith("dispatch"):
        options = {
            "dispatch": {"topk_idx": idx},
            "dispatch, expert layout": {"topk_idx": idx, "layout": "expert"},
            "dispatch, cached": {"handle": r},
            "dispatch, worst case": {"topk_idx": idx, "num_worst_tokens": 8},
        }[name]
        return buf.dispatch(x, timeout=timeout, **options)
    if name.startswith("combine"):
        handle = e if "expert" in name else r
        return buf.combine(buf.xp.ones((handle.num_rows, 512), BFLOAT16), handle, timeout=timeout)
    if name in ("barrier", "reset"):
        return getattr(buf, name)(timeout=timeout)
    hook = "hook" in name
    if name.startswith("low_latency_dispatch"):
        result = buf.low_latency_dispatch(x, idx, return_recv_hook=hook, timeout=timeout)
    else:
        result = buf.low_latency_combine(
            calls.y, None, None, calls.handle, return_recv_hook=hook, timeout=timeout
        )
    return result[-1]() if hook else result


@pytest.mark.parametrize("name, phase", LATE)
def test_a_late_rank(comm, make_buffer, name, phase):
    buf, call = strike(make_buffer, comm, "late", name, phase, 0.15)
    start = time.monotonic()
    error = low_latency.late_error(buf, call)
    assert time.monotonic() - start < 2
    last = comm.size - 1
    if comm.rank != last:
        assert type(error) is epcy.PeerTimeoutError and error.ranks == (last,), repr(error)
        for text in (name.split(",")[0], f"rank {comm.rank}", "timeout=0.15", f"rank {last} (pid", "reset()"):
            assert text in str(error), error
        if buf.backend == "host":  # of a kernel's waits any may be the first that expires
            assert error.phase == (
                "reset"
                if name == "reset"
                else "arrival"
                if "low" in name or phase == "arrival"
                else "completion"
            )
        assert not buf
    comm.Barrier()
    if name != "reset" or error is not None:  # where reset() returned it is over; elsewhere it goes on
        buf.reset()
    works(buf)


@pytest.mark.parametrize("name, phase", DROPPED)
def test_a_lost_flag(comm, make_buffer, name, phase):
    buf, call = strike(make_buffer, comm, "drop", name, phase, 0.15)
    error = low_latency.late_error(buf, call)
    last = comm.size - 1
    # On GPUs, who sends nothing in a kernel of its own has received what the others sent.
    misses_nothing = buf.backend != "host" and "hook" in name and comm.rank == last
    assert error is None if misses_nothing else type(error) is epcy.PeerTimeoutError, repr(error)
    if buf.backend == "host" or comm.rank != last:
        assert last in error.ranks and (comm.size == 2 or comm.rank == last or error.ranks == (last,)), error
    comm.Barrier()
    buf.reset()
    works(buf)


@pytest.mark.host_only("kernels acknowledge as the first thing of the next call")
def test_a_lost_receipt_heals(comm, make_buffer):
    """The next receipt says as much: words only grow."""
    buf = make_buffer(low_latency_mode=True, faults="drop:phase=receipt,every=3", timeout=5)
    for _ in range(4):
        works(buf)


@pytest.mark.parametrize("num_sms", [1, 2])
def test_delays_everywhere(comm, make_buffer, num_sms):
    buf = make_buffer(low_latency_mode=True, faults="delay:ms=1,seed=5,every=2", timeout=20, num_sms=num_sms)
    for _ in range(3):
        works(buf)
        buf.reset()


@pytest.mark.parametrize("operation", ["dispatch", "low_latency_dispatch"])
def test_a_failing_allocation(comm, make_buffer, operation):
    buf = make_buffer(low_latency_mode=True, faults=f"alloc:rank=0,operation={operation},call=1", timeout=5)
    x, idx = to_expert_0(buf, 2)
    error = low_latency.late_error(buf, lambda: getattr(buf, operation)(x, idx))
    assert type(error) is (epcy.HeapError if comm.rank == 0 else epcy.PeerError), repr(error)
    assert "memory" in str(error) and (comm.rank == 0 or error.ranks == (0,))
    works(buf)


MID_CALL = [(name, phase) for name in HIGH_THROUGHPUT for phase in ("data", "completion")]
MID_CALL += [(name, phase) for name in LOW_LATENCY for phase in ("data", "completion", "receipt")]


@pytest.mark.host_only("no fault strikes inside a kernel")
@pytest.mark.parametrize("name, phase", MID_CALL)
def test_no_memory_in_mid_call(comm, make_buffer, name, phase):
    """The rank that it happens to raises it; the others hear of it in this call or in the next one, at once."""
    buf, call = strike(make_buffer, comm, "alloc", name, phase, 20)
    last = comm.size - 1
    start = time.monotonic()
    error = low_latency.late_error(buf, call)
    if comm.rank == last:
        assert isinstance(error, MemoryError), repr(error)
    elif error is None:  # it had done what this call needs of it
        assert "low" in name
        error = raised(buf.barrier)
    assert time.monotonic() - start < 2
    if comm.rank != last:
        assert type(error) is epcy.PeerTimeoutError and "gave up" in str(error), repr(error)
        assert comm.size > 2 or error.ranks == (last,)  # of three, another one may have left for its sake
    assert not buf
    comm.Barrier()
    buf.reset()
    works(buf)


def test_a_full_heap(comm, make_buffer):
    for culprit in range(comm.size):
        error = raised(lambda: make_buffer(faults=f"full:rank={culprit}"))  # noqa: B023
        assert type(error) is (epcy.HeapError if comm.rank == culprit else epcy.PeerError), repr(error)
        assert "num_max_tokens_per_rank" in str(error) and "EPCY_FAULTS" in str(error)
    works(make_buffer(low_latency_mode=True))


@pytest.mark.host_only("kernels count by themselves")
@pytest.mark.parametrize("by", [1000, -100])
def test_a_count_that_cannot_be(comm, make_buffer, by):
    buf = make_buffer(low_latency_mode=True, faults=f"lie:rank=1,by={by},call=1", timeout=5)
    error = raised(lambda: buf.dispatch(*to_expert_0(buf, 2)))
    assert type(error) is epcy.PeerError and error.ranks == (1,), repr(error)
    assert str(2 + by) in str(error) and "rank 1 announced" in str(error)
    works(buf)


@pytest.mark.host_only("kernels count by themselves")
@pytest.mark.parametrize("by", [1, -1])
def test_a_count_that_lies(comm, make_buffer, by):
    """Within what is possible: the option `check` finds it."""
    buf = make_buffer(low_latency_mode=True, check=True, faults=f"lie:rank={comm.size - 1},by={by},call=1")
    last = comm.size - 1
    x, idx = to_expert_0(buf, 3)
    idx[2] = -1  # two of three tokens travel
    if by < 0:
        idx[:, 1] = -1
    error = raised(lambda: buf.dispatch(x, idx))
    if comm.rank == 0:
        assert type(error) is epcy.PeerError, repr(error)
        assert error.ranks == ((last,) if by > 0 else ()) and "announced" in str(error), error
    else:
        assert error is None
    works(buf)


NO_WAIT = pytest.mark.host_only("of a GPU's calls these do not wait")
INTERRUPTED = [pytest.param(name, marks=NO_WAIT) for name in ("combine", *LOW_LATENCY)]
INTERRUPTED += ["dispatch", "barrier", "reset"]


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupt(comm, make_buffer, name):
    buf, call = strike(make_buffer, comm, "late", name, "arrival", None)
    handler = signal.getsignal(signal.SIGINT)
    start = time.monotonic()
    error = None
    if comm.rank == 0:
        threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        call()
    except (KeyboardInterrupt, epcy.EpcyError) as caught:
        error = caught
    signal.signal(signal.SIGINT, handler)
    if name == "reset" and comm.rank == 0:
        buf.reset()  # it goes on
    elif name != "reset":  # what rank 0 sent before it left may be all that a GPU's host waits for
        error = error or raised(buf.check)
    assert time.monotonic() - start < 2
    if comm.rank == 0:
        assert isinstance(error, KeyboardInterrupt)
    elif name != "reset":  # rank 0 left the call; in reset() it has come, and the others wait for it
        assert type(error) is epcy.PeerTimeoutError and "rank 0 gave up" in str(error), repr(error)
    else:
        assert error is None
    comm.Barrier()
    if name != "reset":
        buf.reset()
    works(buf)


def test_bad_faults(comm, make_buffer):
    for text in (
        "explode",
        "delay:when=1",
        "delay:ms=x",
        "kill:rank=-1",
        "drop:operation=dance",
        "late:ms=inf",
    ):
        error = raised(lambda: make_buffer(faults=text))  # noqa: B023
        assert type(error) is epcy.ArgumentError and str(error).startswith("faults: "), repr(error)
    works(make_buffer(low_latency_mode=True))


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "1", True, 1e9])
def test_bad_timeouts(comm, make_buffer, value):
    buf = make_buffer(low_latency_mode=True, timeout=5)
    calls = Calls(buf)
    for name in ("dispatch", "combine", "barrier", "low_latency_dispatch", "low_latency_combine"):
        bad = comm.rank == 0
        error = low_latency.late_error(buf, lambda: with_timeout(buf, name, calls, value if bad else 5))  # noqa: B023
        assert type(error) is (epcy.ArgumentError if bad else epcy.PeerError), (name, error)
        assert "timeout: expected seconds" in str(error) and repr(value) in str(error)
    for call in (buf.reset, buf.free):
        assert type(raised(lambda: call(timeout=value))) is epcy.ArgumentError  # noqa: B023
    works(buf)
