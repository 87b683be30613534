"""The protocols of docs/memory-model.md in every order that weak memory allows: as shipped nothing goes wrong, and
without any one of the named fences, or without the epoch, something does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from protocol import gpu, host
from protocol.machine import Fence, Load, Store, Wait, Wrong, explore

DOCS = Path(__file__).parents[2] / "docs" / "memory-model.md"

ONE_BY_ONE = [(what, n) for n in range(1, 6) for what in ("send", "receive")]
TWO_IN_FLIGHT = [("send", 1), ("send", 2), ("receive", 1), ("receive", 2), ("send", 3), ("receive", 3), ("send", 4),
                 ("send", 5), ("receive", 4), ("receive", 5)]  # fmt: skip
IN_ONE_KERNEL = [("both", n) for n in range(1, 6)]
MIXED = [("send", 1), ("both", 2), ("receive", 1), ("both", 3), ("send", 4), ("receive", 4), ("both", 5)]
RECEIVED_THEN_SENT = [("both", 1), ("send", 2), ("send", 3), ("receive", 2), ("receive", 3), ("both", 4)]

# a protocol: how a rank's program is made, what it is tried on, whether stores wait for what they hang on, its fences
PROTOCOLS = {
    "host, high throughput": (host.high_throughput, ["dcdcd", "ddddd", "ccccc", "dcrrrd", "rrdrc"], False,
                              host.HIGH_THROUGHPUT),
    "host, low latency": (host.low_latency, [ONE_BY_ONE, TWO_IN_FLIGHT], False, host.LOW_LATENCY),
    "host, without a rank": (host.without_a_rank, [None], False, host.WITHOUT_A_RANK),
    "host, bell": (host.bell, [None], False, host.BELL),
    "GPU, high throughput": (gpu.high_throughput, ["dcdcd", "ddddd", "ccccc"], True, gpu.HIGH_THROUGHPUT),
    "GPU, low latency": (gpu.low_latency, [ONE_BY_ONE, TWO_IN_FLIGHT, IN_ONE_KERNEL, MIXED, RECEIVED_THEN_SENT], True,
                         gpu.LOW_LATENCY),
    "GPU, text of a refusal": (gpu.text, [None], True, gpu.TEXT),
}  # fmt: skip


def run(protocol: str, without: Iterable[str] = ()) -> int:
    """Explore every plan of a protocol for two ranks; return the number of states."""
    program, plans, stores_wait, _ = PROTOCOLS[protocol]
    states = 0
    for plan in plans:
        given = () if plan is None else (plan,)
        ranks = [program(rank, *given, without=frozenset(without)) for rank in (0, 1)]
        states += explore(ranks, stores_wait=stores_wait)
    return states


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_as_shipped(protocol):
    assert run(protocol) > 5


@pytest.mark.parametrize(
    ("protocol", "name"), [(protocol, name) for protocol, (*_, names) in PROTOCOLS.items() for name in names]
)
def test_without_a_fence(protocol, name):
    with pytest.raises(Wrong):
        run(protocol, [name])


def test_either_of_two_suffices():
    for name in gpu.EITHER:
        run("GPU, high throughput", [name])
    with pytest.raises(Wrong, match="reads"):
        run("GPU, high throughput", gpu.EITHER)


def test_the_page_names_what_is_left_out_here():
    named = re.findall(r"`([^`\n]+)`", DOCS.read_text())
    wanted = [name for *_, names in PROTOCOLS.values() for name in names] + list(gpu.EITHER)
    assert [name for name in wanted if name not in named] == []


# ---- the machine itself: what it allows, and what each fence forbids


def outcomes(*programs: list, wanted: Callable[[dict], bool], stores_wait: bool = False) -> bool:
    """Whether an order exists in which the registers are as wanted."""
    watched = [[op if not (isinstance(op, Load) and op.into) else
                Load(op.at, into=op.into, needs=op.needs, then=lambda seen: not wanted(seen)) for op in program]
               for program in programs]  # fmt: skip
    try:
        explore(watched, stores_wait=stores_wait)
    except Wrong:
        return True
    return False


def test_stores_are_seen_late_by_others():
    def rank(mine: str, other: str, *fence: Fence) -> list:
        return [Store(mine, 1), *fence, Load(other, into=mine)]

    both_zero = lambda seen: seen["a"] == seen["b"] == 0  # noqa: E731
    assert outcomes(rank("a", "b"), rank("b", "a"), wanted=both_zero)
    assert outcomes(rank("a", "b", Fence()), rank("b", "a"), wanted=both_zero)
    assert not outcomes(rank("a", "b", Fence()), rank("b", "a", Fence()), wanted=both_zero)


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("acquire", [False, True])
def test_a_flag_needs_both_sides(release, acquire):
    writer = [Store("data", 1), Store("flag", 1, release=release)]
    reader = [Wait("flag", lambda value: value == 1, acquire=acquire), Load("data", into="data")]
    stale = outcomes(writer, reader, wanted=lambda seen: seen["data"] == 0)
    assert stale == (not (release and acquire))


def test_a_rank_sees_its_own_stores():
    assert not outcomes([Store("a", 1), Load("a", into="a")], wanted=lambda seen: seen["a"] != 1)
    with pytest.raises(Wrong, match="nobody can go on"):
        explore([[Wait("a", lambda value: value == 1)]])


def test_a_store_behind_a_wait():
    def rank(mine: str, other: str) -> list:
        return [Wait(other, lambda value: value == 1), Store(mine, 1)]

    explore_all = lambda stores_wait: explore([rank("a", "b"), rank("b", "a")], stores_wait=stores_wait)  # noqa: E731
    with pytest.raises(Wrong, match="nobody can go on"):  # each waits for the other's store
        explore_all(True)
    assert outcomes(
        [Load("b", into="b"), Store("a", 1)],
        [Wait("a", lambda value: value == 1), Store("b", 1)],
        wanted=lambda seen: seen["b"] == 1,
    )


def test_streaming_stores_need_their_own_fence():
    def writer(*fence: Fence) -> list:
        return [Store("data", 1, needs=frozenset({"stream"})), *fence, Store("flag", 1, release=True)]

    reader = [Wait("flag", lambda value: value == 1, acquire=True), Load("data", into="data")]
    assert outcomes(writer(), reader, wanted=lambda seen: seen["data"] == 0)
    assert not outcomes(writer(Fence("stream")), reader, wanted=lambda seen: seen["data"] == 0)
