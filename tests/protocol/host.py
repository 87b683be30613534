"""The flags of src/host for two ranks, as programs of machine.py.

Each fence has the name that it has in docs/memory-model.md, and `without` leaves some of them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from protocol.machine import Fence, Load, Operation, Registers, Store, Wait

Without = frozenset[str]

HIGH_THROUGHPUT = (
    "arrived: release",
    "arrived: acquire",
    "store fence after streaming stores",
    "done: release",
    "done: acquire",
    "the epoch",
    "two records",
    "wait at the start of a call",
)
LOW_LATENCY = (
    "arrived: release",
    "arrived: acquire",
    "received: release",
    "received: acquire",
    "the epoch",
    "wait for received",
)
WITHOUT_A_RANK = ("invalidation", "fence after the invalidation", "fence before the second look")
BELL = ("fence behind the word", "fence behind asleep", "second look")


def at_least(n: int) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int) and value >= n


def equal(n: object) -> Callable[[object], bool]:
    return lambda value: value == n


def high_throughput(rank: int, calls: str, without: Without = frozenset()) -> list[Operation]:
    """Calls in a row: d dispatch, c combine, r a call that rank 0 refuses."""
    me, peer = rank, 1 - rank
    fences = "the epoch" not in without
    program: list[Operation] = []
    given: list[int] = []  # dispatches, whose rows lie in two areas by turns

    def word(name: str, n: int) -> Store:
        return Store(f"{name}{me}", n if fences else 1, release=f"{name}: release" not in without)

    def wait(name: str, n: int) -> Wait:
        return Wait(f"{name}{peer}", at_least(n if fences else 1), acquire=f"{name}: acquire" not in without)

    def record(of: int, n: int) -> str:
        return f"record{of}{n % 2 if 'two records' not in without else 0}"

    def row(of: int, n: int, source: int) -> str:
        return f"row{of}.{given.index(n) % 2}.{source}"

    for n, call in enumerate(calls, 1):
        if call == "d":
            given.append(n)
            if len(given) > 2:  # the user's last look at the result whose area goes
                program.append(Load(row(me, given[-3], peer), equal(given[-3])))
        elif call == "c":
            program.append(Store(f"y{me}", n))  # the experts' output
        if n > 1 and "wait at the start of a call" not in without:
            program.append(wait("arrived", n - 1))
        program += [Store(record(me, n), n), word("arrived", n)]
        if call == "r" and rank == 0:
            program.append(word("done", n))
            continue
        program += [wait("arrived", n), Load(record(peer, n), equal(n))]
        if call == "r":  # it has read why, and leaves
            program.append(word("done", n))
            continue
        if call == "d":
            program.append(Store(row(peer, n, me), n, needs=frozenset({"stream"})))
            if "store fence after streaming stores" not in without:
                program.append(Fence("stream"))
        else:
            program.append(Load(f"y{peer}", equal(n)))
        program += [word("done", n), wait("done", n)]
        if call == "d":
            program.append(Load(row(me, n, peer), equal(n)))
        else:
            program.append(Store(f"y{me}", -n))  # it is the user's again
    return program


def low_latency(
    rank: int, order: Sequence[tuple[str, int]], without: Without = frozenset()
) -> list[Operation]:
    """Sends and receipts of one kind, at most two calls in flight: ("send", n) or ("receive", n)."""
    me, peer = rank, 1 - rank
    counts = "the epoch" not in without
    program: list[Operation] = []
    for what, n in order:
        if what == "send":
            if n > 2 and "wait for received" not in without:
                until = at_least(n - 2 if counts else 1)
                program.append(Wait(f"received{peer}", until, acquire="received: acquire" not in without))
            program += [
                Store(f"slot{me}{n % 2}", n),
                Store(f"header{me}{n % 2}", n),
                Store(f"arrived{me}", n if counts else 1, release="arrived: release" not in without),
            ]
        else:
            until = at_least(n if counts else 1)
            program += [
                Wait(f"arrived{peer}", until, acquire="arrived: acquire" not in without),
                Load(f"header{peer}{n % 2}", equal(n)),
                Load(f"slot{peer}{n % 2}", equal(n)),
                Store(f"received{me}", n if counts else 1, release="received: release" not in without),
            ]
    return program


def without_a_rank(rank: int, without: Without = frozenset()) -> list[Operation]:
    """Rank 0 has masked rank 1 and does not wait for it; rank 1 reads what may be given away: a sequence lock."""
    if rank == 0:
        program: list[Operation] = [Store("slot", 1), Store("header", 1), Store("arrived", 1, release=True)]
        if "invalidation" not in without:
            program.append(Store("header", 0))
        if "fence after the invalidation" not in without:
            program.append(Fence())
        return [*program, Store("slot", 3), Store("header", 3), Store("arrived", 3, release=True)]

    def sound(seen: Registers) -> bool:
        return not (seen["first"] == 1 and seen["second"] == 1) or seen["rows"] == 1

    program = [
        Wait("arrived", at_least(1), acquire=True),
        Load("header", into="first"),
        Load("slot", into="rows"),
    ]
    if "fence before the second look" not in without:
        program.append(Fence())
    return [*program, Load("header", into="second", then=sound)]


def bell(rank: int, without: Without = frozenset()) -> list[Operation]:
    """Rank 1 falls asleep until rank 0 has stored a word; nobody's sleep has a limit here."""
    if rank == 0:
        program: list[Operation] = [Store("word", 1, release=True)]
        if "fence behind the word" not in without:
            program.append(Fence())
        return [
            *program,
            Load("asleep", into="asleep"),
            # the ring hangs on what was read
            Wait("asleep", lambda value: False, acquire=True, unless=lambda seen: seen["asleep"] is not None),
            Store("rung", 1, when=lambda seen: seen["asleep"] == 1),
        ]
    program = [Store("asleep", 1)]
    if "fence behind asleep" not in without:
        program.append(Fence())
    look = "second look" not in without
    if look:
        program.append(Load("word", into="word"))
    return [*program, Wait("rung", equal(1), unless=lambda seen: look and seen["word"] == 1)]
