"""`python -m epcy top`: what the ranks of running jobs do, read from their status pages; one line a rank."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from epcy import status
from epcy.errors import BackendUnavailableError
from epcy.stats import imbalance
from epcy.status import Gauges, Status

__all__ = ["Line", "lines", "show"]

COLUMNS = (
    "rank",
    "pid",
    "where",
    "calls/s",
    "us",
    "GB/s",
    "tokens/s",
    "imbalance",
    "waits",
    "hottest experts",
)


@dataclass(frozen=True)
class Line:
    """One rank in one interval; numbers are None where its Buffer counts nothing or made no call."""

    rank: int
    size: int
    pid: int
    where: str
    calls_per_s: float | None
    us: float | None  # mean of a call
    gbps: float | None  # payload that crossed between ranks, over the time inside of calls
    tokens_per_s: float | None
    imbalance: float | None
    wait_share: float | None
    hottest: tuple[tuple[int, float], ...]  # experts and their shares of what came

    def cells(self) -> tuple[str, ...]:
        """Return the text of each column."""
        hot = " ".join(f"{expert}:{share:.0%}" for expert, share in self.hottest)
        return (
            f"{self.rank}/{self.size}",
            str(self.pid),
            self.where,
            _text(self.calls_per_s, ".1f"),
            _text(self.us, ".1f"),
            _text(self.gbps, ".2f"),
            _text(self.tokens_per_s, ".0f"),
            _text(self.imbalance, ".2f"),
            _text(self.wait_share, ".0%"),
            hot or "-",
        )


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _less(now: Gauges, before: Gauges | None) -> Gauges:
    """What was counted since an earlier look."""
    if before is None or before.num_calls > now.num_calls:
        return now
    if len(before.tokens_per_expert) != len(now.tokens_per_expert):  # another Buffer's page
        return now
    experts = zip(now.tokens_per_expert, before.tokens_per_expert, strict=True)
    return Gauges(
        now.first_expert,
        now.num_calls - before.num_calls,
        now.busy_ns - before.busy_ns,
        now.wait_ns - before.wait_ns,
        now.tokens_sent - before.tokens_sent,
        now.tokens_received - before.tokens_received,
        now.bytes_moved - before.bytes_moved,
        tuple(a - b for a, b in experts),
    )


def lines(
    now: Iterable[Status], before: Iterable[Status] = (), seconds: float | None = None, num_hottest: int = 3
) -> list[Line]:
    """Compare two looks at the pages, `seconds` apart; with one alone the numbers are those since construction. Local.

    Rates are over time inside of calls then, since nobody knows how long that is.
    """
    earlier = {(s.pid, s.rank, s.size): s for s in before}
    found = []
    for s in sorted(now, key=lambda s: (s.size, s.rank, s.pid)):
        where = "idle" if s.phase == "idle" else f"{s.operation}: {s.phase} {s.age:.1f} s"
        empty = Line(s.rank, s.size, s.pid, where, None, None, None, None, None, None, ())
        old = earlier.get((s.pid, s.rank, s.size))
        g = None if s.gauges is None else _less(s.gauges, None if old is None else old.gauges)
        if g is None or g.num_calls == 0 or g.busy_ns <= 0:
            found.append(empty)
            continue
        elapsed = seconds if seconds is not None and old is not None else g.busy_ns * 1e-9
        total = sum(g.tokens_per_expert)
        order = sorted(range(len(g.tokens_per_expert)), key=lambda e: -g.tokens_per_expert[e])[:num_hottest]
        hot = tuple((g.first_expert + e, g.tokens_per_expert[e] / total) for e in order if total)
        found.append(
            Line(
                s.rank, s.size, s.pid, where, g.num_calls / elapsed, g.busy_ns / 1e3 / g.num_calls,
                g.bytes_moved / g.busy_ns, g.tokens_received / elapsed, imbalance(g.tokens_per_expert),
                min(1.0, g.wait_ns / g.busy_ns), hot,
            )
        )  # fmt: skip
    return found


def _rich() -> Any:
    try:
        import rich.console
        import rich.live
        import rich.table
    except ImportError as error:
        raise BackendUnavailableError(
            f"top: rich cannot be imported ({error}); pip install 'epcy[top]'"
        ) from None
    return rich


def _table(rich: Any, rows: Sequence[Line]) -> Any:
    table = rich.table.Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        text = name in ("where", "hottest experts")
        table.add_column(name, justify="left" if text else "right", no_wrap=True)
    for row in rows:
        late = row.wait_share is not None and row.wait_share > 0.5
        table.add_row(*row.cells(), style="yellow" if late else None)
    if not rows:
        table.add_row("-", "-", "no rank of this user is at work here")
    return table


def show(directory: str | None = None, *, once: bool = False, interval_s: float = 1.0) -> int:
    """Show the ranks of this user's jobs on this machine, until Ctrl-C; `once`: one table, since construction.

    Local, blocking. Their status pages are read. Ranks on GPUs fetch their sums once a second while somebody looks on;
    others notice nothing. `once` takes two seconds, for their sake.

    Raises
    ------
    ArgumentError
        The folder of the pages is another user's.
    BackendUnavailableError
        rich is not installed.
    """
    rich = _rich()
    console = rich.console.Console(width=None if not once else 160)
    directory = directory or os.environ.get("EPCY_STATUS_DIR") or None
    before, at = status.read_all(directory, watch=True), time.monotonic()
    if once:
        if before:
            time.sleep(2.0)
        console.print(_table(rich, lines(status.read_all(directory))))
        return 0
    try:
        with rich.live.Live(_table(rich, lines(before)), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                now, then = status.read_all(directory, watch=True), time.monotonic()
                live.update(_table(rich, lines(now, before, then - at)), refresh=True)
                before, at = now, then
    except KeyboardInterrupt:
        return 0
