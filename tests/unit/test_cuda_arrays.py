"""CuPy arrays as C sees them, and what is refused: arrays over addresses that nobody reads, so no GPU is needed."""

import ml_dtypes
import numpy as np
import pytest

from epcy.arrays import DTYPES, rows_of
from epcy.errors import ArgumentError

cupy = pytest.importorskip("cupy")


def on_gpu(device, shape, dtype, strides=None):
    memory = cupy.cuda.UnownedMemory(1 << 40, 1 << 20, None, device)
    return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, 0), strides=strides)


@pytest.mark.parametrize("kind", DTYPES)
def test_kinds(kind):
    a = on_gpu(1, (3, 16), DTYPES[kind])
    seen = rows_of(a, "x", 1)
    assert seen.owner is a and seen.kind == kind and seen.device == 1 and seen.is_contiguous


def test_another_gpu():
    for given in (on_gpu(3, (4, 8), ml_dtypes.bfloat16), on_gpu(3, (4, 8), np.int64)):
        with pytest.raises(ArgumentError) as caught:
            rows_of(given, "topk_idx", 1)
        for text in ("topk_idx: ", "on GPU 1", "on GPU 3", "copy it", "device=3"):
            assert text in str(caught.value)


def test_an_empty_array_is_nowhere():
    assert rows_of(on_gpu(3, (0, 8), np.float32), "x", 1).owner.shape == (0, 8)


class OnHost:
    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **kwargs):
        raise AssertionError("asked for memory that cannot be used")


class Unknown:
    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **kwargs):
        raise BufferError("no such type")


class Gradient(Unknown):
    requires_grad = True

    @property
    def __cuda_array_interface__(self):
        raise RuntimeError("as torch's does")


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        (np.zeros((2, 2)), ("on a GPU", "ndarray in host memory", "backend='host'")),
        (OnHost(), ("on a GPU", "OnHost in host memory")),
        ([1.0], ("on a GPU", "list")),
        (Unknown(), ("can be read", "Unknown")),
        (Gradient(), ("gradient", "detach()")),
        (on_gpu(0, (1, 2, 3), np.float32), ("2 dimensions", "(1, 2, 3)")),
    ],
)
def test_refused(given, texts):
    with pytest.raises(ArgumentError) as caught:
        rows_of(given, "name", 0)
    for text in ("name: ", *texts):
        assert text in str(caught.value)


@pytest.mark.parametrize("given", [Unknown(), Gradient()])
def test_refused_by_the_host_backend(given):
    with pytest.raises(
        ArgumentError, match="name: expected an array in host memory on backend 'host', got one on a GPU"
    ):
        rows_of(given, "name")
