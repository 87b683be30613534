"""How long a call should take: a few measured constants, and the bytes and rows that follow from a shape.

    time = fixed + lanes * lane + bytes of rows / rate(bytes) + elements that are cast * element + bytes staged / rate
    eager time = max(time, what the host takes)

`fixed` is a call without tokens: launch, the exchange of counts, one-way latencies. The rate depends on how many bytes
a call moves (what fits a cache moves faster), so it is measured at a few sizes, and between them it is on a line over
the logarithm of the bytes. It grows with the SMs that a call has, up to what the links carry. What a combine brings
back from an array of the caller's is staged first. A GPU works while the host launches, and looks at counts: an eager
call lasts as long as the longer of both. Routing is taken for random: a token's K experts are distinct, all equally
likely.

With several nodes the constants are of a node's own ranks, and the network's (epcy/links.py) come on top:

    + messages that are waited for in turn * latency + bytes to other nodes / rate of the network
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import comb, log
from typing import Any

from epcy import links, measured
from epcy.errors import ArgumentError

__all__ = [
    "OPERATIONS", "SUBJECTS", "Constants", "Explanation", "Load", "Plan", "all_stored", "choose", "explain", "load_of",
    "predict", "rate_gbps", "stored", "subject_of",
]  # fmt: skip

OPERATIONS = ("dispatch", "combine", "low_latency_dispatch", "low_latency_combine")
# What has constants of its own: an operation, or one in the expert layout.
SUBJECTS = ("dispatch", "combine", "dispatch expert", "combine expert", *OPERATIONS[2:])
SMS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128)  # what `choose` chooses from
SLACK = 1.02  # as much longer a call may take with fewer SMs


@dataclass(frozen=True)
class Constants:
    """What `python -m epcy calibrate` measures of one operation on one machine and topology."""

    fixed_us: float
    lane_ns: float  # for each lane of a token of this rank: count it, write its id and weight
    element_ps: float  # for each element of a token that is cast to fp8
    wake_us: float  # more of `fixed_us`, where a call has more than its usual one SM: threads that are woken
    usual_sms: int  # that the rates are of
    sm_gbps: float  # what one SM adds to the rate, until
    most_gbps: float  # the links are full; both at the size where they were measured
    sizes_bytes: tuple[float, ...]  # Load.most_bytes of a call, ascending; those to the rank itself included
    gbps: tuple[float, ...]  # the rate at each size
    stage_gbps: float = 0.0  # of rows that combine copies into the heap first; 0: not measured
    host_us: float = (
        0.0  # an eager call of whatever size takes no less: the host's part; 0 where calls are the host's
    )


@dataclass(frozen=True)
class Load:
    """What a call of one rank moves, on average."""

    num_tokens: int
    num_lanes: int
    rows_to_peer: float  # that cross to each other rank, one for each token that goes there
    rows_moved: float  # that are written or summed, those of the rank itself included
    row_bytes: int
    num_ranks: int
    num_cast: int = 0  # elements
    rows_staged: float = 0.0  # that a combine copies into the heap before
    most_rows: int = (
        0  # that could be moved: what a kernel goes by that chooses its way before it has counted
    )
    rows_inside: float = 0.0  # that it sends to other ranks of its node, passed on ones included
    rows_between: float = 0.0  # and to other nodes

    @property
    def bytes_to_peer(self) -> float:
        return self.rows_to_peer * self.row_bytes

    @property
    def num_bytes(self) -> float:
        return self.rows_moved * self.row_bytes

    @property
    def most_bytes(self) -> float:
        return max(self.most_rows, self.rows_moved) * self.row_bytes


def subject_of(op: str, layout: str) -> str:
    """Name what has constants of its own. Local."""
    return f"{op} expert" if layout == "expert" and op in OPERATIONS[:2] else op


def load_of(
    subject: str,
    num_tokens: int,
    num_ranks: int,
    num_experts: int,
    num_topk: int,
    row_bytes: int,
    num_cast: int = 0,
    is_staged: bool = False,
    nodes: links.Nodes | None = None,
) -> Load:
    """Count what random routing moves; `is_staged`: a combine, and its rows lie in an array of the caller's. Local.

    `nodes`: where the ranks are; by default all in one.
    """
    if nodes is None:
        nodes = links.Nodes(1, num_ranks, "direct", "host")
    local, lanes = num_experts // num_ranks, min(num_topk, num_experts)
    missed = comb(num_experts - local, lanes) / comb(num_experts, lanes)  # no lane of a token at a rank
    to_peer = num_tokens * (1 - missed)
    moved = to_peer * num_ranks if subject in OPERATIONS[:2] else num_tokens * lanes
    staged = (
        moved if is_staged and subject == "combine" else 0.0
    )  # the expert layout reads them where they lie
    most = num_tokens * (min(num_topk, num_ranks) if subject in OPERATIONS[:2] else num_topk)
    return Load(
        num_tokens, num_tokens * num_topk, to_peer, moved, row_bytes, num_ranks, num_cast, staged, most,
        *links.rows_by_link(subject, num_tokens, num_ranks, num_experts, num_topk, nodes),
    )  # fmt: skip


def rate_gbps(constants: Constants, num_bytes: float, num_sms: int | None = None) -> float:
    """Return the rate at which so many bytes (of most_bytes) move, with so many SMs. Local."""
    c = constants
    at = bisect_right(c.sizes_bytes, num_bytes)
    if at == 0 or at == len(c.sizes_bytes):
        rate = c.gbps[max(0, at - 1)]
    else:
        low, high = c.sizes_bytes[at - 1], c.sizes_bytes[at]
        share = log(num_bytes / low) / log(high / low)
        rate = c.gbps[at - 1] + share * (c.gbps[at] - c.gbps[at - 1])
    if num_sms is None or num_sms == c.usual_sms:
        return rate
    return rate * min(num_sms * c.sm_gbps, c.most_gbps) / min(c.usual_sms * c.sm_gbps, c.most_gbps)


def predict(constants: Constants, load: Load, num_sms: int | None = None) -> dict[str, float]:
    """Return microseconds by term; with the usual number of SMs, or another one. Local."""
    num_sms = constants.usual_sms if num_sms is None else num_sms
    rate = rate_gbps(constants, load.most_bytes, num_sms) if load.num_bytes else 1.0
    terms = {
        "fixed": constants.fixed_us
        + (constants.wake_us if num_sms > 1 == constants.usual_sms and load.num_tokens else 0.0),
        "lanes": load.num_lanes * constants.lane_ns / 1e3,
        "rows": load.num_bytes / rate / 1e3,
    }
    if load.num_cast:
        terms["cast"] = load.num_cast * constants.element_ps / 1e6
    if load.rows_staged and constants.stage_gbps:
        terms["stage"] = load.rows_staged * load.row_bytes / constants.stage_gbps / 1e3
    return terms


def choose(constants: Constants, load: Load, most_sms: int) -> int:
    """Return the fewest SMs with which the call takes no more than 2 % longer than with any number. Local."""
    numbers = {n for n in (*SMS, most_sms) if n <= most_sms}
    us = {n: max(constants.host_us, sum(predict(constants, load, n).values())) for n in numbers}
    least = min(us.values())
    return min(n for n in us if us[n] <= SLACK * least)


class Plan:
    """How many SMs each call takes where nobody says: worked out when a Buffer is made, by the calls' sizes."""

    def __init__(
        self,
        found: dict[str, Constants],
        load: Callable[[str, int], Load],
        most_sms: dict[str, int],
        most_tokens: int,
    ) -> None:
        """`load` counts a call of a subject and so many tokens; both dicts are by subject."""
        sizes = [2**n - 1 for n in range(1, most_tokens.bit_length())] + [most_tokens]
        self._by_bits = {
            subject: [choose(c, load(subject, size), most_sms[subject]) for size in [0, *sizes]]
            for subject, c in found.items()
        }
        self.most = max((max(by_bits) for by_bits in self._by_bits.values()), default=1)

    def num_sms(self, subject: str, num_tokens: int) -> int | None:
        """Return the SMs of a call; None where nothing was measured. Local."""
        by_bits = self._by_bits.get(subject)
        return None if by_bits is None else by_bits[min(num_tokens.bit_length(), len(by_bits) - 1)]

    def says_only(self, usual: dict[str, int]) -> bool:
        """Whether every call takes what it would take anyway. Local."""
        return all(set(by_bits) == {usual[subject]} for subject, by_bits in self._by_bits.items())


