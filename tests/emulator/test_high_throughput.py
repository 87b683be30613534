"""Dispatch and combine of both layouts, on several ranks at any pace, against the reference bit by bit."""

from __future__ import annotations

from typing import Any

import pytest

from emulator.high_throughput_cases import random_case

# More rows than a mover warp tells at a time, and than a ring holds; rows in pieces; more lanes than a warp has.
MANY: dict[str, Any] = {"shape": (80, 128), "R": 2, "K": 3, "L": 3, "worst": False}
PIECES: dict[str, Any] = {"shape": (20, 3584), "R": 2, "K": 3, "L": 3, "worst": False}
WIDE: dict[str, Any] = {"shape": (6, 128), "K": 33, "L": 6}


@pytest.mark.parametrize("seed", range(40))
def test_random(seed: int) -> None:
    random_case(seed)


@pytest.mark.parametrize("seed", range(12))
def test_random_without_bulk_copies(seed: int) -> None:
    random_case(seed, arch=80)


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("shape", [MANY, PIECES, WIDE], ids=["many", "pieces", "wide"])
@pytest.mark.parametrize("seed", range(100, 103))
def test_shapes(seed: int, shape: dict[str, Any], layout: str) -> None:
    random_case(seed, layout=layout, **shape)


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
