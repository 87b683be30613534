"""Making a Buffer: communicators of every kind, options that differ or are wrong, too large a heap."""

import gc
import os
import time

import numpy as np
import pytest
from mpi4py import MPI

import epcy
from epcy.options import OPTIONS
from mpi.cases import raised, works

SIZES = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_topk": 1}


def sizes(comm, **options):
    return {**SIZES, "num_experts": comm.size, **options}


def test_attributes(comm, make_buffer, backend):
    buf = make_buffer(num_experts=3 * comm.size, timeout=7, num_sms=2)
    assert (buf.rank, buf.size, buf.backend, buf.num_local_experts) == (comm.rank, comm.size, backend, 3)
    assert buf.num_sms == (2 if backend == "host" else max(2, comm.size))  # at least a block a peer
    assert buf.topology.num_nodes == 1
    assert MPI.Comm.Compare(buf.comm, comm) == MPI.CONGRUENT
    assert buf.options["timeout"] == 7 and buf.options["dtype"] == "bfloat16"
    assert set(buf.options) == {option.name for option in OPTIONS}
    assert buf.options["num_max_recv_tokens"] >= 16 * comm.size
    assert f"rank {comm.rank} of {comm.size}" in repr(buf)
    if backend == "host":
        assert buf.xp is np


def test_default_communicator(backend):
    with epcy.Buffer(backend=backend, **sizes(MPI.COMM_WORLD)) as buf:
        assert MPI.Comm.Compare(buf.comm, MPI.COMM_WORLD) == MPI.CONGRUENT


def test_users_communicator_stays_his(comm, make_buffer):
    """Messages of the user's on the communicator never meet the Buffer's."""
    request = comm.irecv(source=(comm.rank + 1) % comm.size, tag=0)
    buf = make_buffer()
    works(buf)
    buf.free()
    comm.send("mine", dest=(comm.rank - 1) % comm.size, tag=0)
    assert request.wait() == "mine"


@pytest.mark.parametrize("wrong", [MPI.COMM_NULL, "world", 7, MPI.GROUP_EMPTY])
def test_no_communicator(backend, wrong):
    error = raised(lambda: epcy.Buffer(wrong, backend=backend, num_experts=1, **SIZES))
    assert type(error) is epcy.ArgumentError and str(error).startswith("comm: "), repr(error)


