"""NVSHMEM's unique id goes from rank 0 to all ranks: with the real library, which makes and takes ids without a GPU."""

from pathlib import Path

import pytest

import epcy
from epcy import backends
from epcy.backends import bootstrap
from parallel import launch

PACKAGE = Path(epcy.__file__).parent


@pytest.fixture(scope="module")
def symmetric():
    if not list(PACKAGE.glob("backends/symmetric*.so")):
        pytest.skip("the CUDA modules were not built")
    backends.load_nvshmem()
    from epcy.backends import symmetric

    return symmetric


def test_the_library_is_of_the_version_built_for(symmetric):
    assert symmetric.version()[:2] == symmetric.VERSION


def test_every_rank_gets_the_id_of_rank_0(comm, symmetric):
    for _ in range(3):
        made = symmetric.unique_id() if comm.rank == 0 else None
        got = bootstrap.allgather(comm, made, 20, "test")
        assert type(got[0]) is bytes and len(got[0]) == 128 and any(got[0])
        assert got[1:] == [None] * (comm.size - 1)
        assert len(set(comm.allgather(got[0]))) == 1
        assert comm.rank or got[0] == made


def test_ids_differ(symmetric):
    assert len({symmetric.unique_id() for _ in range(4)}) == 4


def test_starting_without_a_gpu_is_one_error_on_every_rank(comm, symmetric):
    if symmetric.num_devices():
        pytest.skip("there is a GPU: NVSHMEM starts")
    with pytest.raises(epcy.BackendError, match="CUDA error"):
        symmetric.start(comm, 0, None, 20)
    assert comm.allreduce(1) == comm.size


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_nvshmem_connects_by_the_id(comm, symmetric, num_ranks):
    """The library's own bootstrap over sockets, which comes before it looks at GPUs, ends on all ranks."""
    if comm.size > 1:
        pytest.skip("this starts jobs of its own: run with one rank")
    if symmetric.num_devices():
        pytest.skip("there is a GPU: every Buffer does this")
    script = str(Path(__file__).with_name("connect.py"))
    done = launch(num_ranks, ["-m", "mpi4py", script], timeout=60, env={"PYTHONPATH": str(PACKAGE.parent)})
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    for rank in range(num_ranks):
        # connected (0); and started only by half (1), for there is no GPU
        assert f"rank {rank}: arguments 0, init 0, status 1\n" in done.stdout, told
