"""Calls that the Buffer's state does not allow: freed, forked, pickled, in use by a thread, broken; and reset."""

import copy
import gc
import os
import pickle
import signal
import threading
import time
import warnings

import numpy as np
import pytest

import epcy
from mpi.cases import BFLOAT16, check_combine, check_dispatch, draw, raised, to_expert_0, works


def calls(buf, handle=None):
    """Every call of a Buffer, by name."""
    x, idx = buf.xp.zeros((1, 512), BFLOAT16), buf.xp.zeros((1, 2), np.int64)
    return {
        "dispatch": lambda: buf.dispatch(x, idx),
        "combine": lambda: buf.combine(x, handle),
        "combine_input": lambda: buf.combine_input(handle),
        "get_dispatch_layout": lambda: buf.get_dispatch_layout(idx),
        "barrier": buf.barrier,
        "check": buf.check,
        "warmup": buf.warmup,
        "reset": buf.reset,
        "__enter__": buf.__enter__,
    }


def test_after_free(comm, make_buffer):
    buf = make_buffer()
    sent = draw(3, comm.size, 6, num_experts=4 * comm.size)
    r, _ = check_dispatch(buf, sent)
    assert buf and "alive" in repr(buf)
    buf.free()
    buf.free()
    assert not buf and "freed" in repr(buf)
    for name, call in calls(buf, r.handle).items():
        error = raised(call)
        assert type(error) is epcy.StateError and isinstance(error, RuntimeError), f"{name}: {error!r}"
        assert (
            str(error).startswith(f"{name}: ") and "freed" in str(error) and f"rank {comm.rank}" in str(error)
        )
    error = raised(lambda: r.recv_x)
    assert type(error) is epcy.StateError and "freed" in str(error)
    assert r.handle.num_tokens == 6  # a handle is no view


def test_with(comm, backend):
    sizes = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_experts": comm.size, "num_topk": 1}
    with epcy.Buffer(comm, backend=backend, **sizes) as buf:
        buf.barrier()
    assert not buf
    with pytest.raises(ZeroDivisionError), epcy.Buffer(comm, backend=backend, **sizes) as buf:
        raise ZeroDivisionError
    assert not buf


def test_exception_on_one_rank_alone(comm, backend):
    sizes = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_experts": comm.size, "num_topk": 1}

    def body():
        with epcy.Buffer(comm, backend=backend, timeout=0.3, **sizes) as buf:
            if comm.rank == 0:
                raise ZeroDivisionError
            buf.barrier()
            return buf

    error = raised(body)  # nothing collective on the way out: no hang
    assert comm.size == 1 or isinstance(error, ZeroDivisionError if comm.rank == 0 else epcy.PeerTimeoutError)


def test_a_rank_that_leaves_is_not_waited_for(comm, backend):
    """An exception leaves `with` on one rank: the others learn it long before their timeout."""
    sizes = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_experts": comm.size, "num_topk": 1}
    buf = epcy.Buffer(comm, backend=backend, timeout=20, **sizes)

    def body():
        with buf:
            raise ZeroDivisionError

    if comm.rank == 0:
        assert isinstance(raised(body), ZeroDivisionError)
    else:
        start = time.monotonic()
        error = raised(buf.barrier)
        assert isinstance(error, epcy.PeerTimeoutError) and error.ranks == (0,)
        assert time.monotonic() - start < 5
    buf.free()


def test_reset_on_one_rank_releases_the_others(comm, make_buffer):
    """Ctrl-C between two calls, then reset(): ranks that wait in the next call need not wait for their timeout."""
    if comm.size == 1:
        pytest.skip("two ranks")
    buf = make_buffer(timeout=20)
    x, idx = to_expert_0(buf, 2)
    buf.dispatch(x, idx)
    if comm.rank:
        start = time.monotonic()
        error = raised(lambda: buf.dispatch(x, idx))
        assert isinstance(error, epcy.PeerTimeoutError) and 0 in error.ranks
        assert time.monotonic() - start < 5
    buf.reset()
    works(buf)


def test_free_in_odd_orders(comm, make_buffer):
    buffers = [make_buffer() for _ in range(3)]
    for buf in buffers:
        works(buf)
    buffers[1].free()
    works(buffers[2])
    works(buffers[0])
    buffers[0].free()
    works(buffers[2])


def test_free_meets_dispatch(comm, make_buffer):
    """One rank frees while the others dispatch: all are told, none waits for ever."""
    if comm.size == 1:
        pytest.skip("two ranks")
    buf = make_buffer(timeout=5)
    x, idx = to_expert_0(buf, 2)
    start = time.monotonic()
    error = raised(buf.free if comm.rank == 0 else lambda: buf.dispatch(x, idx))
    assert type(error) is epcy.MismatchError and "in free" in str(error)
    assert time.monotonic() - start < 4
    assert bool(buf) == (comm.rank != 0)
    comm.Barrier()
    error = raised(buf.free)  # rank 0 is gone already, so the others cannot free together
    assert error is None if comm.rank == 0 else isinstance(error, epcy.PeerError)


