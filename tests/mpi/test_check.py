"""The option `check`: Buffers used in another order, writes past the ends, rows that nobody wrote, bad ids."""

import threading
import time

import numpy as np
import pytest

import epcy
from mpi import low_latency_cases as low_latency
from mpi.cases import DTYPES, check_combine, check_dispatch, draw, raised, to_expert_0, to_host

BF16 = DTYPES["bfloat16"]


def sent(buf, seed=3):
    return draw(seed, buf.size, 6, num_experts=4 * buf.size)


def works(buf):
    for layout in ("rank", "expert"):
        r, routing = check_dispatch(buf, sent(buf), layout=layout, alignment=4 if layout == "expert" else 1)
        check_combine(buf, r.handle, routing, 3, staged=layout == "rank")
        check_dispatch(buf, draw(4, buf.size, 6, num_experts=4 * buf.size), handle=r.handle, routing=routing)
    check_dispatch(buf, sent(buf), worst=16 * buf.size)
    check_dispatch(buf, sent(buf), worst=2)
    assert isinstance(raised(buf.check), (epcy.CapacityError, type(None)))
    for hook in (False, True):
        handle, routing = low_latency.check_dispatch(buf, sent(buf), hook=hook)
        low_latency.check_combine(buf, handle, routing, 3, dispatched=sent(buf).weights, hook=hook)


def test_all_calls_work(comm, make_buffer):
    buf = make_buffer(check=True, low_latency_mode=True)
    for _ in range(3):
        works(buf)
    buf.barrier()
    buf.reset()
    works(buf)


@pytest.mark.parametrize(
    "region", ["receive area", "low-latency receive area", "combine area", "low-latency combine area"]
)
def test_a_write_past_the_end(comm, make_buffer, region):
    buf = make_buffer(check=True, low_latency_mode=True)
    x, idx = to_expert_0(buf, 2)
    r = buf.dispatch(x, idx)
    recv_x, _, handle, _, _ = buf.low_latency_dispatch(x, idx)
    arrays = {"receive area": r.recv_x, "low-latency receive area": recv_x[0],
              "combine area": buf.combine_input(r.handle),
              "low-latency combine area": buf.low_latency_combine_input(handle)}  # fmt: skip
    if comm.rank == comm.size - 1:
        # what a kernel of the user does that runs off the end: all the way to the next region
        guard = guard_behind(arrays[region])
        guard[5:6] ^= 0x55
    error = raised(buf.barrier)
    if comm.rank == comm.size - 1:
        assert type(error) is epcy.StateError, repr(error)
        for text in ("past the end of", region, f"rank {comm.rank}", "1 of 128", "5 bytes", "barrier"):
            assert text in str(error), error
    else:
        assert error is None
    buf.barrier()
    works(buf)


def guard_behind(array):
    """The first guard behind where an array begins: 128 canary bytes before a page's end of the Buffer's memory."""
    if isinstance(array, np.ndarray):
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        heap = np.frombuffer(base.base if base.base is not None else base, np.uint8)
        at = array.ctypes.data - heap.ctypes.data

        def bytes_at(begin):
            return heap[begin : begin + 128]
    else:
        import cupy

        at = array.data.ptr  # symmetric memory begins at a page

        def bytes_at(begin):
            memory = cupy.cuda.UnownedMemory(begin, 128, array)
            return cupy.ndarray((128,), np.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))

    at = at // 4096 * 4096 + 4096
    while not (to_host(bytes_at(at - 128)) == 0xC5).all():
        at += 4096
    return bytes_at(at - 128)


def test_rows_that_nobody_wrote_are_nan(comm, make_buffer):
    buf = make_buffer(check=True, low_latency_mode=True)
    x, idx = to_expert_0(buf, 2)
    for _ in range(3):
        r = buf.dispatch(x, idx, num_worst_tokens=2 * comm.size + 3)
        come = 2 * comm.size if comm.rank == 0 else 0
        assert np.isnan(as_floats(r.recv_x[come:])).all()
        assert not np.isnan(as_floats(r.recv_x[:come])).any()
        recv_x, count, handle, _, _ = buf.low_latency_dispatch(x, idx, use_fp8=False)
        for e, n in enumerate(to_host(count)):
            assert np.isnan(as_floats(recv_x[e, n:])).all()
        assert np.isnan(as_floats(buf.low_latency_combine_input(handle))).all()
        buf.low_latency_combine(recv_x, None, None, handle)
        assert np.isnan(as_floats(buf.combine_input(r.handle))).all()
        buf.combine(buf.combine_input(r.handle), r.handle)
        buf.reset()


def as_floats(array):
    return to_host(array).astype(np.float32)


def test_bad_ids_at_once(comm, make_buffer):
    """Without the option they count as -1, and are told later."""
    buf = make_buffer(check=True, low_latency_mode=True)
    x, idx = to_expert_0(buf, 2)
    bad = idx.copy()
    bad[1, 0] = 4 * comm.size
    error = low_latency.late_error(buf, lambda: buf.low_latency_dispatch(x, bad if comm.rank == 0 else idx))
    assert type(error) is (epcy.ArgumentError if comm.rank == 0 else epcy.PeerError), repr(error)
    assert f"topk_idx[1, 0]: expected an expert id in 0..{4 * comm.size - 1}" in str(error)
    works(buf)


@pytest.mark.host_only("the GPUs' kernels do not wait on the host")
@pytest.mark.parametrize("low", [False, True])
def test_buffers_in_another_order(comm, make_buffer, low):
    if comm.size == 1:
        pytest.skip("two ranks")
    first, second = (make_buffer(check=True, low_latency_mode=True, timeout=20) for _ in range(2))
    x, idx = to_expert_0(first, 2)
    for buf in (first, second):
        buf.dispatch(x, idx)
    mine, other = (second, first) if comm.rank == comm.size - 1 else (first, second)
    start = time.monotonic()
    error = raised(lambda: mine.low_latency_dispatch(x, idx) if low else mine.dispatch(x, idx))
    assert time.monotonic() - start < 5
    assert isinstance(error, (epcy.MismatchError, epcy.PeerTimeoutError)), repr(error)
    told = comm.allgather(str(error) if isinstance(error, epcy.MismatchError) else "")
    assert any(told), error
    for text in filter(None, told):
        assert "different orders" in text and f"rank {comm.size - 1}" in text and "(call 2)" in text, text
    for buf in (mine, other):
        raised(buf.barrier)  # broken, or told so
    comm.Barrier()
    for buf in (first, second):
        buf.reset()
        works(buf)


@pytest.mark.host_only("the GPUs' kernels do not wait on the host")
def test_a_buffer_for_each_thread_is_no_disorder(comm, make_buffer):
    """Both threads of a rank are late in the other one's Buffer for a while: that is legal."""
    if comm.size == 1:
        pytest.skip("two ranks")
    buffers = [make_buffer(check=True, low_latency_mode=True, timeout=20) for _ in range(2)]
    failures = []

    def body(number):
        buf = buffers[number]
        x, idx = to_expert_0(buf, 2)
        try:
            buf.dispatch(x, idx)
            if comm.rank % 2 == number:
                time.sleep(0.5)
            buf.dispatch(x, idx)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
