"""Which pictures a run gets with --plot, and what is in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from mpi4py import MPI

from epcy.bench import plot
from epcy.bench.arguments import Arguments
from epcy.bench.table import Row
from epcy.bench.workload import Shape, draw_inputs


def draw(
    comm: MPI.Intracomm, given: Arguments, rows: Sequence[Row], timeline: Mapping[str, Sequence[plot.Bar]]
) -> str:
    """Draw on rank 0; return a line for each file. Collective, blocking."""
    path, tokens = str(given.plot), given.sizes[-1]
    shape = Shape(tokens, given.hidden, given.topk, given.experts, given.dtype)
    idx = draw_inputs(shape, given.routing, given.seed, comm.rank).topk_idx
    counts = comm.gather(np.bincount(idx[idx >= 0], minlength=given.experts))
    if comm.rank != 0 or counts is None:
        return ""
    files = [path] if plot.draw(rows, path) else []
    files.append(plot.path_of(path, "routing"))
    title = f"{tokens} tokens a rank, {given.routing.rpartition('/')[2]} routing"
    plot.draw_routing(np.array(counts), files[-1], title)
    if timeline:
        files.append(plot.path_of(path, "overlap"))
        last = [row for row in rows if row.case == "overlap"][-1]
        batch = f"{last.tokens} tokens a micro-batch, {last.calls // 2} layers"
        plot.draw_timeline(timeline, files[-1], f"rank 0 of {last.ranks}, {last.backend} backend, {batch}")
    return "".join(f"# {file}\n" for file in files)
