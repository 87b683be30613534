"""Dispatch and combine of both layouts, on several ranks at any pace, against the reference bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emulator.high_throughput_cases import random_case

# More rows than a mover warp tells at a time, and than a ring holds; rows in pieces in the expert layout, and in both;
# more rows than a warp looks up at a time, by four, two or one warp; more lanes than a warp has.
MANY: dict[str, Any] = {"shape": (80, 128), "R": 2, "K": 3, "L": 3, "worst": False}
PIECES: dict[str, Any] = {"shape": (20, 3584), "R": 2, "K": 3, "L": 3, "worst": False}
LARGE: dict[str, Any] = {**PIECES, "shape": (21, 4608), "dtype": np.float32}
BATCHES: dict[str, Any] = {**MANY, "shape": (300, 128)}
BATCHES_OF_TWO: dict[str, Any] = {**MANY, "shape": (150, 1280), "dtype": np.float32}
BATCHES_OF_ONE: dict[str, Any] = {**MANY, "shape": (75, 2176), "dtype": np.float32}
WIDE: dict[str, Any] = {"shape": (6, 128), "K": 33, "L": 6}


@pytest.mark.parametrize("seed", range(40))
def test_random(seed: int) -> None:
    random_case(seed)


@pytest.mark.parametrize("seed", range(12))
def test_random_without_bulk_copies(seed: int) -> None:
    random_case(seed, arch=80)


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("shape", [MANY, PIECES, LARGE, WIDE], ids=["many", "pieces", "large", "wide"])
@pytest.mark.parametrize("seed", range(100, 103))
def test_shapes(seed: int, shape: dict[str, Any], layout: str) -> None:
    random_case(seed, layout=layout, **shape)


@pytest.mark.parametrize("shape", [BATCHES, BATCHES_OF_TWO, BATCHES_OF_ONE], ids=["four", "two", "one"])
@pytest.mark.parametrize("seed", range(110, 112))
def test_many_batches(seed: int, shape: dict[str, Any]) -> None:
    random_case(seed, layout="rank", **shape)


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("seed", range(200, 203))
def test_fp8_pairs(seed: int, layout: str) -> None:
    random_case(seed, layout=layout, dtype="fp8", R=2 + seed % 2)


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("seed", range(300, 304))
def test_worst_case(seed: int, layout: str) -> None:
    random_case(seed, layout=layout, worst=True, R=2 + seed % 3, weights=True)


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("Ts", [[0, 0, 0], [0, 5, 0], [1, 0, 6]], ids=str)
def test_ranks_without_tokens(Ts: list[int], layout: str) -> None:
    random_case(400 + sum(Ts), layout=layout, R=3, L=2, shape=(6, 128), Ts=Ts)
