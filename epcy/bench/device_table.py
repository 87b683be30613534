"""The table of the nvshmem backend and of low latency: every line says what it measured, since a run mixes them."""

from __future__ import annotations

from epcy.bench.table import Row

# Heading, unit, width; the first is on the left.
_COLUMNS = (
    ("case", "", 56),
    ("tokens", "a rank", 7),
    ("SMs", "", 4),
    ("wire", "bytes", 10),
    ("min", "us", 8),
    ("median", "us", 8),
    ("p99", "us", 8),
    ("wire", "GB/s", 7),
    ("floor", "us", 7),
    ("over", "x", 6),
    ("host", "us", 7),
    ("late", "runs", 5),
    ("#wrong", "rows", 6),
)
_BASELINE = (9, 7, 6)  # widths of a baseline's columns
_SHORT = {"nccl-alltoall": "nccl a2a"}


def heading(baselines: tuple[str, ...]) -> str:
    """Return the two lines above the table."""
    names = [f"{_COLUMNS[0][0]:<{_COLUMNS[0][2]}}", *(f"{name:>{width}}" for name, _, width in _COLUMNS[1:])]
    units = [" " * _COLUMNS[0][2], *(f"{unit:>{width}}" for _, unit, width in _COLUMNS[1:])]
    for name in baselines:
        for widths, words in (
            (names, (_SHORT.get(name, name), "faster", "#wrong")),
            (units, ("us", "x", "rows")),
        ):
            widths += [f"{word:>{width}}" for word, width in zip(words, _BASELINE, strict=True)]
    return "".join(f"# {' '.join(line)}\n" for line in (names, units))


def line(row: Row, baselines: tuple[str, ...]) -> str:
    """Return one line of the table; `baselines` are those of the heading."""
    cells = [
        str(row.tokens),
        _number(row.num_sms),
        str(row.bytes_wire),
        _us(row.us_min),
        _us(row.us_p50),
        _us(row.us_p99),
        f"{row.gbps_wire:.1f}",
        _us(row.floor_us),
        "-" if row.over_floor is None else f"{row.over_floor:.2f}",
        _us(row.host_us_p50),
        _number(row.num_late),
        _number(row.wrong),
    ]
    text = f"{what(row):<{_COLUMNS[0][2]}} " + " ".join(
        f"{cell:>{column[2]}}" for cell, column in zip(cells, _COLUMNS[1:], strict=True)
    )
    found = {one["name"]: one for one in row.baselines}
    for name in baselines:
        one = found.get(name)
        words = (
            ("-",) * 3
            if one is None
            else (_us(one["us_p50"]), f"{one['speedup']:.2f}", _number(one["wrong"]))
        )
        text += " " + " ".join(f"{word:>{width}}" for word, width in zip(words, _BASELINE, strict=True))
    return f"  {text.rstrip()}\n"


def what(row: Row) -> str:
    """Say in words what a line measured."""
    words = [row.mode, row.case, row.dtype]
    if row.mode == "ht" and row.case != "combine":
        words.append("cached" if row.cached else "uncached")
    if row.layout == "expert":
        words.append(f"expert/{row.expert_alignment}")
    if row.combine_from is not None:
        words.append(f"from {row.combine_from}")
    if row.reduction is not None:
        words.append(f"by {row.reduction}")
    if row.use_ue8m0 or row.round_scale:
        words.append("ue8m0" if row.use_ue8m0 else "round-scale")
    if row.use_logfmt:
        words.append("logfmt")
    if row.mode == "ll":
        words.append(f"E{row.experts}")
    words.append(f"graph/{row.calls}" if row.graph else f"eager/{row.calls}" if row.calls > 1 else "")
    return " ".join(filter(None, words))


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
