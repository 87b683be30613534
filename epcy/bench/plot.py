"""Pictures of a run: time and bandwidth against tokens, who sends to whom, and what ran beside what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from epcy.bench.table import Row

__all__ = ["Bar", "draw", "draw_routing", "draw_timeline", "path_of"]

NOT_CURVES = ("overlap", "first-call")  # cases whose times are not those of calls alone
GREY = "0.45"
COLOURS = {"product": "#b9c4d0", "dispatch": "#1f77b4", "combine": "#d1495b"}


@dataclass(frozen=True)
class Bar:
    """A piece of a timeline: microseconds from its beginning."""

    start_us: float
    end_us: float
    name: str  # "product", or a call: "dispatch", "dispatch receive", ...
    lane: str  # who it belongs to


def path_of(path: str, picture: str) -> str:
    """Name the file of another picture of the same run: `run.png` and "routing" give `run-routing.png`. Local."""
    name = Path(path)
    return str(name.with_name(f"{name.stem}-{picture}{name.suffix}"))


def _figure(width: float, height: float, **options: Any) -> Any:
    """Make a figure without a display; matplotlib is loaded when the first one is drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=120, **options)
    FigureCanvasAgg(figure)
    return figure


def _bare(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


# ---- time and bandwidth


def _bytes_of(row: Row) -> int:
    """What the bandwidth counts: bytes to other ranks, or on one rank all that are moved."""
    return row.bytes_wire or row.bytes_moved


def _series(rows: Sequence[Row]) -> Iterable[tuple[str, str, list[Row], list[float]]]:
    """Give (name, kind, rows, microseconds) of each line of a case; kind: epcy, floor, or a baseline's name."""
    from epcy.bench.device_table import what

    plain = rows[0].mode == "ht" and rows[0].backend == "host"
    names = {
        id(row): row.case if plain and row.layout == "rank" and not row.cached else what(row) for row in rows
    }
    for name in dict.fromkeys(names.values()):
        mine = sorted((row for row in rows if names[id(row)] == name), key=lambda row: row.tokens)
        yield name, "epcy", mine, [row.us_p50 for row in mine]
        floor = [row for row in mine if row.floor_us]
        if floor:
            yield name, "floor", floor, [row.floor_us or 0.0 for row in floor]
        beside: dict[str, list[tuple[Row, float]]] = {}
        for row in mine:
            found = row.baselines or ({"name": row.baseline, "us_p50": row.baseline_us_p50},)
            for one in found:
                if one["us_p50"] is not None:
                    beside.setdefault(str(one["name"]), []).append((row, float(one["us_p50"])))
        for kind, points in beside.items():
            yield name, kind, [row for row, _ in points], [us for _, us in points]


def draw(rows: Sequence[Row], path: str) -> bool:
    """Draw median time and bandwidth against tokens, with the floor and the baselines; False: no row has a curve.

    Local; needs matplotlib, and no display.
    """
    rows = [row for row in rows if row.case not in NOT_CURVES]
    if not rows:
        return False
    figure = _figure(11, 5.4)
    left, right = figure.subplots(1, 2)
    series = list(_series(rows))
    names = list(dict.fromkeys(name for name, *_ in series))
    baselines = [
        kind for kind in dict.fromkeys(kind for _, kind, *_ in series) if kind not in ("epcy", "floor")
    ]
    styles: dict[str, dict[str, Any]] = {
        "epcy": {"marker": "o", "linestyle": "-", "linewidth": 2},
        "floor": {"linestyle": ":", "linewidth": 1.5, "marker": "."},
    }
    for mark, kind in zip("s^dvP", baselines, strict=False):
        styles[kind] = {"marker": mark, "linestyle": "--", "linewidth": 1, "markersize": 5, "alpha": 0.8}
    for name, kind, mine, us in series:
        tokens = [row.tokens for row in mine]
        how = {**styles.get(kind, {}), "color": f"C{names.index(name) % 10}"}
        left.plot(tokens, us, **how)
        if kind != "floor":
            right.plot(tokens, [_bytes_of(row) / one / 1e3 for row, one in zip(mine, us, strict=True)], **how)
    rates = [_bytes_of(row) / row.floor_us / 1e3 for row in rows if row.floor_us]
    if rates:  # the same for all of them, but for rounding
        rate = float(np.median(rates))
        right.axhline(rate, color=GREY, linestyle=":", linewidth=1.5)
        right.annotate("rate of a copy", (0, rate), xycoords=("axes fraction", "data"), xytext=(3, 3),
                       textcoords="offset points", fontsize="small", color=GREY)  # fmt: skip
    every = sorted({row.tokens for row in rows})
    first = rows[0]
    what = "to other ranks" if first.bytes_wire else "moved"
    for axes, title, unit in (
        (left, "Time", "us, median of the slowest rank"),
        (right, "Bandwidth", f"GB/s a rank, bytes {what}"),
    ):
        axes.set(title=title, xscale="log", xlabel="tokens a rank", ylabel=unit)
        axes.set_xticks(every if len(every) < 10 else every[:: -(-len(every) // 8)])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_locator(_no_ticks())
        axes.grid(alpha=0.25)
        _bare(axes)
    left.set_yscale("log")
    bottom, top = left.get_ylim()
    left.set_ylim(bottom, top * (top / bottom) ** (0.06 * len(styles)))  # room for the legend
    left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    right.set_ylim(bottom=0)
    _legend(figure, left, names, styles)
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in rows))
    figure.suptitle(
        f"{first.ranks} rank{'s' * (first.ranks > 1)}, {first.backend} backend: H {first.hidden}, K {first.topk}, "
        f"E {first.experts}, {dtypes}, {first.routing.removesuffix('.npy')} routing",
        fontsize="medium",
    )
    figure.savefig(path)
    return True


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _legend(figure: Any, axes: Any, names: Sequence[str], styles: Mapping[str, Mapping[str, Any]]) -> None:
    """Explain colours and lines apart: there are many of both."""
    from matplotlib.lines import Line2D

    colours = [Line2D([], [], color=f"C{at % 10}", linewidth=4, label=name) for at, name in enumerate(names)]
    texts = {"floor": "floor: bytes at the rate of a copy"}
    lines = [
        Line2D([], [], color=GREY, label=texts.get(kind, kind), **style) for kind, style in styles.items()
    ]
    widest = max(map(len, names), default=1)
    num_columns = max(1, min(len(colours), 120 // (widest + 8)))
    axes.legend(handles=lines, loc="upper left", frameon=False, fontsize="small")
    figure.legend(
        handles=colours, loc="outside lower center", ncols=num_columns, frameon=False, fontsize="small"
    )


# ---- who sends to whom


def draw_routing(counts: NDArray[Any], path: str, title: str = "") -> None:
    """Draw a heat map of (R, E) tokens that each rank sends to each expert, and the experts' sums above. Local."""
    num_ranks, num_experts = counts.shape
    figure = _figure(9.5, 2.9 + 0.28 * min(num_ranks, 24))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1 + 0.16 * min(num_ranks, 24)))
    sums, local = counts.sum(0), num_experts // num_ranks
    mean = sums.mean()
    above.bar(range(num_experts), sums, width=1.0, color=[f"C{e // local % 10}" for e in range(num_experts)])
    above.axhline(mean, color=GREY, linewidth=1, linestyle="--")
    above.annotate(
        " mean", (1, mean), xycoords=("axes fraction", "data"), va="center", fontsize="small", color=GREY
    )
    above.set(ylabel="tokens", ylim=(0, None))
    _bare(above)
    picture = below.imshow(counts, aspect="auto", cmap="viridis", interpolation="nearest", vmin=0)
    for boundary in range(local, num_experts, local):  # experts of one rank stand together
        below.axvline(boundary - 0.5, color="white", linewidth=0.8)
    steps = max(1, num_experts // 16)
    below.set(xlabel="expert; lines between the experts of different ranks", ylabel="from rank")
    below.set_xticks(range(0, num_experts, steps))
    below.set_yticks(range(0, num_ranks, max(1, num_ranks // 16)))
    figure.colorbar(picture, ax=below, label="tokens", pad=0.01)
    busiest = (
        f"busiest expert {int(sums.argmax())}: {sums.max() / mean:.2f} of the mean" if mean else "no tokens"
    )
    figure.suptitle(f"{title}{'; ' if title else ''}{busiest}", fontsize="medium")
    figure.savefig(path)


# ---- what ran beside what


def draw_timeline(orders: Mapping[str, Sequence[Bar]], path: str, title: str = "") -> None:
    """Draw the bars of each order of work below one another, on one scale of time. Local."""
    lanes = list(dict.fromkeys(bar.lane for bars in orders.values() for bar in bars))
    figure = _figure(11, 1.2 + len(orders) * (0.5 + 0.42 * len(lanes)))
    last = max((bar.end_us for bars in orders.values() for bar in bars), default=1.0)
    unit, scale = ("ms", 1e-3) if last > 5000 else ("us", 1.0)
    for axes, (order, bars) in zip(
        np.atleast_1d(figure.subplots(len(orders), 1, sharex=True)), orders.items(), strict=True
    ):
        for bar in bars:
            kind = bar.name.partition(" ")[0]
            axes.barh(
                lanes.index(bar.lane), scale * (bar.end_us - bar.start_us), left=scale * bar.start_us, height=0.72,
                color=COLOURS.get(kind, GREY), alpha=0.55 if bar.name.endswith("receive") else 1.0, linewidth=0,
            )  # fmt: skip
        end = scale * max((bar.end_us for bar in bars), default=0.0)
        axes.axvline(end, color="black", linewidth=1)
        axes.annotate(
            f" {end:.4g} {unit}",
            (end, 0.5),
            xycoords=("data", "axes fraction"),
            va="center",
            fontsize="small",
        )
        axes.set_title(order, loc="left", fontsize="medium")
        axes.set_yticks(range(len(lanes)), lanes)
        axes.set(ylim=(len(lanes) - 0.45, -0.55), xlim=(0, 1.08 * scale * last))
        axes.tick_params(axis="y", length=0)
        _bare(axes)
    axes.set_xlabel(unit)
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    patches.append(Patch(color=GREY, alpha=0.55, label="paler: receiving"))
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path)
