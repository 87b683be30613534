"""`python -m epcy calibrate`: measure the constants of epcy/model.py on this machine, all ranks together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from epcy import links, measured
from epcy.model import Constants, Load, load_of, predict, rate_gbps
from epcy.timed_calls import Kind, take_device, time_calls

if TYPE_CHECKING:
    from mpi4py import MPI

    import epcy
    from epcy.topology import Topology

__all__ = ["Calibration", "calibrate", "constants_of"]

HIDDEN, NUM_TOPK, EXPERTS_A_RANK = 2048, 8, 16
THIN_HIDDEN, THIN_TOKENS = 64, 2048  # rows of few bytes: what they take is lanes
WAKE_TOKENS = 64  # of thin rows: enough that they are shared among threads
# Of all rows of a call; closer together where memory takes over from the caches. A dispatch of the host backend goes
# another way from `stream_bytes` on: a size on either side.
SIZES_BYTES = (3 << 16, 3 << 18, 3 << 20, 3 << 22, 17 << 20, 3 << 23, 17 << 21, 3 << 24)
BESIDE = (0.985, 1.0)
SMS_BYTES = 3 << 22  # at which the number of SMs is changed
SLOT_TOKENS = (3, 12, 48, 192, 256)  # of the low-latency mode; the last is its limit
NETWORK_SECONDS = 1.0
MOST_OVER = 1.5  # times the seconds: no other pass begins then
PASSES = 3  # over all points; the middle one counts: a machine has faster and slower minutes
FP8_ROW_BYTES = HIDDEN + HIDDEN // 128 * 4

HIGH_THROUGHPUT = (Kind("dispatch", "combine"), Kind("dispatch expert", "combine expert", "expert"))
LOW_LATENCY = Kind("low_latency_dispatch", "low_latency_combine", "slots", is_low_latency=True)


Points = dict[str, tuple[Load, float]]  # by name: what was moved, and the microseconds that it took


def calibrate(
    comm: MPI.Intracomm,
    backend: str | None = None,
    seconds: float = 20.0,
    step: Callable[[str], object] = lambda text: None,
    say: Callable[[str], object] = lambda text: None,
) -> dict[str, Constants]:
    """Measure, and keep what was measured in the user's cache folder (rank 0 writes).

    Collective, blocking, for about `seconds`; longer where one pass takes longer, as with ranks that share a GPU. Where
    there are several nodes each is measured alone, all at the same time, and then (host backend) the network between
    them; what is kept is rank 0's node's.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    backend : str, optional
    seconds : float
    step : callable
        Is told, on every rank, what is measured next.
    say : callable
        Is told, on every rank, what was found of the network.

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
    start = time.monotonic()
    network = None
    with contextlib.ExitStack() as stack:
        backend, topology = take_device(comm, backend, stack)
        node = stack.enter_context(node_of(comm, topology))
        run = Calibration(node, backend, seconds / PASSES / sum(map(most_points, kinds)), step)
        for _ in range(PASSES):
            for kind in kinds:
                run.measure(kind)
            if comm.bcast(time.monotonic() - start > seconds * MOST_OVER):
                break
        if topology.num_nodes > 1 and backend == "host":
            step("network")
            network = links.measure(comm, topology, NETWORK_SECONDS)
            say(f"network: {network.gbps:.2f} GB/s a rank, {network.latency_us:.1f} us a message")
    found = {
        subject: constants_of(points, run.usual.get(subject, 1)) for subject, points in run.points().items()
    }
    if comm.rank == 0:
        for subject, constants in found.items():
            key = measured.key_of(backend, comm.size, topology.num_nodes, subject)
            measured.put("calibration", key, asdict(constants))
        if network is not None:
            links.keep(backend, comm.size, topology.num_nodes, network)
    return found


@contextlib.contextmanager
def node_of(comm: MPI.Intracomm, topology: Topology) -> Iterator[MPI.Intracomm]:
    """Return a communicator of this rank's node: what is measured on it is without the network. Collective."""
    if topology.num_nodes == 1:
        yield comm
        return
    node = cast("MPI.Intracomm", comm.Split(topology.node, comm.rank))
    yield node
    node.Free()


def most_points(kind: Kind) -> int:
    """Count the points that `Calibration.measure` takes of a kind; a backend or a machine may have fewer. Local."""
    if kind.is_low_latency:
        return len(("thin", "fixed", "host", "cast")) + len(SLOT_TOKENS[:-1])
    others = ("thin", "asleep", "awake", "fixed", "host", "few", "many", "staged")
    return len(others) + len(SIZES_BYTES) + len(BESIDE)


