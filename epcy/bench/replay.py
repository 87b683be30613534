"""``python -m epcy.bench replay FILE``: recorded calls, made again on these ranks, timed and checked."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

import epcy
from epcy.backends import bootstrap, find
from epcy.bench import results
from epcy.bench.replay_calls import Player
from epcy.bench.replay_values import Values
from epcy.command_line import FAILURES, positive, report
from epcy.errors import ArgumentError, EpcyError
from epcy.recording import Recording, read, spread
from epcy.recording.calls import Array

__all__ = ["Failure", "main", "play"]

# Options of the recorded Buffer that a replay takes over.
TAKEN = (
    "num_max_tokens_per_rank", "hidden", "num_experts", "num_topk", "dtype", "num_max_recv_tokens", "low_latency_mode",
    "num_max_low_latency_tokens_per_rank", "num_sms", "check", "on_timeout",
)  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """Where a replay ended before its end.

    Attributes
    ----------
    kind : str
        The error's type, or "wrong rows".
    call : int
        Which call of the recording.
    op : str
    texts : dict of int to str
        What each rank that failed says.
    recorded : bool
        Whether the recorded call failed too.
    """

    kind: str
    call: int
    op: str
    texts: dict[int, str]
    recorded: bool


@dataclass
class Outcome:
    """Microseconds of every call by rank (R, calls), NaN where it did not end; wrong rows by call."""

    us: Array
    wrong: list[int | None]
    failure: Failure | None = None


def play(
    comm: MPI.Intracomm,
    recording: Recording,
    backend: str | None = None,
    *,
    check: bool = True,
    timeout: float = 20.0,
) -> Outcome:
    """Make the calls of a recording again, up to the first that fails.

    Collective, blocking. The recording must be of as many ranks (`epcy.recording.spread`). Every call begins when all
    ranks are ready for it, so that its time is the call's own; what the job did between its calls is not waited for.

    Parameters
    ----------
    check : bool
        Compare every row; a wrong one is a failure.
    timeout : float
        Seconds that a call may wait for another rank.
    """
    values, calls = Values(recording), recording.calls
    # SMs of one backend are threads of the other.
    taken = [name for name in TAKEN if name != "num_sms" or find(backend)[0] == recording.backend]
    last = {call.refers: number for number, call in enumerate(calls) if call.refers is not None}
    limit = timeout * 2 + 60
    us = np.full(len(calls), np.nan)
    wrong: list[int | None] = [None] * len(calls)
    players: dict[int, Player] = {}
    texts: list[str | None] = []
    failed = len(calls)
    for number, call in enumerate(calls):
        error: str | None = None
        try:
            if call.buffer not in players:
                options = {name: recording.buffers[call.buffer].options.get(name) for name in taken}
                buf = epcy.Buffer(comm, backend=backend, timeout=timeout, preinitialize=True, **options)
                if buf.xp is not np:
                    buf.xp.cuda.Device(buf.options["device"]).use()
                players[call.buffer] = Player(buf, values)
            player = players[call.buffer]
            run = player.prepare(number)
        except EpcyError as caught:
            error = f"{type(caught).__name__}: {caught}"
        # Whether all are ready: a rank that cannot make the call is not waited for in it.
        texts = bootstrap.allgather(comm, error, limit, f"replay: before call {number} ({call.op})")
        if any(texts):
            failed = number
            break
        bootstrap.meet(comm, limit, f"replay: the start of call {number} ({call.op})")
        try:
            start = time.perf_counter()
            result = run()
            if player.buf.xp is not np:
                player.buf.xp.cuda.get_current_stream().synchronize()
            us[number] = (time.perf_counter() - start) * 1e6
            player.buf.check()
            if check:
                wrong[number] = player.verify(number, result)
            else:
                player.results[number] = result
            if last.get(number) is None:
                player.forget(number)
            if call.refers is not None and last[call.refers] == number:
                player.forget(call.refers)
        except EpcyError as caught:
            error = f"{type(caught).__name__}: {caught}"
        # one word a call: a rank that fails is not waited for in the next one
        text = error or (f"wrong rows: {wrong[number]}" if wrong[number] else None)
        texts = bootstrap.allgather(comm, text, limit, f"replay: after call {number} ({call.op})")
        if any(texts):
            failed = number
            break
    outcome = Outcome(np.array(bootstrap.allgather(comm, us, limit, "replay: the times")), wrong)
    if any(texts):
        said = {rank: text for rank, text in enumerate(texts) if text}
        kinds = [text.partition(":")[0] for text in said.values()]
        first = next((kind for kind in kinds if kind not in ("PeerError", "PeerTimeoutError")), kinds[0])
        outcome.failure = Failure(first, failed, calls[failed].op, said, bool(calls[failed].errors))
    for player in players.values():
        player.results.clear()
        if outcome.failure is None:
            player.buf.free()
        else:
            player.buf.__exit__(EpcyError, None, None)  # the other ranks may be anywhere: nothing collective
    return outcome


def table(
    recording: Recording, us: Array, wrong: Sequence[int | None], num_calls: int
) -> list[dict[str, Any]]:
    """Return a row for each operation: recorded and measured times, medians over calls."""
    rows = []
    for op in dict.fromkeys(call.op for call in recording.calls[:num_calls]):
        numbers = [n for n, call in enumerate(recording.calls[:num_calls]) if call.op == op]
        whole = [recording.calls[n].times_ns[:, 1] for n in numbers]
        whole = [took / 1e3 for took in whole if len(took) and took.min() >= 0]
        here = us[:, numbers][:, ~np.isnan(us[:, numbers]).any(0)]
        checked = [one for one in (wrong[n] for n in numbers) if one is not None]
        tokens = [np.maximum(recording.calls[n].num_tokens, 0).mean() for n in numbers]
        rows.append(
            {
                "op": op,
                "calls": len(numbers),
                "tokens": float(np.mean(tokens)),
                "recorded_us_first": _median([took.min() for took in whole]),
                "recorded_us_last": _median([took.max() for took in whole]),
                "us_first": _median(here.min(0)) if here.size else None,
                "us_last": _median(here.max(0)) if here.size else None,
                "us_p99": float(np.percentile(here.max(0), 99, method="higher")) if here.size else None,
                "wrong": sum(checked) if checked else None,
            }
        )
    return rows


def _median(values: Any) -> float | None:
    return float(np.median(values)) if len(values) else None


def render(rows: Sequence[dict[str, Any]]) -> str:
    heading = (
        "operation",
        "calls",
        "tokens",
        "recorded us",
        "slowest",
        "here us",
        "slowest",
        "p99",
        "#wrong",
    )
    names = (
        "op",
        "calls",
        "tokens",
        "recorded_us_first",
        "recorded_us_last",
        "us_first",
        "us_last",
        "us_p99",
        "wrong",
    )
    lines = [f"{heading[0]:<21}" + "".join(f"{name:>12}" for name in heading[1:])]
    for row in rows:
        values = [row[name] for name in names]
        shown = [
            "-" if one is None else f"{one:.1f}" if isinstance(one, float) else str(one) for one in values
        ]
        lines.append(f"{shown[0]:<21}" + "".join(f"{text:>12}" for text in shown[1:]))
    return "\n".join(lines) + "\n"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m epcy.bench replay",
        description="Make the calls of a recording (epcy.record) again on these ranks, time and check them.",
        epilog="exit status: 0; 1 where a call failed or a row was wrong; 2 where nothing could be replayed",
    )
    parser.add_argument(
        "file", metavar="FILE", help="what epcy.record wrote; of its parts, the name without .rankN"
    )
    parser.add_argument(
        "--backend", choices=("host", "nvshmem"), help="what moves the tokens (epcy's choice)"
    )
    parser.add_argument(
        "--timeout", type=positive("seconds", 1e6), default=20.0, metavar="S", help="of a call (%(default)s)"
    )
    parser.add_argument("--no-check", dest="check", action="store_false", help="do not compare rows")
    parser.add_argument("--json", metavar="FILE", help="write the table, and the failure if there is one")
    return parser


def main(argv: Sequence[str]) -> int:
    """Read the command line and the file on rank 0, replay on all ranks; return the exit status. Collective."""
    comm = MPI.COMM_WORLD
    given: argparse.Namespace | None = None
    recording: Recording | None = None
    status = 0
    if comm.rank == 0:
        try:
            given = make_parser().parse_args(argv)
            whole = read(given.file)
            recording = spread(whole, comm.size)
            sys.stdout.write(heading_of(given.file, whole, comm.size))
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        except (ArgumentError, *FAILURES) as error:
            status = report("epcy.bench replay", error)
        sys.stdout.flush()
    given, recording, status = comm.bcast((given, recording, status))
    if given is None or recording is None:
        return int(status)
    try:
        return _replay(comm, recording, given)
    except (EpcyError, *FAILURES) as error:
        return report("epcy.bench replay", error, comm)


def _replay(comm: MPI.Intracomm, recording: Recording, given: argparse.Namespace) -> int:
    """Replay, and tell; return the exit status. Collective."""
    outcome = play(comm, recording, given.backend, check=given.check, timeout=given.timeout)
    failure = outcome.failure
    if comm.rank == 0:
        wrong = outcome.wrong
        done = len(recording.calls) if failure is None else failure.call
        rows = table(recording, outcome.us, wrong, done)
        sys.stdout.write(render(rows))
        if failure is not None:
            known = (
                "as it did when it was recorded"
                if failure.recorded
                else "which it did not when it was recorded"
            )
            sys.stdout.write(f"call {failure.call} ({failure.op}) failed, {known}: {failure.kind}\n")
            sys.stdout.write("".join(f"  rank {rank}: {text}\n" for rank, text in failure.texts.items()))
        sys.stdout.flush()
        if given.json is not None:
            said = {"schema": 1, "ranks": comm.size, "rows": rows, "failure": failure and asdict(failure)}
            results.write(given.json, said)
    return int(failure is not None)


def heading_of(path: str, recording: Recording, num_ranks: int) -> str:
    lines = [
        f"# {path}: {len(recording.calls)} calls on {recording.num_ranks} ranks, backend {recording.backend}, "
        f"{recording.date}, epcy {recording.epcy}; replayed on {num_ranks}"
    ]
    if recording.num_dropped:
        lines.append(f"# {recording.num_dropped} calls are not in it")
    for number, buffer in enumerate(recording.buffers):
        o = buffer.options
        lines.append(
            f"# Buffer {number}: {buffer.num_ranks} ranks, H {o['hidden']}, K {o['num_topk']}, E {o['num_experts']}, "
            f"{o['dtype']}"
        )
    lines.append("# us: medians over calls, of the rank that was through first, and of the slowest")
    return "\n".join(lines) + "\n"
