"""The command line of ``python -m epcy.bench``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from epcy.bench.workload import DTYPES, ROUTINGS, load_routing
from epcy.command_line import positive, whole

CASES = ("dispatch", "combine", "roundtrip")  # measured where the command line names none
MORE_CASES = ("overlap", "first-call")
# The first is what --baseline means.
BASELINES = {"host": ("alltoallv",), "nvshmem": ("cupy", "nccl-alltoall")}
MOST_ELEMENTS = 2**40  # of all ranks' tokens
SUITES = ("figures", "figures-ht", "figures-ll", "decoding")

EPILOG = """\
times are the maximum over ranks, of the Python call on the host backend and between CUDA events on nvshmem; wire: GB/s
of rows that leave for another rank, one for each (token, distinct rank); moved: GB/s of all rows, read once and
written once, and its share of memcpy's rate; #wrong: rows that differ from epcy.reference on fresh data.
another command: python -m epcy.bench replay FILE makes the calls of a recording again (replay --help).
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
    expert_alignment: int = 1
    combine_from: str = "heap"
    reduction: str = "rank"
    round_scale: bool = False
    use_ue8m0: bool = False
    use_logfmt: bool = False
    inner: int = 512
    calls: int | None = None
    floor_gbps: float | None = None
    num_sms: int | None = None
    routing: str = "random"
    baseline: tuple[str, ...] = ()  # "default": the backend's first
    check: bool = True
    check_cost: bool = False
    inspect: bool | None = None  # the Buffer's option `check`; None: as the environment says
    seed: int = 0
    json: str | None = None
    plot: str | None = None
    predict: bool = False
    suite: str | None = None

    @property
    def num_calls(self) -> int:
        """Return how many calls are timed together: those of a graph, or of low latency; else one."""
        return self.calls or (20 if self.mode == "ll" else 5 if self.graph else 1)

    def baselines(self, backend: str) -> tuple[str, ...]:
        """Return the names of the baselines to time on a backend."""
        return tuple(BASELINES[backend][0] if name == "default" else name for name in self.baseline)

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
    values["baseline"] = tuple(filter(None, (values["baseline"] or "").split(",")))
    if values["max_tokens"] is None:
        values["max_tokens"] = max(values["min_tokens"], Arguments.max_tokens)
    values["round_scale"] |= values["use_ue8m0"]
    if values["check_cost"]:
        values["inspect"] = False
        if values["mode"] == "ll":  # areas that are given out are poisoned: what lies there would not last
            values["combine_from"] = "array"
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
    add(
        "cases",
        nargs="*",
        metavar="CASE",
        help=f"any of {', '.join(CASES)} (these three), {', '.join(MORE_CASES)}",
        default=list(CASES),
    )
    add(
        "-b",
        "--min-tokens",
        type=whole(1),
        default=default.min_tokens,
        metavar="MIN",
        help="tokens a rank (%(default)s)",
    )
    add(
        "-e",
        "--max-tokens",
        type=whole(1),
        default=None,
        metavar="MAX",
        help=f"up to here ({default.max_tokens})",
    )
    add("-f", "--factor", type=whole(1), default=default.factor, help="from size to size (%(default)s)")
    add("-n", "--runs", type=whole(1), default=default.runs, help="timed runs a line (%(default)s)")
    add("-w", "--warmup", type=whole(0), default=default.warmup, help="runs before them (%(default)s)")
    add(
        "--hidden",
        type=whole(1),
        default=default.hidden,
        metavar="H",
        help="elements of a token (%(default)s)",
    )
    add("--topk", type=whole(1), default=default.topk, metavar="K", help="experts of a token (%(default)s)")
    add(
        "--experts",
        type=whole(1),
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
    add(
        "--expert-alignment",
        type=whole(1),
        default=default.expert_alignment,
        metavar="N",
        help="rows that groups of the expert layout are padded to a multiple of (%(default)s)",
    )
    add(
        "--combine-from",
        choices=("heap", "array"),
        default=default.combine_from,
        help="where the experts' output lies: in the library's memory (combine_input; roundtrip: recv_x as it came), "
        "or in an array of the user's (%(default)s)",
    )
    add(
        "--reduction",
        choices=("rank", "source"),
        default=default.reduction,
        help="of combine in --mode ll (%(default)s)",
    )
    add("--round-scale", action="store_true", help="scales that are powers of two, in --mode ll --dtype fp8")
    add("--use-ue8m0", action="store_true", help="these scales as exponents; says --round-scale too")
    add("--use-logfmt", action="store_true", help="10 bits an element on the way back, in --mode ll")
    add(
        "--inner",
        type=whole(1),
        default=default.inner,
        help="inner width of an expert in the case overlap (%(default)s)",
    )
    add(
        "--calls",
        type=whole(1),
        metavar="N",
        help="calls timed together, in a graph or in --mode ll (20 there, 5 in a graph of ht)",
    )
    add(
        "--floor-gbps",
        type=positive("GB/s", 1e6),
        metavar="RATE",
        help="rate of the floor column (nvshmem: what the copy engine does in this run)",
    )
    add(
        "--suite",
        choices=SUITES,
        help="measure a set of lines that epcy/bench/suites.py names, instead of what the options say",
    )
    add("--num-sms", type=whole(1), metavar="N", help="SMs, or threads a rank on the host (epcy's choice)")
    add(
        "--routing",
        default=default.routing,
        metavar="ROUTING",
        help=f"{', '.join(ROUTINGS)}, or a .npy file of expert ids (T, K) or (R, T, K) (%(default)s)",
    )
    add(
        "--baseline",
        nargs="?",
        const="default",
        metavar="NAMES",
        help="also time, and print how many times faster epcy is than: alltoallv (NumPy and MPI; host), cupy (gather, "
        "MPI counts, NCCL send/recv, scatter-add; nvshmem), nccl-alltoall (the bytes alone; nvshmem); several with "
        "commas; without a name the first of the backend",
    )
    add("--no-check", dest="check", action="store_false", help="leave #wrong out")
    add(
        "--check-cost",
        action="store_true",
        help="time each line again with the Buffer's option check (EPCY_CHECK=1)",
    )
    add("--seed", type=whole(0), default=default.seed, help="of tokens and routings (%(default)s)")
    add(
        "--predict",
        action="store_true",
        help="compare with the model of `python -m epcy calibrate`, run before",
    )
    add("--json", metavar="FILE", help="write every line and the environment")
    add(
        "--plot",
        metavar="FILE",
        help="draw time and bandwidth against tokens; beside it FILE-routing, and with the case overlap FILE-overlap "
        "(matplotlib)",
    )
    return parser


def _refuse_misfits(parser: argparse.ArgumentParser, given: Arguments, num_ranks: int) -> None:
    """End in an error that names the option where values do not go together."""
    for case in given.cases:
        if case not in CASES + MORE_CASES:
            parser.error(f"argument CASE: {case!r} is none of {', '.join(CASES + MORE_CASES)}")
    if given.max_tokens < given.min_tokens:
        parser.error(
            f"argument -e/--max-tokens: {given.max_tokens} is less than -b/--min-tokens {given.min_tokens}"
        )
    elements = max(given.max_tokens if given.suite is None else 1, 1) * given.hidden * num_ranks
    if elements > MOST_ELEMENTS:
        parser.error(
            f"argument --hidden: {given.hidden} elements of {given.max_tokens} tokens (-e/--max-tokens) on {num_ranks} "
            f"ranks are {elements}, more than {MOST_ELEMENTS}"
        )
    if given.experts % num_ranks and given.suite is None:
        parser.error(f"argument --experts: {given.experts} is not a multiple of the {num_ranks} ranks")
    if given.topk > given.experts and given.routing in ("random", "skewed"):
        parser.error(f"argument --topk: {given.topk} distinct experts out of --experts {given.experts}")
    known = ("default", *(name for names in BASELINES.values() for name in names))
    for baseline in given.baseline:
        if baseline not in known:
            parser.error(f"argument --baseline: {baseline!r} is none of {', '.join(known[1:])}")
        if given.layout == "expert" and baseline != "nccl-alltoall":
            parser.error("argument --baseline: it moves rows in the rank layout; leave --layout expert out")
        if given.mode == "ll" and baseline == "cupy":
            parser.error("argument --baseline: cupy waits for counts on the host; leave --mode ll out")
    if (given.calls or 1) > 1 and given.mode == "ht" and not given.graph:
        parser.error(
            "argument --calls: eager calls of ht are timed one by one; give --graph, or leave --calls out"
        )
    if given.layout == "rank" and given.expert_alignment != 1:
        parser.error(
            "argument --expert-alignment: rows of the rank layout are not padded; give --layout expert"
        )
    if given.check_cost and given.suite is not None:
        parser.error("argument --check-cost: a suite's lines are timed as they stand; leave --suite out")
    _refuse_low_latency_misfits(parser, given)
    for option, name in (("--json", given.json), ("--plot", given.plot)):
        if name is not None and not Path(name).absolute().parent.is_dir():
            parser.error(f"argument {option}: no folder to write {name!r} in")
    if given.routing not in ROUTINGS:
        try:
            load_routing(Path(given.routing), given.topk, given.experts)
        except ValueError as error:
            parser.error(f"argument {error}")


def _refuse_low_latency_misfits(parser: argparse.ArgumentParser, given: Arguments) -> None:
    """The same, of what concerns low latency and the cases that are not dispatch or combine."""
    is_ll, groups = given.mode == "ll", 512 if given.use_ue8m0 else 128
    if is_ll and given.dtype not in ("bf16", "fp8"):
        parser.error(f"argument --dtype: --mode ll is timed for bf16 and fp8, got {given.dtype}")
    if is_ll and (given.layout == "expert" or given.cached):
        parser.error(
            "argument --mode: ll has one layout and no cached routing; leave --layout and --cached out"
        )
    if given.round_scale and not (is_ll and given.dtype == "fp8"):
        option = "--use-ue8m0" if given.use_ue8m0 else "--round-scale"
        parser.error(f"argument {option}: scales are made by --mode ll --dtype fp8 alone")
    if given.use_logfmt and not is_ll:
        parser.error("argument --use-logfmt: rows travel so in --mode ll alone")
    if is_ll and given.hidden % groups and (given.dtype == "fp8" or given.use_logfmt):
        parser.error(
            f"argument --hidden: {given.hidden} is no multiple of {groups}, the columns of a scale or exponent"
        )
    if "overlap" in given.cases:
        if not is_ll:
            parser.error("argument CASE: overlap lives from hooks; give --mode ll")
        if given.num_calls % 2:
            parser.error(f"argument --calls: overlap has two micro-batches, got {given.num_calls} calls")
        if given.graph:
            parser.error("argument --graph: CuPy captures no matrix products; leave it out with overlap")
        if given.baseline:
            parser.error("argument --baseline: none has hooks to overlap by; leave it out with overlap")
    if "first-call" in given.cases and (given.graph or given.cached or given.baseline):
        parser.error(
            "argument CASE: first-call is timed eagerly, uncached and alone; leave --graph, --cached and --baseline out"
        )
