"""Draw the table: median time against tokens, epcy and the baseline, one colour for each case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from epcy.bench.table import Row


def draw(rows: Sequence[Row], path: str) -> None:
    """Write ``path`` (.png, .svg, .pdf). Local; imports matplotlib, which needs no display here."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    for index, case in enumerate(dict.fromkeys(row.case for row in rows)):
        of_case = [row for row in rows if row.case == case]
        tokens = [row.tokens for row in of_case]
        axes.plot(tokens, [row.us_p50 for row in of_case], "o-", color=f"C{index}", label=f"{case}, epcy")
        axes.plot(
            tokens,
            [row.floor_us for row in of_case],
            ":",
            color=f"C{index}",
            label=f"{case}, its bytes at the rate of a copy",
        )
        if of_case[0].baseline_us_p50 is not None:
            axes.plot(
                tokens,
                [row.baseline_us_p50 for row in of_case],
                "s--",
                color=f"C{index}",
                label=f"{case}, baseline",
            )
    first = rows[0]
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens a rank",
        ylabel="us, median over runs of the slowest rank",
        title=f"{first.ranks} ranks, {first.backend} backend: "
        f"H {first.hidden}, K {first.topk}, E {first.experts}, {first.dtype}",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path)
