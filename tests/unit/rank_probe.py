"""Tests that go wrong on purpose; test_parallel.py runs them on three ranks. PROBE chooses which."""

import os
import time

import hypothesis.strategies as st
import pytest

from parallel import MPI, given

PROBE = os.environ.get("PROBE", "")


@pytest.mark.skipif(PROBE != "one", reason="PROBE")
def test_one(comm):
    assert comm.rank != 2


@pytest.mark.skipif(PROBE != "all", reason="PROBE")
def test_all(comm):
    assert comm.size == 99


@pytest.mark.skipif(PROBE != "diverge", reason="PROBE")
def test_diverge(comm):
    if comm.rank == 1:
        raise ValueError("rank 1 leaves")
    comm.Barrier()


@pytest.mark.skipif(PROBE != "stuck", reason="PROBE")
def test_stuck(comm):
    if comm.rank == 2:
        comm.recv()


@pytest.mark.skipif(PROBE != "timeout", reason="PROBE")
@pytest.mark.timeout(2)
def test_timeout():
    time.sleep(60)


def test_skip(comm):
    if PROBE == "skip" and comm.rank == 1:
        pytest.skip("here alone")


@given(max_examples=30, n=st.integers(0, 1000))
def test_given(comm, n):
    assert comm.allgather(n) == [n] * comm.size
    if PROBE == "example" and comm.rank == 1 and n > 37:
        raise ValueError("rank 1 leaves")
    comm.Barrier()
    assert not (PROBE == "shrink" and comm.rank == 1 and n > 37)


def test_last(comm, same):
    assert same(lambda: 5) == 5


if PROBE == "import" and MPI.COMM_WORLD.rank == 1:
    raise ImportError("rank 1 alone")
