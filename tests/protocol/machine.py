"""A machine with weak memory, explored in every order: for programs of a few ranks, as small as a protocol is.

A rank's operations may be carried out in any order that its fences, its flags and sameness of address leave open. A
store that was carried out lies in the rank's store buffer until it becomes visible, at any later moment and in any
order that the same rules leave open. A rank sees its own buffer. A store that is visible is so to everybody (more than
two ranks on hardware without that property are not modelled).

What a fence orders is worked out once, before anything runs (`Rank`); `explore` then goes through all interleavings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Fence", "Load", "Store", "Wait", "Wrong", "explore"]

Registers = dict[str, Any]


class Wrong(Exception):
    """An interleaving in which a rank reads what it must not, or waits for ever."""


@dataclass(frozen=True)
class Fence:
    """Order of what stands before it and behind it in the program.

    A plain fence (`what` is "all") orders every operation and makes earlier stores visible. Another one only counts for
    the operations that `need` a fence of its name: asynchronous copies, streaming stores, other threads of a block.
    `kernel` is where one kernel ends and the next begins: everything before it is carried out before everything behind
    it; stores need not be visible to other ranks yet.
    """

    what: str = "all"


@dataclass(frozen=True)
class Store:
    """Write `value`. `release`: what stands before it is visible, or read, first."""

    to: str
    value: Any
    release: bool = False
    needs: frozenset[str] = frozenset()  # fences without which no flag orders it
    when: Callable[[Registers], bool] = lambda registers: True


@dataclass(frozen=True)
class Wait:
    """Wait until `until(value)`. `acquire`: what stands behind it is done later."""

    at: str
    until: Callable[[Any], bool]
    acquire: bool = False
    unless: Callable[[Registers], bool] = lambda registers: False
    needs: frozenset[str] = frozenset()  # of a Load, too: fences without which no flag orders it
    expect: Callable[[Any], bool] = lambda value: True  # of the value that ended the wait


@dataclass(frozen=True)
class Load:
    """Read a value: it must be `expect`ed, or goes into a register."""

    at: str
    expect: Callable[[Any], bool] = lambda value: True
    into: str = ""
    needs: frozenset[str] = frozenset()
    then: Callable[[Registers], bool] = lambda registers: True  # what must hold of the registers


Operation = Fence | Store | Wait | Load


def _address(op: Store | Wait | Load) -> str:
    return op.to if isinstance(op, Store) else op.at


@dataclass
class Rank:
    """A program, with what must be over before each operation: sets of operations as bits."""

    program: Sequence[Operation]
    stores_wait: bool  # no store before a wait that it hangs on: what processors promise, and C does not
    ops: list[Any] = field(default_factory=list)
    after: list[int] = field(default_factory=list)  # carried out before it is
    after_visible: list[int] = field(default_factory=list)  # visible before it is carried out
    seen_after: list[int] = field(default_factory=list)  # of a store: visible before it is visible

    def __post_init__(self) -> None:
        fences: list[tuple[int, str]] = []  # how many operations stand before it, its name
        for op in self.program:
            if isinstance(op, Fence):
                fences.append((len(self.ops), op.what))
            else:
                self.add(op, fences)

    def add(self, op: Any, fences: list[tuple[int, str]]) -> None:
        done = visible = drained = 0
        for j, earlier in enumerate(self.ops):
            between = {what for at, what in fences if j < at}
            bit = 1 << j
            is_store = isinstance(earlier, Store)
            free = earlier.needs - between - {"proxy"}
            if "all" in between and not free:
                done |= bit
                visible |= bit if is_store else 0
            if "kernel" in between or _address(earlier) == _address(op):
                done |= bit
            if is_store and _address(earlier) == _address(op):
                drained |= bit
            if isinstance(op, Store) and op.release and not free:
                done |= bit
                drained |= bit if is_store else 0
            waits = isinstance(earlier, Wait)
            hangs = self.stores_wait and isinstance(op, Store)
            if waits and (earlier.acquire or hangs) and op.needs & {"barrier", "proxy"} <= between:
                done |= bit
        self.ops.append(op)
        self.after.append(done)
        self.after_visible.append(visible)
        self.seen_after.append(drained)


State = tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...], tuple[Any, ...]]


def explore(programs: Sequence[Sequence[Operation]], *, stores_wait: bool = False) -> int:
    """Run the programs in every order; return how many states there are.

    Raises
    ------
    Wrong
        In one of them a rank reads a value that is not expected, or all that are left wait.
    """
    ranks = [Rank(program, stores_wait) for program in programs]
    names = sorted({_address(op) for rank in ranks for op in rank.ops})
    place = {name: at for at, name in enumerate(names)}
    registers = sorted({op.into for rank in ranks for op in rank.ops if isinstance(op, Load) and op.into})
    slot = {name: at for at, name in enumerate(registers)}
    all_done = tuple((1 << len(rank.ops)) - 1 for rank in ranks)

    # done[r]: operations that are carried out; buffer[r]: stores of them that are not visible
    start: State = ((0,) * len(ranks), (0,) * len(ranks), (0,) * len(names), (None,) * len(registers))
    seen, todo = {start}, [start]

    def read(rank: Rank, buffer: int, memory: tuple[Any, ...], name: str) -> Any:
        for j in range(buffer.bit_length() - 1, -1, -1):
            if buffer >> j & 1 and rank.ops[j].to == name:
                return rank.ops[j].value
        return memory[place[name]]

    def changed(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
        return (*values[:at], value, *values[at + 1 :])

    while todo:
        state = todo.pop()
        done, buffers, memory, regs = state
        moved = False
        for r, rank in enumerate(ranks):
            mine, buffer = done[r], buffers[r]
            following: list[State] = []
            left = all_done[r] & ~mine
            held = {name: regs[at] for name, at in slot.items()}
            while left:
                i = (left & -left).bit_length() - 1
                left &= left - 1
                op = rank.ops[i]
                if rank.after[i] & ~mine or rank.after_visible[i] & (buffer | ~mine):
                    continue
                now = changed(done, r, mine | 1 << i)
                if isinstance(op, Store):
                    pending = changed(buffers, r, buffer | 1 << i) if op.when(held) else buffers
                    following.append((now, pending, memory, regs))
                    continue
                value = read(rank, buffer, memory, op.at)
                if isinstance(op, Wait):
                    if op.unless(held) or op.until(value):
                        if not op.unless(held) and not op.expect(value):
                            raise Wrong(f"rank {r} waited for {op.at} and reads {value!r}")
                        following.append((now, buffers, memory, regs))
                    continue
                if not op.expect(value):
                    raise Wrong(f"rank {r} reads {value!r} at {op.at}, operation {i}")
                if op.into:
                    held_then = {**held, op.into: value}
                    if not op.then(held_then):
                        raise Wrong(f"rank {r} has read {held_then}")
                    following.append((now, buffers, memory, changed(regs, slot[op.into], value)))
                else:
                    following.append((now, buffers, memory, regs))
            pending = buffer
            while pending:
                i = (pending & -pending).bit_length() - 1
                pending &= pending - 1
                if rank.seen_after[i] & (buffer | ~mine) & ~(1 << i):
                    continue
                op = rank.ops[i]
                following.append(
                    (
                        done,
                        changed(buffers, r, buffer & ~(1 << i)),
                        changed(memory, place[op.to], op.value),
                        regs,
                    )
                )
            for after in following:
                moved = True
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        if not moved and (done != all_done or any(buffers)):
            stuck = [f"rank {r} after {bin(d).count('1')} of {len(ranks[r].ops)} operations"
                     for r, d in enumerate(done) if d != all_done[r]]  # fmt: skip
            raise Wrong(f"nobody can go on: {', '.join(stuck)}")
    return len(seen)
