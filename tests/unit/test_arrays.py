"""Any array as a pointer, shape, strides and kind: what is looked at in place, what is copied, what is refused."""

import ctypes

import ml_dtypes
import numpy as np
import pytest

from epcy.arrays import DTYPES, rows_of
from epcy.errors import ArgumentError

KINDS = {**{dtype: kind for kind, dtype in DTYPES.items()}, np.dtype(ml_dtypes.float8_e4m3fn): 3}


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_kinds(dtype):
    a = np.zeros((3, 4), dtype)
    seen = rows_of(a, "x")
    assert seen.owner is a and seen.kind == KINDS[dtype]
    assert seen.ndim == 2 and seen.is_contiguous and seen.is_writable


@pytest.mark.parametrize("dtype", ["f8", "i2", "u4", ">f4", ">i8", "c8", "?", "O", "S4", "M8[s]"])
def test_other_kinds(dtype):
    assert rows_of(np.zeros((2, 2), dtype), "x").kind == -1


def test_copies_only_what_it_must():
    a = np.arange(24, dtype=np.float32).reshape(4, 6)
    assert rows_of(a[1:3], "x").owner.ctypes.data == a[1:].ctypes.data
    for view in (a[:, ::2], a.T, a[::-1], a[:, 1:3]):
        owner = rows_of(view, "x").owner
        assert owner.flags.c_contiguous and np.array_equal(owner, view) and not np.shares_memory(owner, a)


def test_read_only_and_misaligned():
    a = np.zeros((2, 2), np.float32)
    a.flags.writeable = False
    assert not rows_of(a, "x").is_writable
    raw = np.zeros(17, np.uint8)[1:].view(np.float32).reshape(2, 2)
    assert rows_of(raw, "x").owner.flags.aligned


class DLPack:
    def __init__(self, a):
        self.a = a

    def __dlpack__(self, **kwargs):
        return self.a.__dlpack__(**kwargs)


class OnGpu:
    __cuda_array_interface__ = {}


def test_dlpack_shares_memory_and_keeps_its_owner():
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    seen = rows_of(DLPack(a), "x")
    assert seen.owner.ctypes.data == a.ctypes.data and np.array_equal(seen.owner, a)
    seen = rows_of(DLPack(np.arange(6, dtype=np.int64).reshape(2, 3)), "x")
    assert seen.owner.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32", "int64", "uint8"])
def test_dlpack_types(dtype):
    a = np.ones((2, 3), dtype)
    assert rows_of(DLPack(a), "x").owner.dtype == a.dtype


def test_dlpack_of_nothing():
    assert rows_of(DLPack(np.zeros((0, 5), np.float32)), "x").owner.shape == (0, 5)


def test_buffer_protocol():
    rows = ((ctypes.c_float * 3) * 2)()
    rows[1][2] = 7
    assert rows_of(rows, "x").owner[1, 2] == 7
    assert rows_of(memoryview(bytes(6)).cast("B", (2, 3)), "x").kind == 3


@pytest.mark.parametrize(
    "given, texts",
    [
        (3.5, ("array", "float")),
        ("text", ("array", "str")),
        (None, ("array", "NoneType")),
        ([[1.0]], ("array", "list")),
        (np.zeros(3, np.float32), ("2 dimensions", "(3,)")),
        (np.float32(3), ("2 dimensions", "()")),
        (np.zeros((1, 2, 3), np.float32), ("2 dimensions", "(1, 2, 3)")),
        (DLPack(np.zeros((2, 2))), ("DLPack", "64 bits")),
    ],
)
def test_refused(given, texts):
    with pytest.raises(ArgumentError) as caught:
        rows_of(given, "name")
    for text in ("name: ", *texts):
        assert text in str(caught.value)
