"""What the bench sends: tokens, experts and weights, drawn from a seed for each rank.

Every rank can draw every other rank's inputs, so the check needs no communication of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
    "fp8": np.dtype(np.uint8),  # e4m3 bytes, with float32 scales for each 128 values
}
BUFFER_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "bfloat16"}
ROUTINGS = ("random", "one-hot", "skewed")


@dataclass(frozen=True)
class Shape:
    """The size of one line of the table."""

    num_tokens: int
    hidden: int
    num_topk: int
    num_experts: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row, scales included."""
        scales = 4 * num_scales(self.hidden) if self.dtype == "fp8" else 0
        return self.hidden * DTYPES[self.dtype].itemsize + scales

    @property
    def returned_row_bytes(self) -> int:
        """Return the bytes of one row of combine; fp8 tokens come back as bf16."""
        return self.hidden * (2 if self.dtype == "fp8" else DTYPES[self.dtype].itemsize)


@dataclass(frozen=True)
class Inputs:
    """One rank's tokens: ``x`` (T, H) or (payload, scales), ``topk_idx`` (T, K), ``topk_weights`` (T, K)."""

    x: Array | tuple[Array, Array]
    topk_idx: Array
    topk_weights: Array


def num_scales(hidden: int) -> int:
    return -(-hidden // 128)


def draw_rows(rng: np.random.Generator, num_rows: int, hidden: int, dtype: str) -> Array:
    """Draw (num_rows, hidden) finite values of every magnitude that a sum can tell apart."""
    rows = rng.random((num_rows, hidden), np.float32)
    rows -= np.float32(0.5)
    return rows.astype(ml_dtypes.bfloat16 if dtype == "fp8" else DTYPES[dtype], copy=False)


def draw_inputs(shape: Shape, routing: str, seed: int, rank: int) -> Inputs:
    """Draw the tokens of ``rank``; local, and the same on whatever rank it is called."""
    rng = np.random.default_rng([seed, rank])
    x: Array | tuple[Array, Array]
    if shape.dtype == "fp8":
        payload = rng.integers(0, 0x7F, (shape.num_tokens, shape.hidden), np.uint8)
        payload |= rng.integers(0, 2, payload.shape, np.uint8) << 7
        x = payload, rng.random((shape.num_tokens, num_scales(shape.hidden)), np.float32)
    else:
        x = draw_rows(rng, shape.num_tokens, shape.hidden, shape.dtype)
    topk_idx = draw_topk_idx(rng, shape, routing, rank)
    topk_weights = rng.random(topk_idx.shape, np.float32)
    return Inputs(x, topk_idx, topk_weights)


def draw_topk_idx(rng: np.random.Generator, shape: Shape, routing: str, rank: int) -> Array:
    """Draw (T, K) int64 expert ids.

    ``random``: K distinct experts, all equally likely. ``skewed``: K distinct experts, expert e with a likelihood
    that falls as 1 / (1 + e). ``one-hot``: expert 0 for every token of every rank, the other lanes unused.
    Anything else is the path of a .npy file of ids (T', K), or (R, T', K) for ids of each rank, repeated as needed.
    """
    size = (shape.num_tokens, shape.num_experts)
    if routing == "one-hot":
        topk_idx = np.full((shape.num_tokens, shape.num_topk), -1, np.int64)
        topk_idx[:, :1] = 0
        return topk_idx
    if routing in ROUTINGS:
        # The K smallest of independent exponential times are K distinct experts, drawn in proportion to the rates.
        times = rng.exponential(size=size)
        if routing == "skewed":
            times *= 1.0 + np.arange(shape.num_experts)
        drawn: Array = np.argsort(times, axis=1)[:, : shape.num_topk].astype(np.int64)
        return drawn
    recorded = load_routing(Path(routing), shape.num_topk, shape.num_experts)
    first = 0
    if recorded.ndim == 3:
        recorded = recorded[rank % len(recorded)]
    else:
        first = rank * shape.num_tokens
    repeated: Array = recorded[(first + np.arange(shape.num_tokens)) % len(recorded)]
    return repeated


def load_routing(path: Path, num_topk: int, num_experts: int) -> Array:
    """Read recorded expert ids; raise ValueError when they do not fit the sizes asked for."""
    try:
        recorded = np.load(path, mmap_mode="r", allow_pickle=False)  # what it claims to hold is not yet there
    except OSError as error:
        raise ValueError(
            f"--routing {path.name}: neither one of {', '.join(ROUTINGS)} nor a file that can be read "
            f"({error.strerror or error})"
        ) from None
    except Exception as error:  # a broken header makes NumPy raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ValueError(f"--routing {path.name}: not a .npy file ({reason})") from None
    if not isinstance(recorded, np.ndarray):
        raise ValueError(f"--routing {path.name}: expected one array, got {type(recorded).__name__}")
    if recorded.dtype.kind not in "iu" or recorded.ndim not in (2, 3) or 0 in recorded.shape:
        raise ValueError(
            f"--routing {path.name}: expected integers of shape (T, K) or (R, T, K), got {recorded.dtype} of shape "
            f"{recorded.shape}"
        )
    if recorded.shape[-1] != num_topk:
        raise ValueError(
            f"--routing {path.name}: the file has {recorded.shape[-1]} lanes a token, --topk is {num_topk}"
        )
    if recorded.min() < -1 or recorded.max() >= num_experts:
        raise ValueError(
            f"--routing {path.name}: ids from {recorded.min()} to {recorded.max()}, "
            f"--experts {num_experts} allows -1 to {num_experts - 1}"
        )
    return recorded.astype(np.int64)
