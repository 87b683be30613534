"""Copies of the user's arrays, made while a job runs: on a GPU without waiting for it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np

from epcy.errors import ArgumentError
from epcy.options import DTYPES
from epcy.recording.calls import Array

__all__ = ["keep_array", "kept_on_host", "plain", "rows_and_kind"]


def rows_and_kind(x: Any) -> tuple[int, str]:
    """Return T and the name of the payload type, "fp8" for a pair. Local."""
    if isinstance(x, (tuple, list)):
        return int(x[0].shape[0]), "fp8"
    name = str(x.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ArgumentError(f"x: expected bfloat16, float16, float32 or a pair, got dtype {name}")
    return int(x.shape[0]), name


def plain(value: Any, kind: Any) -> Any:
    """Return an argument as JSON takes it. Local."""
    if kind is bool:
        return bool(value)
    if value is None or isinstance(value, str):
        return value
    return int(value.__index__())


def keep_array(xp: Any, array: Any, stream: Any) -> Any:
    """Copy an array where it lies, ordered behind what the stream already has; None inside a graph capture. Local."""
    if xp is np:
        return _bits(np.array(array, order="C"))
    where = nullcontext() if stream is None else xp.cuda.ExternalStream(getattr(stream, "ptr", stream))
    with where:
        if xp.cuda.get_current_stream().is_capturing():
            return None
        return xp.array(array, order="C", copy=True)


def kept_on_host(array: Any) -> Array | None:
    """Bring a copy to the host. Local, blocking."""
    if array is None or isinstance(array, np.ndarray):
        return array
    return _bits(array.get())


def _bits(array: Array) -> Array:
    """Return payload that only ml_dtypes has as unsigned integers of its size."""
    return (
        array
        if array.dtype.kind in "iuf" and array.dtype.str[1] != "V"
        else array.view(f"u{array.dtype.itemsize}")
    )
