"""Errors: what they inherit, what they carry, and that they travel between processes."""

import copy
import pickle

import pytest

import epcy
from epcy import errors
from epcy.backends import verdicts

BUILTIN = {
    "ArgumentError": ValueError,
    "CapacityError": OverflowError,
    "StateError": RuntimeError,
    "HeapError": MemoryError,
    "MismatchError": ValueError,
    "PeerError": ConnectionError,
    "PeerTimeoutError": TimeoutError,
    "BackendError": RuntimeError,
    "BackendUnavailableError": ImportError,
    "NotSupportedError": NotImplementedError,
}


@pytest.mark.parametrize("name", BUILTIN)
def test_inherits_what_people_catch(name):
    kind = getattr(epcy, name)
    assert kind is getattr(errors, name)
    assert issubclass(kind, epcy.EpcyError) and issubclass(kind, BUILTIN[name])
    assert str(kind("the text")) == "the text"


def test_nothing_is_left_out():
    kinds = {n for n, k in vars(errors).items() if isinstance(k, type) and issubclass(k, Exception)}
    assert kinds == {*BUILTIN, "EpcyError"} == set(errors.__all__) <= set(epcy.__all__)
    assert issubclass(epcy.PeerTimeoutError, epcy.PeerError)


@pytest.mark.parametrize(
    "error",
    [
        epcy.ArgumentError("x: expected"),
        epcy.PeerError("gone", [1, 2]),
        epcy.PeerTimeoutError("late", [3], "arrival", 7),
        epcy.BackendError("failed", "CUDA", 700),
        epcy.HeapError(),
    ],
)
@pytest.mark.parametrize("way", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_travels(error, way):
    error.note = "mine"
    other = way(error)
    assert type(other) is type(error) and str(other) == str(error) and other.__dict__ == error.__dict__


def test_fields():
    late = epcy.PeerTimeoutError("late", [3, 4], "arrival", 7)
    assert (late.ranks, late.phase, late.epoch) == ((3, 4), "arrival", 7)
    assert epcy.PeerError("x").ranks == ()
    failed = epcy.BackendError("x", "libc", 12)
    assert (failed.library, failed.code) == ("libc", 12)


def test_the_rank_is_added_once():
    for error in (
        errors.BackendError("cudaMalloc failed", "CUDA", 2),
        errors.BackendUnavailableError("backend: no GPU"),
        errors.PeerTimeoutError("timeout: gave up", [1], "bootstrap"),
        errors.HeapError("num_max_tokens_per_rank 4: too large"),
    ):
        named = verdicts.with_rank(error, 3)
        assert type(named) is type(error) and str(named) == f"{error} (rank 3)"
        assert vars(named) == vars(error)
        assert verdicts.with_rank(named, 4) is named
