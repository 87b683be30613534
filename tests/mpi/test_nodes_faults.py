"""Several nodes: ranks that refuse, disagree, come late or are lost; everybody is told, and reset() mends it."""

import os
import re
import signal
import threading
import time

import numpy as np
import pytest

import epcy
from mpi.cases import BFLOAT16, check_dispatch, draw, raised, to_device, to_expert_0, works
from mpi.low_latency_cases import late_error
from parallel import ROOT, launch

INSIDE = pytest.mark.host_only("no fault strikes inside a kernel")


@pytest.fixture(params=["hierarchical", "direct"])
def nodes_of(request, comm, make_buffer):
    """A function that makes a Buffer over two virtual nodes, or one more."""
    peers = max(1, comm.size // 2)
    if comm.size == 1 or comm.size % peers:
        pytest.skip("two nodes of one size")
    return lambda **options: make_buffer(num_max_nvl_peers=peers, path=request.param, **options)


def test_nodes_of_different_sizes(comm, make_buffer):
    peers = comm.size - 1
    if comm.size < 3:
        pytest.skip("three ranks")
    for path in (None, "hierarchical"):
        error = raised(lambda: make_buffer(num_max_nvl_peers=peers, path=path))  # noqa: B023
        assert type(error) is epcy.ArgumentError and str(error).startswith("num_max_nvl_peers: "), repr(error)
        for text in (f"{peers} in node 0, 1 in node 1", f"rank {comm.rank}", "path='direct'"):
            assert text in str(error)
    works(make_buffer(num_max_nvl_peers=peers, path="direct"))


@pytest.mark.parametrize(
    "name, here, there",
    [("path", "direct", "hierarchical"), ("num_max_nvl_peers", 1, 2), ("node_chunk_tokens", 2, 3)],
)
def test_ranks_that_disagree(comm, make_buffer, name, here, there):
    if comm.size == 1:
        pytest.skip("two ranks")
    last = comm.size - 1
    error = raised(lambda: make_buffer(**{name: there if comm.rank == last else here}))
    assert type(error) is epcy.MismatchError and str(error).startswith(f"{name}: "), repr(error)
    assert f"rank 0: {here!r}" in str(error) and f"rank {last}: {there!r}" in str(error)


@pytest.mark.parametrize("culprit", ["first", "last"])
def test_a_rank_that_refuses(comm, nodes_of, culprit):
    buf = nodes_of(timeout=20)
    who = 0 if culprit == "first" else comm.size - 1
    for wrong, kind in ((lambda x, i: (x, i + 4 * comm.size), epcy.ArgumentError),
                        (lambda x, i: to_expert_0(buf, 17), epcy.CapacityError),
                        (lambda x, i: (x[:, :8], i), epcy.ArgumentError)):  # fmt: skip
        given = to_expert_0(buf, 4)
        given = wrong(*given) if comm.rank == who else given
        start = time.monotonic()
        error = raised(lambda: buf.dispatch(*given))  # noqa: B023
        assert time.monotonic() - start < 5
        assert type(error) is (kind if comm.rank == who else epcy.PeerError), repr(error)
        if comm.rank != who:
            assert error.ranks == (who,) and f"rank {who} refused dispatch" in str(error)
        works(buf)
    # One whose host does not wait hears of it later, and nothing came.
    given = to_expert_0(buf, 4)
    error = raised(lambda: buf.dispatch(*given, num_worst_tokens="x" if comm.rank == who else 16))
    if comm.rank != who:
        assert error is None and type(raised(buf.check)) is epcy.PeerError
    works(buf)


def test_ranks_in_different_calls(comm, nodes_of):
    buf = nodes_of(timeout=20)
    r, _ = check_dispatch(buf, draw(1, comm.size, 4, num_experts=4 * comm.size))
    x, idx = to_expert_0(buf, 2)
    last = comm.rank == comm.size - 1
    for call in (lambda: buf.combine(r.recv_x, r.handle) if last else buf.dispatch(x, idx),
                 lambda: buf.barrier() if last else buf.dispatch(x, idx),
                 lambda: buf.dispatch(to_device(buf, np.ones((2, 512), np.float16)) if last else x, idx),
                 lambda: buf.dispatch(x, idx, layout="expert" if last else "rank")):  # fmt: skip
        error = late_error(buf, call)
        assert type(error) is epcy.MismatchError, repr(error)
        works(buf)


HIGH_THROUGHPUT = ("dispatch", "cached dispatch", "combine", "barrier")
LOW_LATENCY = ("low-latency dispatch", "low-latency combine")


def calls_of(buf):
    """One of each, both modes, of equal shapes on all ranks. Collective."""
    last = 4 * buf.size - 1
    x, idx, weights, slots = to_device(buf, (
        np.ones((2, 512), np.float16), np.array([[0, last]] * 2), np.ones((2, 2), np.float32),
        np.ones((4, 16 * buf.size, 512), np.float16),
    ))  # fmt: skip
    first = buf.dispatch(x, idx)
    older, handle = (buf.low_latency_dispatch(x, idx, weights, use_fp8=False)[2] for _ in range(2))
    y = to_device(buf, np.ones(first.recv_x.shape, np.float16))

    def there(**options):
        return buf.low_latency_dispatch(x, idx, weights, **{"use_fp8": False, **options})

    def back(handle=handle, **options):
        return buf.low_latency_combine(slots, idx, weights, handle, **options)

    return {
        "dispatch": lambda: buf.dispatch(x, idx),
        "cached dispatch": lambda: buf.dispatch(x, handle=first.handle),
        "combine": lambda: buf.combine(y, first.handle),
        "barrier": buf.barrier,
        "low-latency dispatch": there,
        "low-latency combine": back,
        # The same operation in another way:
        "weights": lambda: buf.dispatch(x, idx, weights),
        "layout": lambda: buf.dispatch(x, idx, layout="expert"),
        "expert_alignment": lambda: buf.dispatch(x, idx, layout="expert", expert_alignment=4),
        "dtype": lambda: buf.dispatch(to_device(buf, np.ones((2, 512), BFLOAT16)), idx),
        "use_fp8": lambda: there(use_fp8=True),
        "hook": lambda: there(return_recv_hook=True)[4](),
        "reduction": lambda: back(reduction="source"),
        "use_logfmt": lambda: back(use_logfmt=True),
        "another handle": lambda: back(older),
    }


DIFFERENT = [
    (one, two) for one in HIGH_THROUGHPUT + LOW_LATENCY for two in HIGH_THROUGHPUT + LOW_LATENCY if one < two
]
DIFFERENT += [("dispatch", one) for one in ("weights", "layout", "dtype", "use_fp8", "hook", "reduction")]
DIFFERENT += [("layout", "expert_alignment"), ("low-latency dispatch", "use_fp8"), ("combine", "hook")]
DIFFERENT += [("low-latency combine", one) for one in ("hook", "reduction", "use_logfmt", "another handle")]


@pytest.mark.host_only("of nvshmem with puts, modes that meet end in a timeout")
def test_a_rank_of_another_node_in_another_call(comm, nodes_of):
    """Every pair of operations, of both modes, and every option that is compared: a MismatchError on all ranks."""
    buf = nodes_of(timeout=20, low_latency_mode=True)
    calls = calls_of(buf)
    last = comm.rank == comm.size - 1
    for pair in DIFFERENT:
        for one, two in (pair, pair[::-1]):
            start = time.monotonic()
            error = late_error(buf, calls[one if last else two])
            assert type(error) is epcy.MismatchError, (one, two, repr(error))
            assert "the ranks disagree in call" in str(error) and f"rank {comm.size - 1}: " in str(error), (
                error
            )
            assert time.monotonic() - start < 10
            for name in ("dispatch", "low-latency dispatch"):  # no reset() is needed
                calls[name]()
    works(buf)


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
@pytest.mark.parametrize(
    "phase", ["arrival", pytest.param("data", marks=INSIDE), pytest.param("completion", marks=INSIDE)]
)
def test_a_late_rank(comm, nodes_of, operation, phase):
    last, call = comm.size - 1, 2 if operation == "dispatch" else 1
    buf = nodes_of(
        timeout=20, faults=f"late:rank={last},operation={operation},phase={phase},call={call},ms=900"
    )
    sent = draw(2, comm.size, 9, num_experts=4 * comm.size, unused=0)
    r, _ = check_dispatch(buf, sent)
    comm.Barrier()
    x, idx = to_device(buf, (sent.xs[comm.rank], sent.idxs[comm.rank]))
    if operation == "dispatch":
        error = late_error(buf, lambda: buf.dispatch(x, idx, timeout=0.3))
    else:
        error = late_error(buf, lambda: buf.combine(r.recv_x, r.handle, timeout=0.3))
    nodes = buf.topology.node_of_rank
    if comm.rank != last or phase != "completion":  # the others had done all that the last one waits for
        assert type(error) is epcy.PeerTimeoutError, repr(error)
        assert not buf
    if comm.rank != last:
        assert re.search(rf"\(pid \d+, node {nodes[error.ranks[0]]}\)", str(error)), error
        assert error.phase in {"arrival": ["arrival"], "data": ["forward", "completion"]}.get(
            phase, ["completion"]
        )
        if phase != "data":  # there they may wait for one that waits for the last one
            assert error.ranks == (last,) or "gave up" in str(error), error
    comm.Barrier()
    buf.reset()
    works(buf)


@INSIDE
def test_a_rank_whose_sums_have_come_is_not_to_blame(comm, make_buffer):
    """They lie here, and wait for those of the last rank, which come before them."""
    if comm.size < 3:
        pytest.skip("three ranks")
    last = comm.size - 1
    buf = make_buffer(
        num_max_nvl_peers=1,
        path="direct",
        timeout=20,
        faults=f"late:rank={last},operation=combine,phase=data,ms=900",
    )
    x = np.ones((4, 512), BFLOAT16)
    idx = np.broadcast_to(np.array([4, 4 * last]), (4, 2))  # a row of rank 1, and one of the last rank
    r = buf.dispatch(x, idx)
    comm.Barrier()
    error = raised(lambda: buf.combine(r.recv_x, r.handle, timeout=5 if comm.rank else 0.3))
    if comm.rank == 0:
        assert type(error) is epcy.PeerTimeoutError, repr(error)
        assert (error.phase, error.ranks) == ("forward", (last,)), error
    comm.Barrier()
    buf.reset()
    works(buf)


@pytest.mark.host_only("a GPU tells of it later")
def test_a_rank_that_comes_at_the_last_moment(comm, make_buffer):
    """The limit is over, and when it is looked up who did not come, all have: no error, or one that names somebody."""
    if comm.size == 1:
        pytest.skip("two ranks")
    buf = make_buffer(num_max_nvl_peers=2, path="direct", timeout=20, low_latency_mode=True)
    x, idx = to_expert_0(buf, 2)
    for _ in range(15):
        comm.Barrier()
        time.sleep(0.1 if comm.rank == 1 else 0)
        error = raised(lambda: buf.low_latency_dispatch(x, idx, use_fp8=False, timeout=0.05))
        assert error is None or isinstance(error, epcy.PeerTimeoutError) and error.ranks, repr(error)
        if any(comm.allgather(not buf)):
            buf.reset()
    works(buf)


def test_an_interrupt_in_reset(comm, nodes_of):
    """bool(buf) tells whether reset() was over: while the others wait in it for this rank, it was not."""
    buf = nodes_of(timeout=20)
    handler = signal.getsignal(signal.SIGINT)
    comm.Barrier()
    if comm.rank == 0:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            buf.reset()
        assert not buf
    signal.signal(signal.SIGINT, handler)
    comm.Barrier()
    buf.reset()
    works(buf)


def test_delays_everywhere(comm, nodes_of):
    buf = nodes_of(faults="delay:ms=1,seed=5,every=2", timeout=20, node_chunk_tokens=2, num_node_buffers=1)
    for turn in range(3):
        works(buf, turn)
        buf.reset()


@INSIDE
def test_an_interrupt_in_mid_call(comm, nodes_of):
    last = comm.size - 1
    fault = f"late:rank={last},operation=dispatch,phase=data,call=2,ms=600"
    buf = nodes_of(timeout=20, faults=fault)
    works(buf)
    handler = signal.getsignal(signal.SIGINT)
    x, idx = to_expert_0(buf, 4)
    error, start = None, time.monotonic()
    comm.Barrier()
    if comm.rank == 0:
        threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        buf.dispatch(x, idx)
    except (KeyboardInterrupt, epcy.EpcyError) as caught:
        error = caught
    signal.signal(signal.SIGINT, handler)
    assert time.monotonic() - start < 3
    assert isinstance(error, KeyboardInterrupt if comm.rank == 0 else epcy.PeerTimeoutError), repr(error)
    assert comm.rank == 0 or "rank 0 gave up" in str(error) or "gave up" in str(error)
    comm.Barrier()
    buf.reset()
    works(buf)


# ---- jobs of their own


def job(name, num_ranks, *args, env=None, options=()):
    return launch(num_ranks, ["tests/mpi/nodes_jobs.py", name, *args], timeout=60, options=options,
                  env={"PYTHONPATH": str(ROOT), **(env or {})})  # fmt: skip


@pytest.fixture
def one_rank(comm):
    if comm.size > 1:
        pytest.skip("a job of its own: run with one rank")


# Where the last rank is killed, and the phase that ranks of another node are in then.
LOST = [
    ("dispatch", "arrival", "arrival"),
    ("dispatch", "data", "forward"),
    ("dispatch", "completion", "completion"),
    ("combine", "arrival", "arrival"),
    ("combine", "data", "forward"),
    ("combine", "completion", "completion"),
    ("low_latency_dispatch", "arrival", "arrival"),
    ("low_latency_dispatch", "data", "arrival"),
    ("low_latency_dispatch", "outside", "forward"),
    ("low_latency_combine", "data", "arrival"),
    ("low_latency_combine", "outside", "forward"),
    ("barrier", "arrival", "arrival"),
    ("reset", "outside", "reset"),
    ("reset", "arrival", "reset"),
    ("reset", "data", "reset"),
    ("free", "arrival", "arrival"),
    ("free", "completion", None),
]


@pytest.mark.parametrize(
    "operation, phase, seen, path",
    [(*lost, "direct") for lost in LOST] + [(*lost, "hierarchical") for lost in LOST if lost[2] == "forward"],
)
@pytest.mark.host_only("jobs of its own")
def test_a_lost_rank(one_rank, operation, phase, seen, path):
    """Whatever a rank of another node waits for, it names the lost one, its node and the phase, and can leave."""
    done = job("lost", 4, operation, phase, path, options=("-disable-auto-cleanup",))
    told = done.stdout + done.stderr
    num_named = 0
    for rank in range(3):
        line = next((one for one in done.stdout.splitlines() if one.startswith(f"rank {rank}: ")), told)
        assert f"rank {rank} left" in told and float(re.search(r" ([\d.]+) s: ", line)[1]) < 2, told
        if seen is None:
            assert "NoneType" in line, told
        elif rank < 2:
            phases = (seen, "completion") if seen == "forward" else (seen,)
            if any(f"PeerTimeoutError ranks=(3,) phase={one} " in line for one in phases):
                assert re.search(r"rank 3 \(pid \d+, node 1\)", line), told
                num_named += 1
            else:  # kept on its way, it finds that those left who had found the lost one
                assert "gave up before this rank came" in line, told
    assert seen is None or (num_named and f"phase={seen} " in told), told


@pytest.mark.host_only("jobs of its own")
def test_low_latency_goes_on_without_a_lost_rank(one_rank):
    """Also where MPI says that a message broke off: whose it was is known by who has ended."""
    done = job("masked", 4, options=("-disable-auto-cleanup",))
    for rank in range(3):
        told = re.search(rf"rank {rank}: masked \(3,\) missing \(3,\) ([\d.]+) s", done.stdout)
        assert told and float(told[1]) < 3, done.stdout + done.stderr


@pytest.mark.host_only("jobs of its own")
@pytest.mark.parametrize("path", ["hierarchical", "direct"])
@pytest.mark.parametrize("num_ranks", [4, 6])
def test_nodes_whose_ranks_are_not_in_a_row(one_rank, num_ranks, path):
    """MPICH takes odd and even ranks for two machines: what Split_type says is what counts."""
    done = job("works", num_ranks, path, env={"MPIR_CVAR_ODD_EVEN_CLIQUES": "1"})
    if "1 node\n" in done.stdout:
        pytest.skip("this MPI library does not split a machine")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{num_ranks} ranks on 2 nodes" in done.stdout and "ranks 0, 2" in done.stdout, done.stdout


@pytest.mark.parametrize("first", ["nobody", "the masked one", "the others"])
@pytest.mark.parametrize("peers", [1, 2])
def test_free_with_a_masked_rank(comm, make_buffer, peers, first):
    """Who is masked learns of it by a message; then it frees alone, as those do who masked it, and everybody else."""
    if comm.size < 3:
        pytest.skip("three ranks")
    out = comm.size - 1
    options = {"num_max_nvl_peers": peers, "path": "direct", "low_latency_mode": True, "timeout": 20}
    buf = make_buffer(**options)
    comm.Barrier()
    if comm.rank == 0:
        buf.mask_rank(out)
    if {"the masked one": comm.rank != out, "the others": comm.rank == out}.get(first, False):
        time.sleep(0.2)
    start = time.monotonic()
    buf.free()
    assert time.monotonic() - start < 5 and not buf
    works(make_buffer(**options))
