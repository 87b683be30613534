"""The words and lines of src/cuda for two ranks of one block each, as programs of machine.py.

What many threads of a block do together stands in one program: an operation that another thread carries out `needs` a
block barrier between itself and the flag, bulk copies `need` to be waited for, and a proxy fence before they read. The
end of a kernel brings what it did in order, but shows nothing to other ranks. A processor makes no store before it
knows that it will (`stores_wait`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from protocol.host import Without, equal
from protocol.machine import Fence, Load, Operation, Store, Wait

HIGH_THROUGHPUT = (
    "header: release",
    "header: acquire",
    "block barrier behind the headers",
    "proxy fence before bulk loads",
    "bulk stores waited for",
    "block barrier before done",
    "done: release",
    "progress: release",
    "progress: acquire",
    "the epoch",
    "two sets of words",
)
# One of them suffices.
EITHER = (
    "done: acquire",
    "end of the kernel behind done",
)
LOW_LATENCY = (
    "the epoch in the line",
    "lines arrive whole",
    "wait for the acknowledgement",
    "block barrier behind the acknowledgements",
    "end of the kernel before the acknowledgement",
    "what is held back",
    "two sets of lines",
)
TEXT = ("fence behind the text", "fence before the text is read")

OTHERS = frozenset({"barrier"})  # done by other threads than the one that looked, or tells
BULK_LOADS, BULK_STORES = OTHERS | {"proxy"}, OTHERS | {"bulk"}


def high_throughput(rank: int, calls: str, without: Without = frozenset()) -> list[Operation]:
    """Calls in a row: d dispatch in the expert layout (rows are copied in the same kernel), c combine."""
    me, peer = rank, 1 - rank
    epochs = "the epoch" not in without
    program: list[Operation] = []
    given: list[int] = []

    def fence(name: str, what: str) -> list[Operation]:
        return [] if name in without else [Fence(what)]

    def at(name: str, on: int, source: int, n: int) -> str:
        return f"{name}{on}.{source}.{n % 2 if 'two sets of words' not in without else 0}"

    def word(name: str, n: int) -> Store:
        return Store(at(name, peer, me, n), n if epochs else 1, f"{name}: release" not in without)

    def wait(name: str, n: int) -> Wait:
        return Wait(at(name, me, peer, n), equal(n if epochs else 1), f"{name}: acquire" not in without)

    for n, call in enumerate(calls, 1):
        program.append(Fence("kernel"))
        if call == "d":
            given.append(n)
            area = given.index(n) % 2
        else:
            program += [Store(f"y{me}", n), Fence("kernel")]  # the experts' kernel
        program.append(word("header", n))
        if call == "d":
            program.append(Store(at("count", peer, me, n), n if epochs else 1))
        program.append(wait("header", n))
        program += fence("block barrier behind the headers", "barrier")
        if call == "d":
            program += [
                wait("count", n),
                Fence("barrier"),
                Store(f"row{peer}.{area}", n, needs=BULK_STORES),
                *fence("bulk stores waited for", "bulk"),
                # the thread that stored tells how far it is: no barrier in between
                Store(f"part{peer}.{area}", n, needs=frozenset({"bulk"})),
                *fence("bulk stores waited for", "bulk"),
                word("progress", n),
                wait("progress", n),
                *fence("proxy fence before bulk loads", "proxy"),
                Load(f"part{me}.{area}", equal(n), needs=frozenset({"proxy"})),
            ]
        else:
            program += [
                *fence("proxy fence before bulk loads", "proxy"),
                Load(f"y{peer}", equal(n), needs=BULK_LOADS),
            ]
        program += [*fence("block barrier before done", "barrier"), word("done", n), wait("done", n)]
        program += fence("end of the kernel behind done", "kernel")
        program.append(Load(f"row{me}.{area}", equal(n)) if call == "d" else Store(f"y{me}", -n))
        # the host looks at them again, to say who refused
        program.append(Load(at("header", me, peer, n), equal(n if epochs else 1)))
    return program


def low_latency(
    rank: int, order: Sequence[tuple[str, int]], without: Without = frozenset()
) -> list[Operation]:
    """Sends and receipts of one kind, a kernel each: ("send", n), ("receive", n), or ("both", n) in one."""
    me, peer = rank, 1 - rank
    epochs, whole = "the epoch in the line" not in without, "lines arrive whole" not in without
    program: list[Operation] = []
    held: list[int] = []  # sent and not received
    last = 0  # sent

    def line(on: int, n: int) -> str:
        return f"line{on}.{n % 2 if 'two sets of lines' not in without else 0}"

    def tail_is(n: int) -> Callable[[Any], bool]:
        return lambda value: isinstance(value, tuple) and value[0] == (n if epochs else 1)

    def acknowledge() -> Store:
        received = min([h - 1 for h in held], default=last) if "what is held back" not in without else last
        return Store(f"ack{peer}", received, needs=OTHERS)

    for what, n in order:
        if "end of the kernel before the acknowledgement" not in without:
            program.append(Fence("kernel"))
        if what in ("send", "both"):
            program.append(acknowledge())
            if n > 2 and "wait for the acknowledgement" not in without:
                program.append(Wait(f"ack{me}", lambda value, n=n: value >= n - 2))
            if "block barrier behind the acknowledgements" not in without:
                program.append(Fence("barrier"))
            if whole:
                program.append(Store(line(peer, n), (n if epochs else 1, n), needs=OTHERS))
            else:
                program.append(Store(line(peer, n) + "data", n, needs=OTHERS))
                program.append(Store(line(peer, n), (n if epochs else 1, n), needs=OTHERS))
            held.append(n)
            last = n
        if what in ("receive", "both"):
            arrived = lambda value, n=n: value[1] == n  # noqa: E731
            program.append(Wait(line(me, n), tail_is(n), expect=arrived if whole else lambda value: True))
            if not whole:
                program.append(Load(line(me, n) + "data", equal(n)))
            held.remove(n)
        # A kernel that only receives tells so at its end, when all its blocks have come there.
        if what == "receive":
            program += [Fence("barrier"), Fence(), acknowledge()]
    return program


def text(rank: int, without: Without = frozenset()) -> list[Operation]:
    """A refusal: its text, then the header that says that it is there, in words without release or acquire."""
    if rank == 0:
        fence = [Fence()] if "fence behind the text" not in without else []
        return [Store("text", 1), *fence, Store("header", 1)]
    fence = [Fence()] if "fence before the text is read" not in without else []
    return [Wait("header", equal(1)), *fence, Load("text", equal(1))]
