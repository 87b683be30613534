"""Memory: what size_hint tells is what is taken, and nothing is lost over many Buffers and many rounds."""

import gc
import os

import numpy as np
import pytest

import epcy
from epcy.backends import window
from mpi.cases import BFLOAT16, draw, mine, raised

MIB = 2**20


def resident_bytes():
    """Memory of this process that is in use, shared or not."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def mapped_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")


SHAPES = [
    {"num_max_tokens_per_rank": 64, "hidden": 1024, "num_topk": 4},
    {"num_max_tokens_per_rank": 7, "hidden": 8, "num_topk": 1, "dtype": "float32"},
    {"num_max_tokens_per_rank": 3, "hidden": 2880, "num_topk": 32, "num_max_recv_tokens": 1000},
]


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_size_hint(comm, make_buffer, backend, shape):
    sizes = {**SHAPES[shape], "num_experts": 4 * comm.size}
    hint = epcy.Buffer.size_hint(comm.size, backend=backend, **sizes)
    assert set(hint) == {"control", "receive", "combine", "low_latency", "total"}
    assert hint.pop("low_latency") == 0
    assert hint["total"] == hint["control"] + hint["receive"] + hint["combine"]
    assert all(value > 0 and type(value) is int for value in hint.values())
    gc.collect()  # what earlier tests left is given back now, not between the two readings
    before = mapped_bytes()
    buf = make_buffer(status_dir="", **sizes)
    if buf.backend == "host":
        taken = mapped_bytes() - before
        # every rank maps all ranks' parts, and what lies between them; MPI adds some of its own
        assert hint["total"] * comm.size <= taken + 64 * 1024
        assert taken < window.apart(hint["total"], comm.size) * comm.size + 16 * MIB
    rows = buf.options["num_max_recv_tokens"]
    itemsize = 4 if sizes.get("dtype") == "float32" else 2
    assert hint["receive"] >= 2 * rows * (sizes["hidden"] * itemsize + 12 * sizes["num_topk"])


def test_parts_of_ranks_do_not_hinder_each_other():
    """Of up to eight ranks no two parts begin a multiple of 64 MiB, give or take 8, from one another."""
    for nbytes in (1, 8 * MIB, 8 * MIB + 1, 63 * MIB, 64 * MIB, 133 * MIB, 200 * MIB):
        for size, least in ((2, 12), (4, 12), (5, 12), (6, 9), (7, 9), (8, 8), (12, 8)):
            stride = window.apart(nbytes, size)
            assert nbytes <= stride <= nbytes + 65 * MIB
            apart = [k * stride % (64 * MIB) for k in range(1, min(size, 8))]
            assert all(least * MIB <= one <= (64 - least) * MIB for one in apart), (nbytes, size, stride)
    assert window.apart(10**6, 10**9) == 10**6  # no room for anything between


def test_size_hint_of_wrong_arguments():
    good = {"num_max_tokens_per_rank": 8, "hidden": 64, "num_experts": 8, "num_topk": 2}
    for name, value, ranks in (
        ("num_ranks", 0, 0),
        ("hidden", 3, 2),
        ("num_experts", 8, 3),
        ("num_topk", 0, 2),
    ):
        given = {**good, **({name: value} if name != "num_ranks" else {})}
        error = raised(lambda: epcy.Buffer.size_hint(ranks, **given))  # noqa: B023
        assert type(error) is epcy.ArgumentError and name in str(error), repr(error)
    assert (
        epcy.Buffer.size_hint(8, **{**good, "num_max_tokens_per_rank": 2**20, "hidden": 2**16})["total"]
        > 2**40
    )


def test_many_buffers_leave_nothing(comm, make_buffer, backend):
    options = {"num_max_tokens_per_rank": 64, "hidden": 1024}
    sent = draw(1, comm.size, 64, num_experts=4 * comm.size, hidden=1024)
    heap = epcy.Buffer.size_hint(
        comm.size, num_experts=4 * comm.size, num_topk=2, backend=backend, **options
    )["total"]
    at = []
    for _ in range(20):
        buf = make_buffer(**options)
        x, idx, _ = mine(buf, sent)
        r = buf.dispatch(x, idx)
        buf.combine(r.recv_x, r.handle)
        buf.free()
        xp = buf.xp
        del buf, r
        gc.collect()
        at.append((resident_bytes(), mapped_bytes()) if xp is np else xp.cuda.runtime.memGetInfo()[0])
    if xp is not np:
        assert at[4] - at[-1] < max(heap, 4 * MIB), at
        return
    assert at[-1][0] - at[4][0] < max(heap, 4 * MIB), at
    assert at[-1][1] - at[4][1] < max(comm.size * heap, 16 * MIB), at


@pytest.mark.host_only("memory of the process")
def test_many_rounds_take_the_heap_and_little_more(comm, make_buffer):
    options = {"num_max_tokens_per_rank": 128, "hidden": 1024, "num_experts": 4 * comm.size, "num_topk": 2}
    x = np.ones((128, 1024), BFLOAT16)
    idx = np.arange(256).reshape(128, 2) % (4 * comm.size)
    before = resident_bytes()
    buf = make_buffer(**options)
    for _ in range(100):
        r = buf.dispatch(x, idx)
        buf.combine(r.recv_x, r.handle)
    heap = epcy.Buffer.size_hint(comm.size, **options)["total"]
    # pages of the peers' heaps that this rank wrote count as its own too
    assert resident_bytes() - before < comm.size * heap + 40 * MIB


def test_rounds_do_not_grow(comm, make_buffer):
    buf = make_buffer()
    sent = draw(1, comm.size, 16, num_experts=4 * comm.size)
    x, idx, weights = mine(buf, sent)

    def rounds():
        for _ in range(200):
            r = buf.dispatch(x, idx, weights)
            buf.combine(r.recv_x, r.handle, r.recv_topk_weights)
            raised(lambda: buf.dispatch(x, idx[:, :1]))

    rounds()
    gc.collect()
    before = resident_bytes()
    rounds()
    gc.collect()
    assert resident_bytes() - before < MIB
