"""The command line of ``python -m epcy.bench``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from epcy.bench.workload import DTYPES, ROUTINGS, load_routing

CASES = ("dispatch", "combine", "roundtrip")

EPILOG = """\
times are of the Python call, the maximum over ranks; wire: GB/s of rows that leave for another rank, one for each
(token, distinct rank); moved: GB/s of all rows, read once and written once, and its share of memcpy's rate;
#wrong: rows that differ from epcy.reference on fresh data.
example: mpiexec -n 2 python -m mpi4py -m epcy.bench roundtrip -b 8 -e 1024 -f 2 --baseline"""


@dataclass(frozen=True)
class Arguments:
    """What to measure; the defaults are those of the command line."""

    cases: tuple[str, ...] = CASES
    min_tokens: int = 8
    max_tokens: int = 1024
    factor: int = 2
    runs: int = 50
    warmup: int = 5
    hidden: int = 2048
    topk: int = 8
    experts: int = 64
    dtype: str = "bf16"
    backend: str | None = None
    mode: str = "ht"
    graph: bool = False
    cached: bool = False
    layout: str = "rank"
    num_sms: int | None = None
    routing: str = "random"
    baseline: bool = False
    check: bool = True
    seed: int = 0
    json: str | None = None
    plot: str | None = None

    @property
    def sizes(self) -> list[int]:
        """Return the tokens a rank of each line: min, min * factor, ... up to max."""
        sizes = [self.min_tokens]
        while self.factor > 1 and sizes[-1] * self.factor <= self.max_tokens:
            sizes.append(sizes[-1] * self.factor)
        return sizes


def parse(argv: Sequence[str], num_ranks: int) -> Arguments:
    """Read the command line; one that makes no sense ends in argparse's message and SystemExit(2). Local."""
    parser = _make_parser()
    values = vars(parser.parse_args(argv))
    values["cases"] = tuple(values["cases"])
    if values["max_tokens"] is None:
        values["max_tokens"] = max(values["min_tokens"], Arguments.max_tokens)
    given = Arguments(**values)
    _refuse_misfits(parser, given, num_ranks)
    return given


def _make_parser() -> argparse.ArgumentParser:
    default = Arguments()
    parser = argparse.ArgumentParser(
        "python -m epcy.bench",
        description="Time dispatch and combine, and check every row.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("cases", nargs="*", metavar="CASE", help=f"any of {', '.join(CASES)} (all)", default=list(CASES))
    add(
        "-b",
        "--min-tokens",
        type=_positive,
        default=default.min_tokens,
        metavar="MIN",
        help="tokens a rank (%(default)s)",
    )
    add(
        "-e",
        "--max-tokens",
        type=_positive,
        default=None,
        metavar="MAX",
        help=f"up to here ({default.max_tokens})",
    )
    add("-f", "--factor", type=_positive, default=default.factor, help="from size to size (%(default)s)")
    add("-n", "--runs", type=_positive, default=default.runs, help="timed runs a line (%(default)s)")
    add("-w", "--warmup", type=_natural, default=default.warmup, help="runs before them (%(default)s)")
    add(
        "--hidden",
        type=_positive,
        default=default.hidden,
        metavar="H",
        help="elements of a token (%(default)s)",
    )
    add("--topk", type=_positive, default=default.topk, metavar="K", help="experts of a token (%(default)s)")
    add(
        "--experts",
        type=_positive,
        default=default.experts,
        metavar="E",
        help="experts of all ranks (%(default)s)",
    )
    add(
        "--dtype",
        choices=sorted(DTYPES),
        default=default.dtype,
        help="payload; fp8 comes back as bf16 (%(default)s)",
    )
    add("--backend", choices=("host", "nvshmem"), help="what moves the tokens (epcy's choice)")
    add(
        "--mode",
        choices=("ht", "ll"),
        default=default.mode,
        help="high throughput or low latency (%(default)s)",
    )
    add("--graph", action="store_true", help="replay CUDA graphs")
    add("--cached", action="store_true", help="use a known routing again: dispatch(handle=...)")
    add("--layout", choices=("rank", "expert"), default=default.layout, help="rows of dispatch (%(default)s)")
    add("--num-sms", type=_positive, metavar="N", help="SMs, or threads a rank on the host (epcy's choice)")
    add(
        "--routing",
        default=default.routing,
        metavar="ROUTING",
        help=f"{', '.join(ROUTINGS)}, or a .npy file of expert ids (T, K) or (R, T, K) (%(default)s)",
    )
    add(
        "--baseline",
        action="store_true",
        help="also time NumPy + MPI.Alltoallv, and print how many times faster epcy is",
    )
    add("--no-check", dest="check", action="store_false", help="leave #wrong out")
    add("--seed", type=_natural, default=default.seed, help="of tokens and routings (%(default)s)")
    add("--json", metavar="FILE", help="write every line and the environment")
    add("--plot", metavar="FILE", help="draw median times (matplotlib)")
    return parser


def _refuse_misfits(parser: argparse.ArgumentParser, given: Arguments, num_ranks: int) -> None:
    """End in an error that names the option where values do not go together."""
    for case in given.cases:
        if case not in CASES:
            parser.error(f"argument CASE: {case!r} is none of {', '.join(CASES)}")
    if given.max_tokens < given.min_tokens:
        parser.error(
            f"argument -e/--max-tokens: {given.max_tokens} is less than -b/--min-tokens {given.min_tokens}"
        )
    if given.experts % num_ranks:
        parser.error(f"argument --experts: {given.experts} is not a multiple of the {num_ranks} ranks")
    if given.topk > given.experts and given.routing in ("random", "skewed"):
        parser.error(f"argument --topk: {given.topk} distinct experts out of --experts {given.experts}")
    if given.baseline and given.layout == "expert":
        parser.error("argument --baseline: it moves rows in the rank layout; leave --layout expert out")
    for option, name in (("--json", given.json), ("--plot", given.plot)):
        if name is not None and not Path(name).absolute().parent.is_dir():
            parser.error(f"argument {option}: no folder to write {name!r} in")
    if given.routing not in ROUTINGS:
        try:
            load_routing(Path(given.routing), given.topk, given.experts)
        except ValueError as error:
            parser.error(f"argument {error}")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return value


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text}")
    return value


_positive.__name__ = _natural.__name__ = "integer"  # what argparse calls them in its messages
