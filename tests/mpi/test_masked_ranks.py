"""Low latency without some ranks: by mask_rank, or on their timeout; every row and lost lane against the reference."""

import time

import numpy as np
import pytest

import epcy
from epcy import reference
from mpi.cases import DTYPES, assert_bits, draw, mine, raised, to_device, to_expert_0, works
from mpi.low_latency_cases import compare_received, expert_rows
from parallel import given


@pytest.fixture
def make(comm, make_buffer):
    def build(**options):
        return make_buffer(low_latency_mode=True, num_topk=3, **options)

    return build


@pytest.fixture
def three_ranks(comm):
    if comm.size < 3:
        pytest.skip("three ranks")


def lanes_to(idx, rank, num_local):
    return int(((idx >= 0) & (idx // num_local == rank)).sum())


def pair(buf, masked, seed, *, hook=False, use_fp8=True, renormalize=False, reduction="rank", weights=True):
    """A dispatch and a combine whose ranks have masked[r] masked, compared with the reference; local."""
    rank, size = buf.rank, buf.size
    sent = draw(
        seed, size, [5 + r % 3 for r in range(size)], num_experts=4 * size, num_topk=3, weights=weights
    )
    want, routing = reference.low_latency_dispatch(
        sent.xs, sent.idxs, num_experts=4 * size, num_max_tokens_per_rank=16, use_fp8=use_fp8, masked=masked
    )
    x, idx, w = mine(buf, sent)
    before = buf.num_lanes_not_sent, buf.num_lanes_not_returned
    recv_x, count, handle, _, call_hook = buf.low_latency_dispatch(
        x, idx, w, use_fp8=use_fp8, return_recv_hook=hook
    )
    if hook:
        call_hook()
    compare_received(recv_x, count, want[rank])
    ys = expert_rows(buf, routing, seed, "bfloat16")
    z, _, call_hook = buf.low_latency_combine(
        to_device(buf, ys[rank]),
        None,
        None,
        handle,
        renormalize=renormalize,
        reduction=reduction,
        return_recv_hook=hook,
    )
    if hook:
        call_hook()
    combined = reference.low_latency_combine(
        ys, routing, sent.weights, renormalize=renormalize, reduction=reduction
    )
    assert_bits(z, combined[rank], "combined_x")
    not_sent = [lanes_to(idx, r, 4) if r in masked[rank] else 0 for r in range(size)]
    lost = [lanes_to(idx, r, 4) if rank in masked[r] and r not in masked[rank] else 0 for r in range(size)]
    assert handle.num_lanes_not_sent.tolist() == not_sent
    assert handle.num_lanes_not_returned.tolist() == lost
    assert (buf.num_lanes_not_sent - before[0]).tolist() == not_sent
    assert (buf.num_lanes_not_returned - before[1]).tolist() == lost
    assert set(handle.missing_ranks) >= set(masked[rank])


def test_nobody_is_masked(comm, make):
    buf = make()
    pair(buf, [()] * comm.size, 1)
    assert (
        buf.masked_ranks() == () and not buf.num_lanes_not_sent.any() and not buf.num_lanes_not_returned.any()
    )


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("reduction", ["rank", "source"])
def test_all_mask_one(comm, make, renormalize, reduction):
    """The masked rank goes on too: it gets its own tokens alone, and is told."""
    if comm.size == 1:
        pytest.skip("two ranks")
    buf = make(timeout=20)
    out = comm.size - 1
    masked = [(out,) if r != out else () for r in range(comm.size)]
    if comm.rank != out:
        buf.mask_rank(out)
        buf.mask_rank(out)
        assert buf.masked_ranks() == (out,)
    comm.Barrier()
    for seed in range(6):
        pair(buf, masked, seed, hook=seed % 2 == 1, use_fp8=seed % 3 == 0, renormalize=renormalize,
             reduction=reduction, weights=seed % 4 > 0)  # fmt: skip
        if comm.rank == out:
            time.sleep(0.002)  # behind: its peers' memory is used again before it looks
    error = raised(buf.check)
    if comm.rank == out:
        assert type(error) is epcy.PeerError and error.ranks == tuple(range(out)), repr(error)
        assert "masked" in str(error) and "unmask_rank" in str(error)
    else:
        assert error is None
        for call in (buf.barrier, lambda: buf.dispatch(*to_expert_0(buf, 2)), buf.warmup):
            error = raised(call)
            assert type(error) is epcy.StateError and f"[{out}]" in str(error) and "unmask" in str(error)
    if comm.rank != out:
        buf.unmask_rank(out)
    comm.Barrier()
    pair(buf, [()] * comm.size, 7)  # all have made the same calls: nothing else is needed
    buf.barrier()


@pytest.mark.usefixtures("three_ranks")
def test_masks_are_local(comm, make):
    """Rank 0 goes on without rank 2, which goes on without rank 1."""
    buf = make(timeout=20)
    masked = [{0: (2,), 2: (1,)}.get(r, ()) for r in range(comm.size)]
    for other in masked[comm.rank]:
        buf.mask_rank(other)
    comm.Barrier()
    for seed in range(8):
        time.sleep(0.001 * ((seed + comm.rank) % 3))
        pair(
            buf,
            masked,
            seed,
            hook=seed % 2 == 1,
            renormalize=seed % 3 == 0,
            reduction=["rank", "source"][seed % 2],
        )
    comm.Barrier()
    for other in masked[comm.rank]:
        buf.unmask_rank(other)
    buf.reset()
    pair(buf, [()] * comm.size, 9)


def test_a_handle_outlives_a_mask(comm, make):
    """Masked between dispatch and combine: the rows of that rank are missing, and nothing moves."""
    if comm.size == 1:
        pytest.skip("two ranks")
    buf, out = make(timeout=20), comm.size - 1
    sent = draw(1, comm.size, 6, num_experts=4 * comm.size, num_topk=3)
    x, idx, w = mine(buf, sent)
    _, _, handle, _, _ = buf.low_latency_dispatch(x, idx, w)
    _, routing = reference.low_latency_dispatch(
        sent.xs, sent.idxs, num_experts=4 * comm.size, num_max_tokens_per_rank=16
    )
    ys = expert_rows(buf, routing, 1, "bfloat16")
    comm.Barrier()
    if comm.rank == out:
        buf.reset(timeout=60)
        return
    buf.mask_rank(out)
    z, _, _ = buf.low_latency_combine(to_device(buf, ys[comm.rank]), None, None, handle, renormalize=True)
    lost = [lanes_to(idx, r, 4) if r == out else 0 for r in range(comm.size)]
    assert handle.num_lanes_not_returned.tolist() == lost
    rows = [
        np.where(row_of_rank(idx, out), -1, rows)
        for idx, rows in zip(sent.idxs, routing.lane_row, strict=True)
    ]
    without = reference.Routing(**{**vars(routing), "lane_row": tuple(rows)})
    want = reference.low_latency_combine(ys, without, sent.weights, renormalize=True)
    assert_bits(z, want[comm.rank], "combined_x")
    buf.unmask_rank(out)
    buf.reset()


def row_of_rank(idx, rank):
    return (idx >= 0) & (idx // 4 == rank)


@pytest.mark.usefixtures("three_ranks")
def test_on_timeout(comm, make):
    """A rank sleeps: the others go on at their timeout, exact all the way; it comes back, and all are whole again."""
    buf, out = make(timeout=0.3, on_timeout="mask"), comm.size - 1
    pair(buf, [()] * comm.size, 0)
    comm.Barrier()
    masked = [(out,) if r != out else () for r in range(comm.size)]
    sent = draw(1, comm.size, 6, num_experts=4 * comm.size, num_topk=3)
    x, idx, w = mine(buf, sent)
    if comm.rank == out:
        time.sleep(0.8)
    start = time.monotonic()
    _, _, handle, event, _ = buf.low_latency_dispatch(x, idx, w)  # sent to all, received from those that came
    event.synchronize()
    assert time.monotonic() - start < 0.7 and bool(buf)
    if comm.rank != out:
        assert handle.missing_ranks == (out,) and buf.masked_ranks() == (out,)
        assert buf.num_lanes_not_sent.tolist() == [0] * comm.size
    buf.low_latency_combine(buf.xp.ones((4, 16 * comm.size, 512), DTYPES["bfloat16"]), None, None, handle)
    if comm.rank != out:
        assert handle.num_lanes_not_returned[out] == lanes_to(idx, out, 4)
    for seed in range(3):
        pair(buf, masked, seed)
    if comm.rank == out:
        assert type(raised(buf.check)) is epcy.PeerError
    comm.Barrier()
    if comm.rank != out:
        buf.unmask_rank(out)
    buf.reset()
    pair(buf, [()] * comm.size, 5)
    buf.barrier()


@pytest.mark.usefixtures("three_ranks")
def test_reset_without_a_rank(comm, make):
    """Those that are left reset among themselves; the rank that returns is brought to their epoch by the next one."""
    buf, out = make(timeout=5), comm.size - 1
    masked = [(out,) if r != out else tuple(range(out)) for r in range(comm.size)]
    for other in masked[comm.rank]:
        buf.mask_rank(other)
    for seed in range(3):
        if comm.rank != out:
            buf.reset()
        pair(buf, masked, seed)
    comm.Barrier()
    for other in masked[comm.rank]:
        buf.unmask_rank(other)
    for seed in range(2):
        buf.reset()
        pair(buf, [()] * comm.size, seed)


@pytest.mark.usefixtures("three_ranks")
@pytest.mark.parametrize("num_calls", [0, 1, 2])
@pytest.mark.parametrize("first", ["nobody", "the masked one", "the others"])
@pytest.mark.parametrize("by", ["all others", "rank 0", "timeout"])
def test_free(comm, make, by, first, num_calls):
    """Whoever has masked a rank frees alone; so does that rank, and so do those who masked nobody: without an error."""
    buf, out = make(timeout=20, on_timeout="mask" if by == "timeout" else "raise"), comm.size - 1
    x, idx, _ = mine(buf, draw(1, comm.size, 6, num_experts=4 * comm.size, num_topk=3))

    def call():
        event = buf.low_latency_dispatch(x, idx, timeout=0.2 if by == "timeout" else None)[3]
        event.synchronize()

    call()
    comm.Barrier()
    if comm.rank != out:
        if by == "timeout":
            call()
            assert buf.masked_ranks() == (out,)
        elif by == "all others" or comm.rank == 0:
            buf.mask_rank(out)
        for _ in range(num_calls if by != "rank 0" else 0):
            call()
    if first != "the masked one" or by == "timeout":  # else it is in free() while others make their calls
        comm.Barrier()
    if {"the masked one": comm.rank != out, "the others": comm.rank == out}.get(first, False):
        time.sleep(0.1)
    start = time.monotonic()
    buf.free()
    assert time.monotonic() - start < 5 and not buf
    works(make())


@pytest.mark.usefixtures("three_ranks")
def test_free_without_a_rank_that_gave_up(comm, make):
    """The error of a free() that is not together with all names no remedy that a freed Buffer has not."""
    buf = make(timeout=20)
    comm.Barrier()
    if comm.rank == 0:
        time.sleep(0.3)
    error = raised(lambda: buf.free(timeout=0.1))
    assert type(error) is epcy.PeerTimeoutError and 0 in error.ranks or comm.rank == 0, repr(error)
    assert "reset()" not in str(error) and "has left the Buffer all the same" in str(error), error
    assert raised(buf.free) is None


@pytest.mark.parametrize("rank", [-1, 99, "0", 1.0, True, None, "self"])
def test_wrong_ranks(comm, make, rank):
    buf = make()
    given_rank = comm.rank if rank == "self" else rank
    for call in (buf.mask_rank, buf.unmask_rank):
        error = raised(lambda: call(given_rank))  # noqa: B023
        assert type(error) is epcy.ArgumentError and str(error).startswith("rank: expected "), repr(error)
        assert repr(given_rank) in str(error) and f"(rank {comm.rank})" in str(error)


def test_without_the_mode(comm, make_buffer):
    buf = make_buffer()
    error = raised(lambda: buf.mask_rank(comm.size - 1 - comm.rank))
    assert type(error) is epcy.StateError and "low_latency_mode=True" in str(error)


def masks():
    import hypothesis.strategies as st

    step = st.tuples(st.integers(0, 2**16), st.booleans(), st.booleans(), st.sampled_from(["rank", "source"]))
    mask = st.lists(st.sets(st.integers(0, 7), max_size=3), min_size=8, max_size=8)
    return st.lists(st.tuples(mask, st.lists(step, min_size=1, max_size=3)), min_size=1, max_size=3)


@given(max_examples=25, story=masks())
def test_any_masks(comm, make, story):
    """Any rank without any others, changing; ranks at any distance."""
    buf = make(timeout=20)
    for mask, steps in story:
        masked = [tuple(o for o in sorted(mask[r]) if o < comm.size and o != r) for r in range(comm.size)]
        for other in set(buf.masked_ranks()) - set(masked[comm.rank]):
            buf.unmask_rank(other)
        for other in masked[comm.rank]:
            buf.mask_rank(other)
        comm.Barrier()  # who is unmasked is where the others are
        for seed, hook, renormalize, reduction in steps:
            time.sleep(0.001 * ((seed + comm.rank) % 3))
            pair(buf, masked, seed, hook=hook, renormalize=renormalize, reduction=reduction)
        comm.Barrier()
    for other in buf.masked_ranks():
        buf.unmask_rank(other)
    comm.Barrier()
    buf.check() if not any(any(m) for m, _ in story) else raised(buf.check)
    buf.free()