def test_intercommunicator(comm, backend):
    if comm.size == 1:
        pytest.skip("two ranks")
    half = comm.rank * 2 >= comm.size
    local = comm.Split(half, comm.rank)
    inter = local.Create_intercomm(0, comm, 0 if half else -(-comm.size // 2), 3)
    error = raised(lambda: epcy.Buffer(inter, backend=backend, **sizes(comm)))
    assert type(error) is epcy.ArgumentError
    for text in ("comm: ", "intercommunicator", "Merge"):
        assert text in str(error)
    inter.Free()
    local.Free()


DIFFERENT = {
    "low_latency_mode": True,
    "num_max_low_latency_tokens_per_rank": 3,
    "allow_nvlink_for_low_latency_mode": False, "num_max_nvl_peers": 999,
    "num_qps_per_rank": 3, "rdma_transport": "proxy",
    "num_max_tokens_per_rank": 5, "hidden": 128, "num_topk": 2, "dtype": "float32", "num_max_recv_tokens": 77,
    "timeout": 9.0, "num_sms": 2, "preinitialize": True, "spin_us": 3.0, "on_timeout": "mask", "check": True,
    "path": "direct", "node_chunk_tokens": 3, "num_node_buffers": 1,
}  # fmt: skip


def test_every_compared_option(comm, backend):
    if comm.size == 1:
        pytest.skip("two ranks")
    compared = {option.name for option in OPTIONS if option.compared}
    assert {*DIFFERENT, "num_experts", "backend"} >= compared
    last = comm.size - 1
    for name in sorted(compared - {"backend"}):
        options = sizes(comm, timeout=10)
        if comm.rank == last:
            options[name] = {**DIFFERENT, "num_experts": 2 * comm.size}[name]
        error = raised(lambda: epcy.Buffer(comm, backend=backend, **options))  # noqa: B023
        assert type(error) is epcy.MismatchError and str(error).startswith(f"{name}: "), repr(error)
        assert f"rank {last}: {({**DIFFERENT, 'num_experts': 2 * comm.size})[name]!r}" in str(error)


WRONG = {
    "hidden": (-1, epcy.ArgumentError),
    "num_topk": (0, epcy.ArgumentError),
    "num_max_tokens_per_rank": ("many", epcy.ArgumentError),
    "dtype": ("float64", epcy.ArgumentError),
    "timeout": (float("nan"), epcy.ArgumentError),
    "preinitialize": (1, epcy.ArgumentError),
    "colour": ("blue", epcy.ArgumentError),
    "num_max_recv_tokens": (0, epcy.ArgumentError),
    "num_sms": (0, epcy.ArgumentError),
    "spin_us": (-1, epcy.ArgumentError),
    "status_dir": ("/proc/nowhere", epcy.ArgumentError),
    "backend": ("carrier pigeon", epcy.ArgumentError),
}


@pytest.mark.parametrize("everybody", [False, True])
def test_wrong_options(comm, backend, everybody):
    for number, (name, (value, kind)) in enumerate(WRONG.items()):
        if name == "status_dir" and backend != "host":
            continue
        culprit = number % comm.size
        options = sizes(comm, backend=backend)
        if everybody or comm.rank == culprit:
            options[name] = value
        error = raised(lambda: epcy.Buffer(comm, **options))  # noqa: B023
        mine = everybody or comm.rank == culprit
        assert type(error) is (kind if mine else epcy.PeerError), f"{name}: {error!r}"
        assert name in str(error), error
        if not mine:
            assert error.ranks == (culprit,) and f"rank {culprit}" in str(error)
    with epcy.Buffer(comm, backend=backend, **sizes(comm)) as buf:
        works(buf)


def test_experts_that_do_not_divide(comm, backend):
    if comm.size == 1:
        pytest.skip("two ranks")
    error = raised(lambda: epcy.Buffer(comm, backend=backend, **sizes(comm, num_experts=comm.size + 1)))
    assert type(error) is epcy.ArgumentError
    for text in ("num_experts", f"multiple of the number of ranks ({comm.size})", f"got {comm.size + 1}"):
        assert text in str(error)


def test_required_options(backend):
    for name in SIZES:
        given = {**SIZES, "num_experts": MPI.COMM_WORLD.size}
        del given[name]
        error = raised(lambda: epcy.Buffer(backend=backend, **given))  # noqa: B023
        assert type(error) is epcy.ArgumentError and str(error).startswith(f"{name}: ")
    assert isinstance(raised(lambda: epcy.Buffer(MPI.COMM_WORLD, 4)), TypeError)  # the rest by keyword only


@pytest.mark.host_only("shared memory")
def test_too_large_a_heap(comm, backend):
    before = os.statvfs("/dev/shm").f_bavail
    most = 4 * os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize // 8192 // comm.size
    given = sizes(comm, hidden=4096, num_max_tokens_per_rank=most)
    error = raised(lambda: epcy.Buffer(comm, backend=backend, **given))
    assert type(error) is epcy.HeapError and isinstance(error, MemoryError), repr(error)
    needed = epcy.Buffer.size_hint(comm.size, **given)["total"]
    for text in ("num_max_tokens_per_rank", str(needed), str(needed * comm.size), "/dev/shm"):
        assert text in str(error)
    comm.Barrier()
    assert os.statvfs("/dev/shm").f_bavail > before - 1024
    # more than 2^31 rows times bytes, and more than an address holds
    given = sizes(comm, hidden=2**30, num_max_tokens_per_rank=2**31 - 1)
    huge = raised(lambda: epcy.Buffer(comm, backend=backend, **given))
    assert isinstance(huge, (epcy.ArgumentError, epcy.HeapError)), repr(huge)
    with epcy.Buffer(comm, backend=backend, **sizes(comm)) as buf:
        works(buf)


@pytest.mark.host_only("the host backend's status pages")
def test_failed_constructors_leave_nothing(comm, backend, tmp_path):
    """Far more failures than MPI has communicators; no pages of status stay."""
    folder = tmp_path / "pages"
    for turn in range(30):
        wrong = str(folder) if comm.rank or turn % 2 else "/proc/nowhere"
        options = sizes(comm, backend=backend, status_dir=wrong)
        if turn % 2:
            options["hidden"] = 64 if comm.rank else 65
        error = raised(lambda: epcy.Buffer(comm, **options))  # noqa: B023
        assert isinstance(error, epcy.PeerError if comm.rank else epcy.ArgumentError), repr(error)
    comm.Barrier()
    assert not folder.exists() or not list(folder.iterdir())


def test_halves(comm, make_buffer):
    half = comm.Split(comm.rank % 2, comm.rank)
    buf = make_buffer(half, num_experts=4 * half.size)
    whole = make_buffer()
    for _ in range(2):
        works(buf)
        works(whole)
    buf.free()
    half.Free()
    works(whole)


def test_overlapping_groups(comm, subcomm, make_buffer):
    parts = [subcomm(size) for size in range(1, comm.size + 1)]
    for buf in [make_buffer(p, num_experts=4 * p.size) for p in parts if p != MPI.COMM_NULL]:
        works(buf)


def test_self(make_buffer):
    buf = make_buffer(MPI.COMM_SELF, num_experts=4)
    assert buf.size == 1
    works(buf)


def test_reversed_ranks(comm, make_buffer):
    turned = comm.Split(0, -comm.rank)
    buf = make_buffer(turned)
    assert buf.rank == comm.size - 1 - comm.rank
    works(buf)
    buf.free()
    turned.Free()


@pytest.mark.host_only("CUDA takes address space of its own")
def test_no_address_space(comm, backend):
    """Memory that MPI cannot get is a HeapError too."""
    import resource

    if comm.size == 1:
        pytest.skip("two ranks")
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20), before[1]))
    try:
        error = raised(
            lambda: epcy.Buffer(
                comm,
                backend=backend,
                num_max_tokens_per_rank=1 << 16,
                hidden=1024,
                num_experts=comm.size,
                num_topk=1,
            )
        )
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert type(error) is epcy.HeapError and "num_max_tokens_per_rank" in str(error), error
    epcy.Buffer(
        comm, backend=backend, num_max_tokens_per_rank=8, hidden=64, num_experts=comm.size, num_topk=1
    ).free()


