"""The table, in the manner of nccl-tests, and the rows of the JSON file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from epcy.bench.measure import Bytes, Times


@dataclass(frozen=True)
class Row:
    """One line of the table and one object of the JSON file; times are the maximum over ranks.

    ``*_gbps`` and ``gbps_*`` count bytes of one rank. On the host backend ``peer_copy_gbps`` is what memcpy does while
    all ranks copy (read and written counted), and ``floor_us`` the time it would take for the bytes moved. On nvshmem
    ``peer_copy_gbps`` is what the copy engine does from one GPU to another while all else is idle, its share is that
    of ``gbps_wire``, and ``floor_us`` the time that the wire's bytes take at ``floor_gbps``; all three are None on one
    rank. Fields from ``expert_alignment`` on are of the nvshmem backend and of low latency.
    """

    case: str
    mode: str
    backend: str
    ranks: int
    tokens: int
    hidden: int
    topk: int
    experts: int
    dtype: str
    layout: str
    routing: str
    cached: bool
    graph: bool
    num_sms: int | None
    runs: int
    us_min: float
    us_p50: float
    us_p99: float
    bytes_wire: int
    gbps_wire: float
    bytes_moved: int
    gbps_moved: float
    wrong: int | None
    peer_copy_gbps: float | None
    peer_copy_share: float | None
    floor_us: float | None
    baseline: str | None = None
    baseline_us_min: float | None = None
    baseline_us_p50: float | None = None
    baseline_us_p99: float | None = None
    baseline_wrong: int | None = None
    speedup: float | None = None
    expert_alignment: int | None = None
    combine_from: str | None = None
    reduction: str | None = None
    calls: int = 1
    floor_gbps: float | None = None
    over_floor: float | None = None
    host_us_p50: float | None = None
    num_late: int | None = None
    round_scale: bool | None = None
    use_ue8m0: bool | None = None
    use_logfmt: bool | None = None
    # of the case overlap: microseconds a call, and (sequence - overlapped) / communication
    us_sequence_p50: float | None = None
    us_communication_p50: float | None = None
    hidden_share: float | None = None
    inner: int | None = None
    # of the case first-call: the first dispatch and combine of a Buffer, and the preparation itself
    cold_us: float | None = None
    warmed_us: float | None = None
    preinitialized_us: float | None = None
    warmup_us: float | None = None
    check_us_p50: float | None = None  # with the Buffer's option check
    baselines: tuple[dict[str, Any], ...] = ()
    # with --predict: what the model says, its error as a share of us_p50, and the terms
    predicted_us: float | None = None
    prediction_error: float | None = None
    predicted_terms_us: dict[str, float] | None = None
    # of the runs in which other work took no rank's core, and how many were not so; the host backend counts them
    us_undisturbed_p50: float | None = None
    num_disturbed: int | None = None

    def with_check(self, checked: Row) -> Row:
        """Return this line with the time of the same calls under the option check; rows wrong there count here."""
        wrong = None if self.wrong is None else self.wrong + (checked.wrong or 0)
        return replace(self, wrong=wrong, check_us_p50=checked.us_p50)

    def as_json(self) -> dict[str, Any]:
        """Return what the JSON file holds: microseconds and GB/s to four digits, nothing hidden by more."""
        return {name: _shortened(value) for name, value in asdict(self).items()}


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shortened(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return [_shortened(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def figures(times: Times, moved: Bytes, peer_copy_gbps: float) -> dict[str, Any]:
    """Return the fields of a row that are worked out from times and bytes; rates are those of the median."""
    gbps_moved = moved.moved / times.us_p50 / 1e3
    return {
        "us_min": times.us_min,
        "us_p50": times.us_p50,
        "us_p99": times.us_p99,
        "us_undisturbed_p50": times.us_undisturbed_p50,
        "num_disturbed": times.num_disturbed,
        "bytes_wire": round(moved.wire),
        "gbps_wire": moved.wire / times.us_p50 / 1e3,
        "bytes_moved": round(moved.moved),
        "gbps_moved": gbps_moved,
        "peer_copy_gbps": peer_copy_gbps,
        "peer_copy_share": gbps_moved / peer_copy_gbps,
        "floor_us": moved.moved / peer_copy_gbps / 1e3,
    }


def baseline_figures(name: str, times: Times, epcy_us_p50: float) -> dict[str, Any]:
    """Return the fields of a row about the baseline; the speedup is one of medians."""
    return {
        "baseline": name,
        "baseline_us_min": times.us_min,
        "baseline_us_p50": times.us_p50,
        "baseline_us_p99": times.us_p99,
        "speedup": times.us_p50 / epcy_us_p50,
    }


# Heading, unit, width.
_COLUMNS = (
    ("case", "", 10),
    ("tokens", "a rank", 7),
    ("wire", "bytes", 10),
    ("min", "us", 9),
    ("median", "us", 9),
    ("p99", "us", 9),
    ("wire", "GB/s", 7),
    ("moved", "GB/s", 7),
    ("memcpy", "%", 6),
    ("#wrong", "rows", 6),
)
_BASELINE_COLUMNS = (("baseline", "us", 9), ("#wrong", "rows", 6), ("speedup", "x", 7))


def heading(with_baseline: bool) -> str:
    """Return the two lines above the table."""
    columns = _COLUMNS + (_BASELINE_COLUMNS if with_baseline else ())
    lines = (" ".join(f"{column[line]:>{column[2]}}" for column in columns) for line in (0, 1))
    return "".join(f"# {line}\n" for line in lines)


def line(row: Row) -> str:
    """Return one line of the table."""
    cells = [
        row.case,
        str(row.tokens),
        f"{row.bytes_wire:.0f}",
        _short(row.us_min),
        _short(row.us_p50),
        _short(row.us_p99),
        _short(row.gbps_wire),
        _short(row.gbps_moved),
        "-" if row.peer_copy_share is None else f"{100 * row.peer_copy_share:.0f}",
        _count(row.wrong),
    ]
    if row.baseline is not None:
        cells += [_short(row.baseline_us_p50), _count(row.baseline_wrong), _short(row.speedup)]
    columns = _COLUMNS + _BASELINE_COLUMNS
    return (
        "  " + " ".join(f"{cell:>{column[2]}}" for cell, column in zip(cells, columns, strict=False)) + "\n"
    )


def notes(row: Row) -> str:
    """Return what a row says beside its line: comment lines, or nothing."""
    return _prediction(row) + _check(row) + _more(row)


def _prediction(row: Row) -> str:
    if row.predicted_us is None or row.predicted_terms_us is None:
        return ""
    terms = ", ".join(f"{name} {_short(us)}" for name, us in row.predicted_terms_us.items())
    return (
        f"#   predicted {_short(row.predicted_us)} us ({row.prediction_error:+.0%} of the median): {terms}\n"
    )


def _check(row: Row) -> str:
    if row.check_us_p50 is None:
        return ""
    times = f"{row.check_us_p50 / row.us_p50:.2f} times"
    return f"#   with EPCY_CHECK=1: median {_short(row.check_us_p50)} us, {times} as long\n"


def _more(row: Row) -> str:
    if row.hidden_share is not None:
        return (
            f"#   us a call: in sequence {_short(row.us_sequence_p50)}, overlapped {_short(row.us_p50)}, communication "
            f"alone {_short(row.us_communication_p50)}: {100 * row.hidden_share:.0f} % of it hidden\n"
        )
    firsts = (
        ("cold", row.cold_us),
        ("after warmup()", row.warmed_us),
        ("preinitialize=True", row.preinitialized_us),
        ("steady median", row.us_p50),
    )
    if row.cold_us is None:
        return ""
    lines = [
        f"#   {name:<20}{us / 1e3:12.4f} ms{us:14.1f} us{us / row.us_p50:9.2f} x\n"
        for name, us in firsts
        if us is not None
    ]
    if row.warmup_us is not None:
        lines.append(f"#   {'warmup() itself':<20}{row.warmup_us / 1e3:12.4f} ms{row.warmup_us:14.1f} us\n")
    return "".join(lines)


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)
