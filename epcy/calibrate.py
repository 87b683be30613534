"""`python -m epcy calibrate`: measure the constants of epcy/model.py on this machine, all ranks together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from epcy import measured
from epcy.model import Constants, Load, load_of, predict, rate_gbps

if TYPE_CHECKING:
    from mpi4py import MPI

    import epcy

__all__ = ["Kind", "Times", "calibrate", "time_calls"]

HIDDEN, NUM_TOPK, EXPERTS_A_RANK = 2048, 8, 16
THIN_HIDDEN, THIN_TOKENS = 64, 2048  # rows of few bytes: what they take is lanes
WAKE_TOKENS = 64  # of thin rows: enough that they are shared among threads
# Of all rows of a call. A dispatch of the host backend goes another way from `stream_bytes` on: a size on either side.
SIZES_BYTES = (3 << 16, 3 << 18, 3 << 20, 3 << 22, 3 << 23, 3 << 24)
BESIDE = (0.985, 1.0)
SMS_BYTES = SIZES_BYTES[-3]  # at which the number of SMs is changed
SLOT_TOKENS = (3, 12, 48, 192, 256)  # of the low-latency mode; the last is its limit
PASSES = 3  # over all points of a Buffer; the best counts: other work on the machine comes and goes
ONE = 0x3F80  # in bfloat16
FP8_ROW_BYTES = HIDDEN + HIDDEN // 128 * 4

Times = dict[str, float]  # microseconds by subject (model.SUBJECTS)


@dataclass(frozen=True)
class Kind:
    """Calls that are timed together: a way to the experts and the way back."""

    there: str  # subjects
    back: str
    layout: str = "rank"
    is_low_latency: bool = False
    use_fp8: bool = False


HIGH_THROUGHPUT = (Kind("dispatch", "combine"), Kind("dispatch expert", "combine expert", "expert"))
LOW_LATENCY = Kind("low_latency_dispatch", "low_latency_combine", "slots", is_low_latency=True)


@dataclass(frozen=True)
class Timed:
    """What one round does: `prepare` before the clock starts, then `run`, which gives an event."""

    prepare: Callable[[], object]
    run: Callable[[], Any]


def calls_of(buf: Any, kind: Kind, num_tokens: int, num_topk: int) -> dict[str, Timed]:
    """Return what to time of a kind of calls, by subject: random routing, output as experts leave it. Collective."""
    xp, rng = buf.xp, np.random.default_rng([7, buf.rank])
    num_experts, hidden = buf.options["num_experts"], buf.options["hidden"]
    drawn = rng.random((num_tokens, hidden), np.float32).astype(ml_dtypes.bfloat16)
    # Bits: not every CuPy computes with bfloat16.
    x = xp.asarray(drawn.view(np.uint16)).view(ml_dtypes.bfloat16)
    idx = xp.asarray(np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :num_topk].astype(np.int64))
    weights = xp.ones((num_tokens, num_topk), np.float32)
    area: list[Any] = []
    out = xp.empty(x.shape, ml_dtypes.bfloat16)  # kept: memory that is new would be timed too

    if not kind.is_low_latency:
        first = buf.dispatch(x, idx, weights, layout=kind.layout)
        handle, scale = first.handle, weights if kind.layout == "expert" else None
        rows = xp.full(first.recv_x.shape, ONE, np.uint16)

        def fill() -> None:
            area[:] = [buf.combine_input(handle)]
            area[0].view(np.uint16)[...] = rows

        return {
            kind.there: Timed(lambda: None, lambda: buf.dispatch(x, idx, weights, layout=kind.layout).event),
            kind.back: Timed(fill, lambda: buf.combine(area[0], handle, scale, out=out).event),
        }

    def dispatch() -> Any:
        return buf.low_latency_dispatch(x, idx, weights, use_fp8=kind.use_fp8)

    def bring() -> None:
        _, recv_count, handle, _, _ = dispatch()
        area[:] = [buf.low_latency_combine_input(handle), handle]
        if xp is np:  # on a GPU a look at the counts would wait
            for expert, count in enumerate(recv_count.tolist()):
                area[0].view(np.uint16)[expert, :count] = ONE
        else:
            area[0].view(np.uint16).fill(ONE)

    return {
        kind.there: Timed(lambda: None, lambda: dispatch()[3]),
        kind.back: Timed(
            bring, lambda: buf.low_latency_combine(area[0], None, None, area[1], zero_copy=True, out=out)[1]
        ),
    }


def time_calls(
    buf: Any, kind: Kind, num_tokens: int, num_topk: int, seconds: float, warmup: int = 3
) -> Times:
    """Return the microseconds of a dispatch and of a combine of random routing, the slowest rank's.

    The tenth percentile: what they take where other work on the machine leaves them alone. Collective, blocking, for
    about `seconds`; the number of rounds is the same on all ranks.
    """

    def rounds(timed: Timed, num_rounds: int) -> list[float]:
        us = []
        for _ in range(num_rounds):
            timed.prepare()
            buf.barrier()
            start = time.perf_counter()
            timed.run().synchronize()
            us.append((time.perf_counter() - start) * 1e6)
        return us

    found: Times = {}
    for subject, timed in calls_of(buf, kind, num_tokens, num_topk).items():
        rounds(timed, warmup)
        start = time.perf_counter()
        rounds(timed, 3)
        each = buf.comm.allreduce(time.perf_counter() - start) / buf.size / 3
        us = rounds(timed, max(5, min(300, int(seconds / 2 / max(each, 1e-6)))))
        slowest = np.array(buf.comm.allgather(us)).max(axis=0)  # a round is as long as on its slowest rank
        found[subject] = float(np.percentile(slowest, 10))
    return found


Points = dict[str, tuple[Load, float]]  # by name: what was moved, and the microseconds that it took


def calibrate(
    comm: MPI.Intracomm,
    backend: str | None = None,
    seconds: float = 20.0,
    step: Callable[[str], object] = lambda text: None,
) -> dict[str, Constants]:
    """Measure, and keep what was measured in the user's cache folder (rank 0 writes).

    Collective, blocking, for about `seconds`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    backend : str, optional
    seconds : float
    step : callable
        Is told, on every rank, what is measured next.

    Returns
    -------
    dict of str to Constants
        By subject: an operation, or one in the expert layout.

    Raises
    ------
    ArgumentError
        A file in the cache folder that is none of epcy's.
    """
    kinds = (*HIGH_THROUGHPUT, LOW_LATENCY)
    run = Calibration(comm, backend, seconds / PASSES / sum(map(most_points, kinds)), step)
    for _ in range(PASSES):
        for kind in kinds:
            run.measure(kind)
    found = {
        subject: constants_of(points, run.usual.get(subject, 1)) for subject, points in run.points.items()
    }
    if comm.rank == 0:
        for subject, constants in found.items():
            key = measured.key_of(str(run.backend), comm.size, run.num_nodes, subject)
            measured.put("calibration", key, asdict(constants))
    return found


def most_points(kind: Kind) -> int:
    """Count the points that `Calibration.measure` takes of a kind; a backend or a machine may have fewer. Local."""
    if kind.is_low_latency:
        return len(("thin", "fixed", "cast")) + len(SLOT_TOKENS[:-1])
    return len(("thin", "asleep", "awake", "fixed", "few", "many")) + len(SIZES_BYTES) + len(BESIDE)


class Calibration:
    """What is measured, by subject. Each point has a Buffer of its size: how much memory there is has its say."""

    def __init__(
        self, comm: MPI.Intracomm, backend: str | None, seconds: float, step: Callable[[str], object]
    ) -> None:
        """`seconds`: of each point."""
        self.comm, self.backend, self.seconds, self.step = comm, backend, seconds, step
        self.num_experts, self.num_nodes = EXPERTS_A_RANK * comm.size, 1
        self.points: dict[str, Points] = {}
        self.usual: dict[str, int] = {}  # SMs

    def load(self, subject: str, hidden: int, num_tokens: int) -> Load:
        return load_of(subject, num_tokens, self.comm.size, self.num_experts, NUM_TOPK, hidden * 2)

    def tokens_of(self, subject: str, num_bytes: float) -> int:
        return max(1, round(num_bytes / self.load(subject, HIDDEN, 1).num_bytes))

    def buffer(self, kind: Kind, hidden: int, num_tokens: int) -> epcy.Buffer:
        """Make a Buffer for calls of so many tokens. Collective, blocking."""
        import epcy

        most = max(num_tokens, 1)
        rows = most * NUM_TOPK * 5 // 4 + 1024 if kind.layout == "expert" else most * self.comm.size
        buf = epcy.Buffer(
            self.comm, num_max_tokens_per_rank=most, hidden=hidden, num_experts=self.num_experts, num_topk=NUM_TOPK,
            num_max_recv_tokens=rows, dtype="bfloat16", backend=self.backend, low_latency_mode=kind.is_low_latency,
            preinitialize=True,
        )  # fmt: skip
        self.backend, self.num_nodes = buf.backend, buf.topology.num_nodes
        buf._use_usual_sms()
        return buf

    def take(self, buf: epcy.Buffer, kind: Kind, name: str, num_tokens: int) -> None:
        """Measure one point of both subjects, and keep it where no earlier pass was faster. Collective, blocking."""
        self.step(f"{kind.there}, {name}")
        hidden = buf.options["hidden"]
        for subject, us in time_calls(buf, kind, num_tokens, NUM_TOPK, self.seconds).items():
            load = self.load(subject, hidden, num_tokens)
            if kind.use_fp8:
                if subject == kind.back:
                    continue
                load = replace(load, row_bytes=FP8_ROW_BYTES, num_cast=num_tokens * hidden)
            points = self.points.setdefault(subject, {})
            points[name] = load, min(us, points[name][1] if name in points else us)

    def take_with(self, buf: epcy.Buffer, kind: Kind, name: str, num_tokens: int, num_sms: int) -> None:
        buf.set_num_sms(num_sms)
        self.take(buf, kind, name, num_tokens)
        buf._use_usual_sms()

    def measure(self, kind: Kind) -> None:
        """Measure all points of a kind once. Collective, blocking."""
        thin_tokens = SLOT_TOKENS[-1] if kind.is_low_latency else THIN_TOKENS
        with self.buffer(kind, THIN_HIDDEN, thin_tokens) as buf:
            jump, is_host = buf.options["stream_bytes"], buf.xp is np
            num_sms = max(buf._most_sms(op, kind.layout) for op in ("dispatch", "combine"))
            if not kind.is_low_latency:
                self.usual[kind.there] = buf._num_blocks("dispatch", kind.layout)
                self.usual[kind.back] = buf._num_blocks("combine", kind.layout)
            self.take(buf, kind, "thin", thin_tokens)
            changes_sms = num_sms > 1 and not kind.is_low_latency
            if changes_sms:
                self.take(buf, kind, "asleep", WAKE_TOKENS)
                self.take_with(buf, kind, "awake", WAKE_TOKENS, num_sms)
        with self.buffer(kind, HIDDEN, 0) as buf:
            self.take(buf, kind, "fixed", 0)
        for num_tokens in self.sizes(kind, jump):
            with self.buffer(kind, HIDDEN, num_tokens) as buf:
                self.take(buf, kind, f"{num_tokens} tokens", num_tokens)
                if kind.is_low_latency and num_tokens == SLOT_TOKENS[-2]:
                    self.take(buf, replace(kind, use_fp8=True), "cast", num_tokens)
                if changes_sms and num_tokens == self.tokens_of(kind.there, SMS_BYTES):
                    few = 1 if is_host else max(4, self.comm.size)
                    for name, number in (("few", few), ("many", num_sms)):
                        self.take_with(buf, kind, f"{name} {number}", num_tokens, number)

    def sizes(self, kind: Kind, jump: int | None) -> Sequence[int]:
        """Return the tokens of the calls that rates are measured at, ascending. Local."""
        if kind.is_low_latency:
            return SLOT_TOKENS[:-1]
        # As the kernel counts them.
        rows = NUM_TOPK if kind.layout == "expert" else min(NUM_TOPK, self.comm.size)
        beside = () if jump is None else (round(share * jump / rows / HIDDEN / 2) for share in BESIDE)
        sizes = [self.tokens_of(kind.there, num_bytes) for num_bytes in SIZES_BYTES]
        return sorted({*sizes, *(n for n in beside if sizes[0] < n < sizes[-1])})


def constants_of(points: Points, usual_sms: int) -> Constants:
    """Solve for the constants: each point has one that the others leave open. Local."""
    fixed = points["fixed"][1]
    curve = [point for name, point in points.items() if name.endswith(" tokens")]
    thin, thin_us = points["thin"]
    sizes = tuple(float(load.num_bytes) for load, _ in curve)

    def rate(load: Load, us: float, lane_ns: float) -> float:
        rows_us = max(us - fixed - load.num_lanes * lane_ns / 1e3, 0.05 * us)
        return load.num_bytes / rows_us / 1e3

    # The thin rows' own bytes are taken off at the rate of so many bytes, which in turn needs the lanes.
    constants = Constants(fixed, 0.0, 0.0, 0.0, usual_sms, 1.0, float(usual_sms), sizes, (1.0,) * len(sizes))
    for _ in range(8):
        gbps = tuple(rate(load, us, constants.lane_ns) for load, us in curve)
        constants = replace(constants, gbps=gbps)
        rest_us = thin_us - fixed - thin.num_bytes / rate_gbps(constants, thin.num_bytes) / 1e3
        constants = replace(constants, lane_ns=max(0.0, rest_us * 1e3 / thin.num_lanes))
    if "cast" in points:
        load, us = points["cast"]
        rest_us = us - sum(predict(constants, replace(load, num_cast=0)).values())
        constants = replace(constants, element_ps=max(0.0, rest_us * 1e6 / load.num_cast))
    if "awake" in points and usual_sms == 1:
        constants = replace(constants, wake_us=max(0.0, points["awake"][1] - points["asleep"][1]))
    by_sms = {
        int(name.split()[1]): point for name, point in points.items() if name.startswith(("few ", "many "))
    }
    if by_sms:
        seen = {n: rate(load, us, constants.lane_ns) for n, (load, us) in by_sms.items()}
        few, many = min(seen), max(seen)
        usual = rate_gbps(constants, by_sms[few][0].num_bytes)
        constants = replace(constants, sm_gbps=seen[few] / few, most_gbps=max(usual, seen[few], seen[many]))
    return constants
