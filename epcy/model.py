"""How long a call should take: a few measured constants, and the bytes and rows that follow from a shape.

    time = fixed + lanes * lane + bytes of rows / rate

`fixed` is a call without tokens: launch, the exchange of counts, one-way latencies. The rate falls when the bytes no
longer fit the caches, so there are two of them and what is between is on a line. Routing is taken for random: a token's
K experts are distinct, all equally likely.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import comb
from typing import Any

from epcy import measured
from epcy.errors import ArgumentError

__all__ = ["Constants", "Explanation", "Load", "load_of", "predict", "stored"]

OPERATIONS = ("dispatch", "combine")


@dataclass(frozen=True)
class Constants:
    """What `python -m epcy calibrate` measures of one operation on one machine and topology."""

    fixed_us: float
    lane_ns: float  # for each lane of a token of this rank: count it, write its id and weight
    small_gbps: float  # row bytes moved a rank, those to itself included, where they stay in caches
    large_gbps: float  # where they do not
    small_bytes: float  # up to here the first rate counts
    large_bytes: float  # from here on the second


@dataclass(frozen=True)
class Load:
    """What a call of one rank moves, on average."""

    num_tokens: int
    num_lanes: int
    rows_to_peer: float  # to each other rank
    row_bytes: int
    num_ranks: int

    @property
    def bytes_to_peer(self) -> float:
        return self.rows_to_peer * self.row_bytes

    @property
    def num_bytes(self) -> float:
        """Of all rows, those that stay included."""
        return self.bytes_to_peer * self.num_ranks


def load_of(num_tokens: int, num_ranks: int, num_experts: int, num_topk: int, row_bytes: int) -> Load:
    """Count what random routing moves. Local."""
    local, lanes = num_experts // num_ranks, min(num_topk, num_experts)
    missed = comb(num_experts - local, lanes) / comb(num_experts, lanes)  # no lane of a token at a rank
    return Load(num_tokens, num_tokens * num_topk, num_tokens * (1 - missed), row_bytes, num_ranks)


def rate_gbps(constants: Constants, num_bytes: float) -> float:
    """Return the rate at which so many bytes move. Local."""
    c = constants
    if num_bytes <= c.small_bytes:
        return c.small_gbps
    if num_bytes >= c.large_bytes:
        return c.large_gbps
    share = (num_bytes - c.small_bytes) / (c.large_bytes - c.small_bytes)
    return c.small_gbps + share * (c.large_gbps - c.small_gbps)


def predict(constants: Constants, load: Load) -> dict[str, float]:
    """Return microseconds by term. Local."""
    return {
        "fixed": constants.fixed_us,
        "lanes": load.num_lanes * constants.lane_ns / 1e3,
        "rows": load.num_bytes / rate_gbps(constants, load.num_bytes) / 1e3 if load.num_bytes else 0.0,
    }


def stored(operation: str, backend: str, num_ranks: int, num_nodes: int) -> Constants | None:
    """Find the constants that were measured here, or None. Local.

    Raises
    ------
    ArgumentError
        The file is not what `python -m epcy calibrate` writes.
    """
    names: dict[str, type] = dict.fromkeys(Constants.__dataclass_fields__, float)
    key = measured.key_of(backend, num_ranks, num_nodes, operation)
    entry = measured.get("calibration", key, names)
    if entry is None:
        return None
    constants = Constants(**{name: float(entry[name]) for name in names})
    if min(constants.small_gbps, constants.large_gbps) <= 0:
        raise ArgumentError(
            f"EPCY_CACHE_DIR: calibration of {key!r}: expected positive rates, got {constants.small_gbps} and "
            f"{constants.large_gbps}; run python -m epcy calibrate again"
        )
    return constants


@dataclass(frozen=True)
class Explanation:
    """What a call of so many tokens moves, and how long that should take; see `Buffer.explain`.

    Attributes
    ----------
    operation : str
    load : Load
    floor_us : float
        What the bytes alone would take at the large rate: None without calibration.
    terms_us : dict of str to float
        Predicted time by term: "fixed", "lanes", "rows"; empty without calibration.
    measured_us : float or None
        Median of this Buffer's calls of the operation so far; None before the first.
    num_measured, mean_rows : int, float
        How many those are, and the rows that one sends on average: a token's for each rank that it goes to.
    """

    operation: str
    load: Load
    floor_us: float | None
    terms_us: dict[str, float]
    measured_us: float | None
    num_measured: int
    mean_rows: float

    @property
    def predicted_us(self) -> float | None:
        return sum(self.terms_us.values()) if self.terms_us else None

    @property
    def dominant(self) -> str | None:
        """The term with the most time."""
        return max(self.terms_us, key=lambda term: self.terms_us[term]) if self.terms_us else None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON takes them. Local."""
        return {**asdict(self), "predicted_us": self.predicted_us, "dominant": self.dominant}

    def __str__(self) -> str:
        load = self.load
        lines = [
            f"{self.operation} of {load.num_tokens} tokens on {load.num_ranks} ranks, random routing",
            f"  to each other rank {load.rows_to_peer:.1f} rows of {load.row_bytes} bytes: "
            f"{load.bytes_to_peer / 1e6:.3f} MB a link, {load.num_bytes / 1e6:.3f} MB with the rank's own",
        ]
        if self.predicted_us is None:
            lines.append("  no prediction: run python -m epcy calibrate on as many ranks first")
        else:
            terms = "".join(f", {name} {us:.1f}" for name, us in self.terms_us.items())
            lines.append(
                f"  predicted {self.predicted_us:.1f} us: floor {self.floor_us:.1f}{terms}; most is {self.dominant}"
            )
        if self.measured_us is not None:
            times = f"{self.num_measured} calls of {self.mean_rows:.0f} rows on average"
            lines.append(f"  measured  {self.measured_us:.1f} us: median of {times}")
        return "\n".join(lines)