def test_leaked_buffer_warns(comm, backend):
    buf = epcy.Buffer(
        comm, num_max_tokens_per_rank=4, hidden=64, num_experts=comm.size, num_topk=1, backend=backend
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del buf
        gc.collect()
    assert [w.category for w in caught] == [ResourceWarning]
    assert "never freed" in str(caught[0].message) and "free()" in str(caught[0].message)
    comm.Barrier()


def test_pickle_and_copy(comm, make_buffer):
    buf = make_buffer()
    handle = buf.dispatch(*to_expert_0(buf, 2)).handle
    for way in (pickle.dumps, copy.copy, copy.deepcopy):
        error = raised(lambda: way(buf))  # noqa: B023
        assert isinstance(error, epcy.NotSupportedError) and "pickle" in str(error)
        assert isinstance(raised(lambda: way(handle)), TypeError)  # noqa: B023


@pytest.mark.parametrize("num_sms", [1, 2])
def test_fork(comm, make_buffer, num_sms):
    buf = make_buffer(num_sms=num_sms)
    r = buf.dispatch(*to_expert_0(buf, 2))
    table = calls(buf, r.handle)
    child = os.fork()
    if child == 0:
        wrong = 1
        try:
            signal.alarm(10)
            errors = {name: raised(call) for name, call in table.items()}
            errors["free"] = raised(buf.free)
            good = [type(e) is epcy.StateError and "fork" in str(e) for e in errors.values()]
            del buf, r, table
            gc.collect()
            wrong = 0 if all(good) else 2
        finally:
            os._exit(wrong)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    works(buf)


def test_fork_drops_a_buffer(comm, backend):
    """The last reference goes in the child, which has none of the Buffer's threads."""
    sizes = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_experts": comm.size, "num_topk": 1}
    buf = epcy.Buffer(comm, backend=backend, num_sms=3, **sizes)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        del buf
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    buf.free()


def test_two_threads_in_one_buffer(comm, make_buffer):
    if comm.size == 1:
        pytest.skip("a rank alone never waits")
    buf = make_buffer(timeout=20)
    seen, inside = [], threading.Event()

    def wait():
        inside.set()
        seen.append(raised(buf.barrier))

    if comm.rank == 0:
        thread = threading.Thread(target=wait)
        thread.start()
        inside.wait()
        time.sleep(0.1)
        for name, call in {**calls(buf), "free": buf.free}.items():
            error = raised(call)
            assert type(error) is epcy.StateError and "another thread" in str(error), f"{name}: {error!r}"
        comm.Barrier()
        thread.join()
    else:
        comm.Barrier()
        wait()
    assert seen == [None]
    works(buf)


def test_two_threads_with_a_buffer_each(comm, make_buffer):
    buffers = [make_buffer(), make_buffer()]
    failures = []

    def body(buf, seed):
        try:
            if buf.backend == "nvshmem":
                # Kernels of two Buffers in one stream would wait for each other where ranks order them differently.
                buf.xp.cuda.Device(buf.options["device"]).use()
                buf.xp.cuda.Stream(non_blocking=True).use()
            for turn in range(5):
                sent = draw(seed + turn, comm.size, 6, num_experts=4 * comm.size)
                r, routing = check_dispatch(buf, sent)
                check_combine(buf, r.handle, routing, seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body, args=(buf, 10 * i)) for i, buf in enumerate(buffers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_init_twice(comm, make_buffer):
    buf = make_buffer()
    error = raised(lambda: buf.__init__(comm, num_max_tokens_per_rank=1, hidden=8, num_experts=8, num_topk=1))
    assert type(error) is epcy.StateError
    works(buf)


def test_broken_then_reset(comm, make_buffer):
    if comm.size == 1:
        pytest.skip("two ranks")
    buf = make_buffer(timeout=0.3)
    x, idx = to_expert_0(buf, 2)
    for turn in range(2):
        r = buf.dispatch(x, idx)
        buf.combine_input(r.handle)  # never given back: reset does
        late = comm.size - 1 if turn else 0
        if comm.rank != late:
            error = raised(lambda: buf.dispatch(x, idx))
            assert isinstance(error, epcy.PeerTimeoutError), error
            assert not buf and "broken" in repr(buf)
            for name, call in calls(buf, r.handle).items():
                if name != "reset":
                    error = raised(call)
                    assert type(error) is epcy.StateError and "reset()" in str(error), f"{name}: {error!r}"
        comm.Barrier()
        if comm.rank == late:
            error = raised(lambda: buf.dispatch(x, idx)) or raised(buf.check)  # on GPUs as the kernel ends
            assert isinstance(error, epcy.PeerTimeoutError) and "gave up" in str(error)
        buf.reset()
        assert buf and isinstance(raised(lambda: r.recv_x), epcy.StateError)  # noqa: B023
        works(buf)
    buf.reset()  # also of one that is whole
    works(buf)