def left_behind(folder):
    """What this rank still holds: its status pages, and the windows that it has mapped."""
    with open("/proc/self/maps") as maps:
        windows = sum("/dev/shm/" in line for line in maps)
    return sorted(os.listdir(folder)) if folder.exists() else [], windows


# And how many there are at least, by backend.
POINTS = [("arrival", {}), ("data", {"host": 5, "nvshmem": 4}), ("completion", {})]


@pytest.mark.parametrize("kind", ["alloc", "os"])
@pytest.mark.parametrize("nodes", [False, True])
@pytest.mark.parametrize("who", ["first", "last", "all"])
def test_one_rank_fails_at_each_point(comm, backend, tmp_path, kind, nodes, who):
    """Wherever a rank finds no memory, or the system refuses: all hear of it at once, and nothing stays."""
    if nodes and (comm.size == 1 or backend != "host"):
        pytest.skip("two ranks, host")
    culprit = 0 if who == "first" else comm.size - 1
    rank = "" if who == "all" else f"rank={culprit},"
    options = sizes(
        comm, backend=backend, low_latency_mode=True, timeout=20, status_dir=str(tmp_path / "pages")
    )
    if nodes:
        options |= {"num_max_nvl_peers": 1, "path": "direct"}
    with epcy.Buffer(comm, **options) as buf:  # what MPI keeps for the next one is there from now on
        works(buf)
    before = left_behind(tmp_path / "pages")
    for phase, least in POINTS:
        for call in range(1, 30):
            fault = f"{kind}:{rank}operation=constructor,phase={phase},call={call}"
            start = time.monotonic()
            try:
                buf = epcy.Buffer(comm, faults=fault, **options)
            except epcy.EpcyError as error:
                assert time.monotonic() - start < 2
                mine = who == "all" or comm.rank == culprit
                own = epcy.HeapError if kind == "alloc" else (epcy.BackendError, epcy.ArgumentError)
                assert isinstance(error, own if mine else epcy.PeerError), repr(error)
                assert mine or error.ranks == (culprit,)
                assert f"rank {comm.rank if mine else culprit}" in str(error), error
                told = error
                assert "EPCY_FAULTS" in str(error) or "num_node_buffers" in str(error), error
            else:
                buf.free()
                assert call > least.get(backend, 2), f"only {call - 1} points in phase {phase}"
                break
        else:
            pytest.fail(f"never through: {told}")
    gc.collect()
    assert left_behind(tmp_path / "pages") == before
    with epcy.Buffer(comm, **options) as buf:
        works(buf)


def test_failures_do_not_use_up_communicators(comm, backend):
    """Far more of them than MPI has communicators, after the backend was made."""
    options = sizes(comm, backend=backend, timeout=20)
    fault = f"alloc:rank={comm.size - 1},operation=constructor,phase=completion"
    for _ in range(700):
        error = raised(lambda: epcy.Buffer(comm, faults=fault, **options))
        assert type(error) is (epcy.HeapError if comm.rank == comm.size - 1 else epcy.PeerError), repr(error)
    epcy.Buffer(comm, **options).free()


def test_a_warmup_without_memory(comm, backend, tmp_path):
    """In the constructor all ranks raise, and the Buffer is gone; later it stays usable."""
    pages = tmp_path / "pages"
    options = sizes(comm, backend=backend, low_latency_mode=True, timeout=20, status_dir=str(pages))
    fault = f"alloc:rank={comm.size - 1},operation=warmup,call=1"
    kind = epcy.HeapError if comm.rank == comm.size - 1 else epcy.PeerError
    start = time.monotonic()
    error = raised(lambda: epcy.Buffer(comm, faults=fault, preinitialize=True, **options))
    assert type(error) is kind and "warmup" in str(error) and time.monotonic() - start < 2, repr(error)
    comm.Barrier()
    assert not pages.exists() or not list(pages.iterdir())
    with epcy.Buffer(comm, faults=fault, **options) as buf:
        error = raised(buf.warmup)
        assert type(error) is kind and "warmup" in str(error), repr(error)
        buf.warmup()
        works(buf)