def stored(subject: str, backend: str, num_ranks: int, num_nodes: int) -> Constants | None:
    """Find the constants that were measured here, or None. Local.

    Raises
    ------
    ArgumentError
        The file is not what `python -m epcy calibrate` writes.
    """
    names: dict[str, type] = dict.fromkeys(Constants.__dataclass_fields__, float)
    names |= {"usual_sms": int, "sizes_bytes": list, "gbps": list}
    later = {
        name: names.pop(name) for name in ("stage_gbps", "host_us")
    }  # files of an earlier version lack them
    key = measured.key_of(backend, num_ranks, num_nodes, subject)
    entry = measured.get("calibration", key, names, later)
    if entry is None:
        return None
    names |= {name: of for name, of in later.items() if name in entry}
    values: dict[str, Any] = {
        name: tuple(entry[name]) if of is list else entry[name] for name, of in names.items()
    }
    constants = Constants(**values)
    rates = (
        constants.sm_gbps,
        constants.most_gbps,
        constants.usual_sms,
        *constants.gbps,
        *constants.sizes_bytes,
    )
    positive = all(isinstance(rate, (int, float)) and rate > 0 for rate in rates)
    ascending = positive and list(constants.sizes_bytes) == sorted(set(constants.sizes_bytes))
    if not ascending or not len(constants.gbps) == len(constants.sizes_bytes) > 0:
        raise ArgumentError(
            f"EPCY_CACHE_DIR: calibration of {key!r}: expected positive rates of ascending sizes, got "
            f"{list(constants.gbps)} of {list(constants.sizes_bytes)}; run python -m epcy calibrate again"
        )
    return constants


