"""Faults on purpose: delays, lost flags, killed ranks, failing memory, counts that lie.

The option `faults` (EPCY_FAULTS) describes them, so that a job can be tried against them without changing it:

    EPCY_FAULTS="delay:ms=2,seed=7; kill:rank=1,operation=combine,phase=data,call=100"

A fault is `kind:key=value,...`; several are separated by semicolons. A key that is left out fits everything.

    delay   sleep up to `ms` milliseconds (seeded, different on each rank)
    late    sleep exactly `ms` milliseconds
    drop    never store the flag of this phase: the others wait for this rank
    kill    SIGKILL
    alloc   the allocation of this call fails (phase is "arrival"; a later phase is given: in mid-call); in the
            constructor, and in warmup(), the n-th one
    os      likewise an OSError, in the constructor
    lie     add `by` to the first count that the rank announces in a dispatch
    full    no room for the Buffer's memory, in the constructor

    rank, operation (a name of `epcy.status.OPERATIONS`, "reset", "constructor" or "warmup"),
    phase ("arrival", "data", "completion", "receipt"; in the constructor: before the ranks have agreed, while the
    backend is made, after that),
    call (the n-th visit, from 1, that fits the other keys), every (each n-th of them), seed
"""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from dataclasses import dataclass, field

from epcy.errors import ArgumentError
from epcy.status import OPERATIONS

__all__ = ["KINDS", "PHASES", "Fault", "Faults", "parse"]

KINDS = ("delay", "late", "drop", "kill", "alloc", "os", "lie", "full")
# Before the flag that says "I am here"; between the flags; before the flag that says "I am through"; low latency:
# before the flag that says "I have received".
PHASES = ("arrival", "data", "completion", "receipt")
_NAMES = (*OPERATIONS[1:], "reset", "constructor", "warmup")
_NUMBERS = {"rank": 0, "call": 1, "every": 1, "seed": 0, "by": None}


@dataclass
class Fault:
    """One fault: where it strikes, and how often it was passed."""

    kind: str
    rank: int | None = None
    operation: str | None = None
    phase: str | None = None
    call: int | None = None
    every: int = 1
    ms: float = 1.0
    seed: int = 0
    by: int = 1
    num_visits: int = field(default=0, compare=False)

    def strikes(self, operation: str, phase: str) -> bool:
        """Count a visit, and tell whether the fault happens now."""
        if self.operation not in (None, operation) or self.phase not in (None, phase):
            return False
        self.num_visits += 1
        return self.num_visits == self.call if self.call else self.num_visits % self.every == 0


def parse(text: str) -> list[Fault]:
    """Read a description.

    Local, blocking.

    Raises
    ------
    ArgumentError
        An unknown kind or key, or a value out of bounds.
    """
    return [_one(part.strip()) for part in text.split(";") if part.strip()]


def _one(text: str) -> Fault:
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise ArgumentError(f"faults: expected one of {', '.join(KINDS)}, got {kind!r} in {text!r}")
    fault = Fault(kind)
    for pair in rest.split(",") if rest.strip() else ():
        key, _, value = (part.strip() for part in pair.partition("="))
        if key == "operation" and value in _NAMES or key == "phase" and value in PHASES:
            setattr(fault, key, value)
        elif key in _NUMBERS:
            setattr(fault, key, _number(int, value, _NUMBERS[key], pair, text))
        elif key == "ms":
            fault.ms = _number(float, value, 0, pair, text)
        elif key in ("operation", "phase"):
            names = _NAMES if key == "operation" else PHASES
            raise ArgumentError(
                f"faults: expected {key} to be one of {', '.join(names)}, got {value!r} in {text!r}"
            )
        else:
            known = "rank, operation, phase, call, every, ms, seed, by"
            raise ArgumentError(f"faults: expected one of {known}, got {key!r} in {text!r}")
    return fault


def _number(
    kind: type[int] | type[float], value: str, least: int | None, pair: str, text: str
) -> int | float:
    try:
        number = kind(value)
    except ValueError:
        number = None
    if number is None or not (least is None or least <= number < float("inf")):
        bound = "" if least is None else f", at least {least}"
        raise ArgumentError(f"faults: expected a number{bound}, got {pair.strip()!r} in {text!r}")
    return number


def _is_in_mid_call(fault: Fault) -> bool:
    return fault.kind == "alloc" and fault.phase not in (None, "arrival") and fault.operation != "constructor"


class Faults:
    """The faults of one rank's Buffer."""

    def __init__(self, text: str, rank: int) -> None:
        mine = [one for one in parse(text) if one.rank in (None, rank)]
        self._faults = [one for one in mine if one.kind in ("delay", "late", "kill") or _is_in_mid_call(one)]
        self._others = {kind: [one for one in mine if one.kind == kind] for kind in KINDS}
        self._random = {id(one): random.Random(f"{one.seed} {rank}") for one in mine}

    def reach(self, operation: str, phase: str) -> None:
        """Come to a phase: sleep, or die, or run out of memory in mid-call.

        Raises
        ------
        MemoryError
        """
        for one in self._faults:
            if not one.strikes(operation, phase):
                continue
            if one.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if one.kind == "alloc":
                raise MemoryError("says EPCY_FAULTS (alloc)")
            time.sleep((self._random[id(one)].random() if one.kind == "delay" else 1.0) * one.ms * 1e-3)

    def drops(self, operation: str, phase: str) -> bool:
        """Tell whether the flag at the end of this phase is lost."""
        return sum(one.strikes(operation, phase) for one in self._others["drop"]) > 0  # all count the visit

    def fails(self, operation: str) -> bool:
        """Tell whether an allocation of this call fails."""
        return sum(one.strikes(operation, "arrival") for one in self._others["alloc"]) > 0

    def take(self, operation: str, phase: str) -> None:
        """Come to where something is acquired: memory, a page, a thread.

        Raises
        ------
        MemoryError, OSError
        """
        fails, is_refused = (
            sum(one.strikes(operation, phase) for one in self._others[kind] if one.operation == operation) > 0
            for kind in ("alloc", "os")  # of operations that are named: without one, a call's memory is meant
        )
        if fails:
            raise MemoryError("says EPCY_FAULTS (alloc)")
        if is_refused:
            raise OSError(errno.ENOSPC, "says EPCY_FAULTS (os)")

    def is_full(self) -> bool:
        """Tell whether the constructor finds no room."""
        return bool(self._others["full"])

    def lie(self, operation: str) -> int:
        """Return what is added to the first count of this call."""
        return sum(one.by for one in self._others["lie"] if one.strikes(operation, "arrival"))
