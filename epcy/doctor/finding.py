"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["FAILURE", "OK", "WARNING", "Facts", "Finding", "gib"]

OK, WARNING, FAILURE = "ok", "warning", "failure"

Facts = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is, and what to do about it.

    Attributes
    ----------
    name : str
    state : str
        "ok", "warning" (works, or will, but not as well as it could) or "failure" (something will not work).
    text : str
        What was seen.
    remedy : str
        What to do; empty where nothing is to be done.
    ranks : tuple of int
        The ranks that found it; empty without a launcher.
    """

    name: str
    state: str
    text: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()


def gib(num_bytes: int) -> str:
    """Write bytes for a reader. Local."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.0f} MiB"