def all_stored(backend: str, num_ranks: int, num_nodes: int) -> dict[str, Constants]:
    """Find what was measured here of every subject. Local; a Buffer asks when it is made.

    Raises
    ------
    ArgumentError
        The file is not what `python -m epcy calibrate` writes.
    """
    if not (measured.folder() / "calibration.json").exists():
        return {}
    found = {subject: stored(subject, backend, num_ranks, num_nodes) for subject in SUBJECTS}
    return {subject: constants for subject, constants in found.items() if constants is not None}


@dataclass(frozen=True)
class Explanation:
    """What a call of so many tokens moves, and how long that should take; see `Buffer.explain`.

    Attributes
    ----------
    operation : str
    load : Load
    floor_us : float
        What the bytes alone would take at the best rate: None without calibration.
    terms_us : dict of str to float
        Predicted time by term: "fixed", "lanes", "rows", "cast" for fp8 of the low-latency mode, and "stage" for a
        combine that copies first; between nodes "latency" and "network"; empty without calibration.
    measured_us : float or None
        Median of this Buffer's calls of the operation so far; None before the first.
    num_measured, mean_rows : int, float
        How many those are, and the rows that one sends on average: a token's for each rank that it goes to, in the
        low-latency mode for each expert.
    num_sms : int or None
        What the call has: SMs, threads of a rank on the host backend. None in the low-latency mode, which takes what
        its tokens fill.
    layout : str
        "rank" or "expert"; "slots" in the low-latency mode.
    host_us : float
        What the host takes of an eager call on a GPU, which therefore lasts no less; 0 on the host backend.
    nodes : epcy.links.Nodes or None
        Where the ranks are, when in several nodes; then there are the terms "latency" and "network", too.
    crossings : tuple of epcy.links.Crossing
        Of several nodes: what this rank sends over each kind of link, with the link's floor. The bytes between nodes
        are those that `stats().bytes_between_nodes` counts, on average over random routing.
    """

    operation: str
    load: Load
    floor_us: float | None
    terms_us: dict[str, float]
    measured_us: float | None
    num_measured: int
    mean_rows: float
    num_sms: int | None = None
    layout: str = "rank"
    host_us: float = 0.0
    nodes: links.Nodes | None = None
    crossings: tuple[links.Crossing, ...] = ()

    @property
    def predicted_us(self) -> float | None:
        return sum(self.terms_us.values()) if self.terms_us else None

    @property
    def eager_us(self) -> float | None:
        """The predicted time of a call that is no part of a CUDA graph."""
        return None if self.predicted_us is None else max(self.predicted_us, self.host_us)

    @property
    def dominant(self) -> str | None:
        """The term with the most time."""
        return max(self.terms_us, key=lambda term: self.terms_us[term]) if self.terms_us else None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON takes them. Local."""
        more = {"predicted_us": self.predicted_us, "eager_us": self.eager_us, "dominant": self.dominant}
        return asdict(self) | more

    def __str__(self) -> str:
        load = self.load
        sms = "" if self.num_sms is None else f", num_sms {self.num_sms}"
        how = f"{self.layout} layout{sms}" if self.layout != "slots" else "low-latency slots"
        where = ""
        if self.nodes is not None:
            path = "direct" if self.layout == "slots" else self.nodes.path
            where = f" of {self.nodes.num_nodes} nodes, {path}"
        lines = [
            f"{self.operation} of {load.num_tokens} tokens on {load.num_ranks} ranks{where}, random routing, {how}",
            f"  to each other rank {load.rows_to_peer:.1f} rows of {load.row_bytes} bytes: "
            f"{load.bytes_to_peer / 1e6:.3f} MB a link, {load.num_bytes / 1e6:.3f} MB moved with the rank's own",
        ]
        for one in self.crossings if self.nodes is not None else ():
            rate = f" at {one.gbps:.1f} GB/s ({one.source})" if one.gbps else ""
            floor = f": floor {one.floor_us:.1f} us{rate}" if one.floor_us is not None else ""
            lines.append(f"  {one.kind} {one.num_rows:.1f} rows, {one.num_bytes / 1e6:.3f} MB{floor}")
        if self.predicted_us is None:
            lines.append("  no prediction: run python -m epcy calibrate on as many ranks first")
        else:
            terms = "".join(f", {name} {us:.1f}" for name, us in self.terms_us.items())
            host = f"; eager no less than {self.host_us:.1f}, the host's" if self.host_us else ""
            floor = f"floor {self.floor_us:.1f}"
            lines.append(
                f"  predicted {self.predicted_us:.1f} us: {floor}{terms}; most is {self.dominant}{host}"
            )
        if self.measured_us is not None:
            times = f"{self.num_measured} calls of {self.mean_rows:.0f} rows on average"
            lines.append(f"  measured  {self.measured_us:.1f} us: median of {times}")
        return "\n".join(lines)


def explain(
    subject: str,
    load: Load,
    constants: Constants | None,
    num_sms: int | None,
    kernels: dict[str, Any],
    rows: Sequence[int],
    nodes: links.Nodes | None = None,
    network: links.Network | None = None,
) -> Explanation:
    """Put together what a Buffer knows: `kernels` and `rows` (sent, of all calls) as its stats have them. Local.

    `nodes` and `network`: where there are several nodes, in which case `load` was counted with them.
    """
    op, _, by_expert = subject.partition(" ")
    layout = by_expert or ("rank" if op in OPERATIONS[:2] else "slots")
    terms = {} if constants is None else predict(constants, load, num_sms)
    floor = None if constants is None else load.num_bytes / max(constants.gbps) / 1e3
    best = None if constants is None else max(constants.gbps)
    inside = load.rows_inside * load.row_bytes
    crossings = []
    if nodes is not None and network is not None:
        source = "calibrate, a node alone" if constants is not None else ""
        crossings.append(links.Crossing(nodes.inside, load.rows_inside, inside, floor, best, source))
        between = load.rows_between * load.row_bytes
        least = between / network.gbps / 1e3
        crossings.append(
            links.Crossing("network", load.rows_between, between, least, network.gbps, network.source)
        )
        if terms and floor is not None:
            floor = max(floor, least)
            terms["latency"] = network.latency_us * links.num_latencies(subject)
            terms["network"] = links.network_term_us(nodes, network, between, terms["rows"])
    times = kernels.get(op)
    counts = [kernels[name].count for name in OPERATIONS[::2] if name in kernels]
    mean = sum(rows) / sum(counts) if sum(counts) else 0.0
    us, num = (None, 0) if times is None else (times.p50_us, times.count)
    host_us = 0.0 if constants is None else constants.host_us
    return Explanation(
        op, load, floor, terms, us, num, mean, num_sms, layout, host_us, nodes, tuple(crossings)
    )
