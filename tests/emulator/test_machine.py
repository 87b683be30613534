"""The machine notices what it is there to notice: small kernels (toys.cu), right and with one mistake each."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulator.structs import C
from emulator.world import Broken, World

TOYS = (Path(__file__).with_name("toys.cu"),)
WORDS, ROUNDS, SEEDS = 32, 8, 40


def toys(delays: bool = True) -> tuple[World, Any, Any, Any]:
    world = World(2, 1, 1, 1, 8, kernels=TOYS, delays=delays)
    flag = world.array(1, 1, np.uint64)
    flag[:] = 0
    data, out = (world.array(1, WORDS * ROUNDS, np.uint32) for _ in range(2))
    data[:], out[:] = np.arange(WORDS * ROUNDS), 0
    return world, flag, data, out


def queue(world: World, rank: int, name: str, flag: Any, data: Any, out: Any, wrong: int = 0) -> None:
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (flag, data, out)]
    world.launch(rank, "toy_launch", name.encode(), *pointers, wrong)


def message(seed: int, wrong: int, delays: bool = True) -> bool:
    world, flag, data, out = toys(delays)
    queue(world, 0, "send", flag, data, out, wrong)
    queue(world, 1, "receive", flag, data, out)
    world.run(seed)
    return out[:128].tolist() == list(range(1000, 1128))


def rows(seed: int, wrong: int) -> bool:
    world, flag, data, out = toys()
    seen = world.array(1, WORDS * ROUNDS, np.uint32)
    queue(world, 0, "copy", flag, data, out, wrong)
    queue(world, 1, "look", flag, seen, out)
    world.run(seed)
    return seen.tolist() == data.tolist()


def is_noticed(case: Any, wrong: int) -> bool:
    try:
        return not all(case(seed, wrong) for seed in range(SEEDS))
    except Broken:
        return True


@pytest.mark.parametrize("case", [message, rows])
def test_right_kernels_are_right(case: Any) -> None:
    assert all(case(seed, 0) for seed in range(SEEDS))


@pytest.mark.parametrize("wrong", [1, 2])
def test_a_word_that_comes_before_its_data(wrong: int) -> None:
    assert is_noticed(message, wrong)


def test_stores_that_are_not_delayed_come_in_order() -> None:
    assert all(message(seed, 2, delays=False) for seed in range(SEEDS))


@pytest.mark.parametrize("wrong", [1, 2, 3, 4])
def test_a_bulk_copy_that_is_not_waited_for(wrong: int) -> None:
    assert is_noticed(rows, wrong)


def test_blocks_have_their_own_shared_memory() -> None:
    world, flag, data, out = toys()
    queue(world, 0, "memory", flag, data, out)
    world.run(1)
    assert out[:5].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "wrong, text",
    [
        (1, "whose threads have ended"),
        (2, "threads of a warp meet in syncwarp and in shfl|in shfl and in syncwarp"),
        (3, "in nobody's memory"),
        (4, "wait for threads that do not come"),
    ],
)
def test_what_is_no_kernel(wrong: int, text: str) -> None:
    world, flag, data, out = toys()
    queue(world, 0, "odd", flag, data, out, wrong)
    with pytest.raises(Broken, match=text):
        world.run(1)


def test_a_seed_repeats_a_run() -> None:
    def slices(seed: int) -> int:
        message(seed, 0)
        return toys()[0].lib.emulated_slices()

    assert slices(5) == slices(5)


def test_structs_are_read_as_the_compiler_reads_them() -> None:
    lib = toys()[0].lib
    names = [n for n in vars(C) if n.startswith("epcy_") and isinstance(getattr(C, n), type)]
    sizes = {n: lib.emulated_sizeof(n.encode()) for n in names}
    checked = {n: s for n, s in sizes.items() if s >= 0}
    assert len(checked) >= 8
    assert checked == {n: ctypes.sizeof(getattr(C, n)) for n in checked}
