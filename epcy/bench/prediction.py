"""The model beside the clock: what `Buffer.explain` says of a line, from constants that calibrate measured before."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import epcy
from epcy import model
from epcy.bench.arguments import Arguments
from epcy.bench.table import Row
from epcy.calibrate import HIDDEN, HIGH_THROUGHPUT, SIZES_BYTES, Calibration, node_of
from epcy.timed_calls import take_device

if TYPE_CHECKING:
    from mpi4py import MPI

CHECKED_BYTES = SIZES_BYTES[2]  # past a core's own caches, and of a dispatch past all
CHECK_SECONDS = 0.2
WITHIN = 0.15  # of the measured median: what counts as predicted
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "fp8"}
OPERATIONS = {"dispatch": ("dispatch",), "combine": ("combine",), "roundtrip": ("dispatch", "combine")}


def refuse_what_has_none(given: Arguments) -> None:
    """Raise NotSupportedError for lines that the model does not describe. Local."""
    known = given.routing == "random" and not given.cached and given.suite is None
    known = known and given.reduction == "rank" and not given.use_logfmt
    if not known or set(given.cases) - set(OPERATIONS):
        raise epcy.NotSupportedError(
            "--predict: the model describes dispatch, combine and roundtrip of random routing that is not cached, rows "
            "as they are, summed on each rank; leave the other options, or --predict, out"
        )


def refuse_without_constants(backend: str, num_ranks: int) -> None:
    """Raise NotSupportedError where calibrate has not run. Local."""
    if not any(model.all_stored(backend, num_ranks, nodes) for nodes in range(1, num_ranks + 1)):
        raise epcy.NotSupportedError(
            f"--predict: nothing is known of {num_ranks} ranks of this machine on {backend}; run mpiexec -n "
            f"{num_ranks} python -m mpi4py -m epcy calibrate --backend {backend} first"
        )


class Drift:
    """Whether the machine is as calibrate found it: calls of a size that it timed, timed again, around the lines."""

    def __init__(self, comm: MPI.Intracomm, backend: str, is_wanted: bool) -> None:
        self.comm, self.backend, self.is_wanted = comm, backend, is_wanted
        self.looks: list[dict[str, float]] = []

    def look(self) -> None:
        """Time a dispatch and a combine; how many times as long as then. Collective, blocking."""
        if not self.is_wanted:
            return
        with contextlib.ExitStack() as stack:
            _, topology = take_device(self.comm, self.backend, stack)
            node = stack.enter_context(node_of(self.comm, topology))
            run = Calibration(node, self.backend, CHECK_SECONDS, lambda text: None)
            num_tokens = run.tokens_of("dispatch", CHECKED_BYTES)
            with run.buffer(HIGH_THROUGHPUT[0], HIDDEN, num_tokens) as buf:
                run.take(buf, HIGH_THROUGHPUT[0], "now", num_tokens)
        found = {}
        for subject, points in run.points().items():
            load, us = points["now"]
            then = model.stored(subject, self.backend, self.comm.size, topology.num_nodes)
            if then is not None:
                found[f"{subject} of {num_tokens} tokens"] = us / sum(model.predict(then, load).values())
        self.looks.append(found)

    def text(self) -> str:
        """Return a line below the table. Local."""
        what = [
            f"{name} {' and then '.join(f'{look[name]:.2f}' for look in self.looks)}"
            for name in (self.looks[0] if self.looks else ())
        ]
        return f"# beside calibrate, times as long: {'; '.join(what)}\n" if what else ""


def predict(buf: epcy.Buffer, given: Arguments, case: str, num_tokens: int, us: float) -> dict[str, Any]:
    """Return the fields of a row: microseconds by term, their sum, and how far that is from `us`. Local."""
    terms: dict[str, float] = {}
    on_host = buf.backend == "host"
    for name in OPERATIONS[case]:
        op = name if given.mode == "ht" else f"low_latency_{name}"
        dtype = DTYPES["bf16" if given.dtype == "fp8" and name == "combine" else given.dtype]
        # What dispatch brought goes back as it is; only fp8 comes back from other memory.
        is_staged = name == "combine" and (
            given.combine_from == "array" or case == "roundtrip" and given.dtype == "fp8" and on_host
        )
        told = buf.explain(
            op, num_tokens, dtype=dtype, layout=given.layout, num_sms=given.num_sms, is_staged=is_staged
        )
        parts = dict(told.terms_us)
        if not parts:
            raise epcy.NotSupportedError(
                f"--predict: nothing is known of {buf.size} ranks in {buf.topology.num_nodes} nodes on {buf.backend} "
                f"(rank {buf.rank}); run python -m mpi4py -m epcy calibrate on them first"
            )
        if not given.graph:
            more = max(0.0, told.host_us - sum(parts.values()))
            parts |= {"host": more} if more else {}
        for term, part in parts.items():
            terms[term] = terms.get(term, 0.0) + part
    predicted = sum(terms.values())
    return {"predicted_us": predicted, "prediction_error": predicted / us - 1, "predicted_terms_us": terms}


def summary(rows: Sequence[Row]) -> str:
    """Return the lines below the table: how many were predicted within 15 %. Local."""
    told = [(row, row.predicted_us) for row in rows if row.predicted_us is not None]
    text = ""
    kinds = (
        ("median", "us_p50"),
        ("median of the runs in which no rank lost its core", "us_undisturbed_p50"),
        ("fastest run", "us_min"),
    )
    for what, name in kinds:
        errors = [(us / getattr(row, name) - 1, row) for row, us in told if getattr(row, name) is not None]
        if not errors:
            continue
        good = sum(abs(error) <= WITHIN for error, _ in errors)
        error, row = max(errors, key=lambda one: abs(one[0]))
        text += (
            f"# prediction: within {WITHIN:.0%} of the {what} in {good} of {len(errors)} lines; furthest off: "
            f"{row.case} of {row.tokens} tokens, {error:+.0%}\n"
        )
    return text
