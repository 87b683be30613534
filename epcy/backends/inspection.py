"""The option `check`: canaries behind every region of a rank's memory."""

from __future__ import annotations

from typing import Any

from epcy.errors import StateError

__all__ = ["Inspection"]

CANARY = 0xC5


class Inspection:
    """Watches the guard bytes behind each region; `guards` are their views, by the region's name."""

    def __init__(self, rank: int, guards: dict[str, Any]) -> None:
        self.rank, self.guards = rank, guards
        for guard in guards.values():
            guard[...] = CANARY

    def verify(self, operation: str) -> None:
        """Raise, once for each write, where a guard has changed.

        Raises
        ------
        StateError
        """
        for name, guard in self.guards.items():
            changed = guard != CANARY
            if not changed.any():
                continue
            first, count = int(changed.argmax()), int(changed.sum())
            value = int(guard[first])
            guard[...] = CANARY
            raise StateError(
                f"{operation}: something wrote past the end of {name} of rank {self.rank}: {count} of {len(guard)} "
                f"guard bytes changed, the first {first} bytes behind the end, to {value:#04x}; look for code that "
                "writes to arrays of this Buffer beyond their length"
            )
