"""Dispatch and combine between nodes: the rows and bits of the reference, whatever the network does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from emulator.high_throughput_cases import random_case
from emulator.nodes import NodesRanks

NODES = [(2, 1), (4, 2), (4, 1), (3, 1)]
SMALLEST: dict[str, Any] = {"num_slots": 1, "chunk_tokens": 1, "num_blocks": 1}


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("path", ["direct", "hierarchical"])
@pytest.mark.parametrize("ranks", NODES, ids=lambda n: f"{n[0]} ranks, {n[1]} a node")
@pytest.mark.parametrize("smallest", [{}, SMALLEST], ids=["usual", "smallest"])
@pytest.mark.parametrize("seed", range(2))
def test_random(seed: int, smallest: Any, ranks: tuple[int, int], path: str, layout: str) -> None:
    world = partial(NodesRanks, ranks_per_node=ranks[1], path=path, **smallest)
    random_case(seed + 10 * ranks[0], R=ranks[0], layout=layout, world=world, shape=(17, 128), K=4)