class Calibration:
    """What is measured, by subject. Each point has a Buffer of its size: how much memory there is has its say."""

    def __init__(
        self, comm: MPI.Intracomm, backend: str | None, seconds: float, step: Callable[[str], object]
    ) -> None:
        """`seconds`: of each point."""
        self.comm, self.backend, self.seconds, self.step = comm, backend, seconds, step
        self.num_experts = EXPERTS_A_RANK * comm.size
        self.seen: dict[str, dict[str, tuple[Load, list[tuple[float, bool]]]]] = {}  # the times of each pass
        self.usual: dict[str, int] = {}  # SMs

    def points(self) -> dict[str, Points]:
        """Return what was measured: of the undisturbed passes the middle one, else the fastest. Local."""

        def one(times: list[tuple[float, bool]]) -> float:
            undisturbed = [us for us, is_undisturbed in times if is_undisturbed]
            return float(np.median(undisturbed)) if undisturbed else min(us for us, _ in times)

        return {
            subject: {name: (load, one(times)) for name, (load, times) in of.items()}
            for subject, of in self.seen.items()
        }

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
        self.backend = buf.backend
        buf._use_usual_sms()
        return buf

    def take(self, buf: epcy.Buffer, kind: Kind, name: str, num_tokens: int) -> None:
        """Measure one point of both subjects. Collective, blocking."""
        self.step(f"{kind.there}, {name}")
        hidden = buf.options["hidden"]
        for subject, us in time_calls(buf, kind, num_tokens, NUM_TOPK, self.seconds).items():
            load = self.load(subject, hidden, num_tokens)
            if (kind.use_fp8 and subject == kind.back) or (kind.from_array and subject == kind.there):
                continue
            if kind.from_array:
                load = replace(load, rows_staged=load.rows_moved)
            if kind.use_fp8:
                load = replace(load, row_bytes=FP8_ROW_BYTES, num_cast=num_tokens * hidden)
            self.seen.setdefault(subject, {}).setdefault(name, (load, []))[1].append(us)

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
            if changes_sms and is_host:
                self.take(buf, kind, "asleep", WAKE_TOKENS)
                self.take_with(buf, kind, "awake", WAKE_TOKENS, num_sms)
        with self.buffer(kind, HIDDEN, 0) as buf:
            self.take(buf, kind, "fixed", 0)
            if not is_host:
                self.take(buf, replace(kind, waits=True), "host", 0)
        for num_tokens in self.sizes(kind, jump):
            with self.buffer(kind, HIDDEN, num_tokens) as buf:
                self.take(buf, kind, f"{num_tokens} tokens", num_tokens)
                if kind.is_low_latency and num_tokens == SLOT_TOKENS[-2]:
                    self.take(buf, replace(kind, use_fp8=True), "cast", num_tokens)
                if kind.is_low_latency or num_tokens != self.tokens_of(kind.there, SMS_BYTES):
                    continue
                if kind.layout == "rank":
                    self.take(buf, replace(kind, from_array=True), "staged", num_tokens)
                if changes_sms:
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
    sizes = tuple(float(load.most_bytes) for load, _ in curve)

    def rate(load: Load, us: float, lane_ns: float) -> float:
        rows_us = max(us - fixed - load.num_lanes * lane_ns / 1e3, 0.05 * us)
        return load.num_bytes / rows_us / 1e3

    # The thin rows' own bytes are taken off at the rate of so many bytes, which in turn needs the lanes.
    constants = Constants(fixed, 0.0, 0.0, 0.0, usual_sms, 1.0, float(usual_sms), sizes, (1.0,) * len(sizes))
    for _ in range(8):
        gbps = tuple(rate(load, us, constants.lane_ns) for load, us in curve)
        constants = replace(constants, gbps=gbps)
        rest_us = thin_us - fixed - thin.num_bytes / rate_gbps(constants, thin.most_bytes) / 1e3
        constants = replace(constants, lane_ns=max(0.0, rest_us * 1e3 / thin.num_lanes))
    if "cast" in points:
        load, us = points["cast"]
        rest_us = us - sum(predict(constants, replace(load, num_cast=0)).values())
        constants = replace(constants, element_ps=max(0.0, rest_us * 1e6 / load.num_cast))
    if "staged" in points:
        load, us = points["staged"]
        rest_us = us - sum(predict(constants, load).values())
        constants = replace(constants, stage_gbps=load.num_bytes / max(rest_us, 0.01 * us) / 1e3)
    if "host" in points:
        constants = replace(constants, host_us=points["host"][1])
    if "awake" in points and usual_sms == 1:
        constants = replace(constants, wake_us=max(0.0, points["awake"][1] - points["asleep"][1]))
    by_sms = {
        int(name.split()[1]): point for name, point in points.items() if name.startswith(("few ", "many "))
    }
    if by_sms:
        seen = {n: rate(load, us, constants.lane_ns) for n, (load, us) in by_sms.items()}
        few, many = min(seen), max(seen)
        usual = rate_gbps(constants, by_sms[few][0].most_bytes)
        constants = replace(constants, sm_gbps=seen[few] / few, most_gbps=max(usual, seen[few], seen[many]))
    return constants
