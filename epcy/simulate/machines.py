"""Constants of machines, from data sheets and from our own measurements of two H200s; none is fitted to a table.

Measured on two H200s with 18 NVLinks between them, 30 November 2026, by a first experiment before the kernels of epcy
(plain loops of bulk copies, empty kernels, a ping-pong): see `SOURCES`. What only a NIC would tell was never measured
by us: its rate is the data sheet's less the headers of its packets, its latency a published one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite

from epcy.errors import ArgumentError
from epcy.model import Constants, Load

__all__ = [
    "LINE_BYTES",
    "LINE_DATA",
    "MACHINES",
    "SOURCES",
    "Machine",
    "calibrated",
    "constants_from",
    "machine_of",
]

LINE_BYTES, LINE_DATA = 128, 112  # of low-latency rows on NVLink: include/epcy/low_latency.h


@dataclass(frozen=True)
class Machine:
    """A GPU, the NVLink of its node, and its NIC. GB/s are of one direction.

    Attributes
    ----------
    name : str
    num_sms : int
        Of a GPU: what the low-latency mode may use.
    memory_bytes : int
        Of a GPU.
    push_gbps, pull_gbps : float
        Of a GPU's NVLink port, by stores of its own and by loads of the peers, all ranks at once.
    flag_us : float
        A word from one GPU of a node to another.
    sm_gbps : float
        What one SM takes from memory and puts into memory or onto a link.
    copy_gbps : float
        The same of all SMs together.
    nic_gbps, nic_us : float
        Of payload; a put with a signal, from its call until the signal is seen.
    message_ns : float
        What each row costs a NIC, however short.
    launch_us : float
        An empty kernel.
    count_us : float
        What a dispatch with a new routing takes longer, for 4096 tokens of 8 lanes.
    dispatch_us, combine_us : float
        A call of the low-latency mode with one token, in a CUDA graph.
    """

    name: str
    num_sms: int
    memory_bytes: int
    push_gbps: float
    pull_gbps: float
    flag_us: float
    sm_gbps: float
    copy_gbps: float
    nic_gbps: float
    nic_us: float
    message_ns: float
    launch_us: float
    count_us: float
    dispatch_us: float
    combine_us: float


SOURCES = {
    "push_gbps": "measured: both GPUs push by TMA at once, 24 blocks each: 350 GB/s (78 % of the data sheet's 450)",
    "pull_gbps": "measured: both GPUs pull by TMA at once: 334 GB/s (74 %)",
    "flag_us": "measured: half of a ping-pong through peer memory, 1.25 us",
    "sm_gbps": "measured: 8 blocks push 346 GB/s",
    "copy_gbps": "measured: local TMA copy, 132 blocks, bytes one way",
    "nic_gbps": "data sheet of ConnectX-7, 400 Gb/s; 98 % of it with packets of 4096 bytes and 82 of RoCE v2's headers",
    "nic_us": "arXiv 2511.15076 (GPU-initiated networking for NCCL): half of a round trip of put and signal, 16.7 us",
    "message_ns": "ConnectX-7: 330 million messages a second, not looked up in a data sheet; no row is so short",
    "launch_us": "measured: empty kernels, back to back, eager",
    "count_us": "measured: first experiment, dispatch uncached 178.9 us, cached 173.6 us",
    "dispatch_us": "measured: first experiment, low-latency dispatch of one token",
    "combine_us": "measured: first experiment, low-latency combine of one token",
}

H200 = Machine(
    name="h200", num_sms=132, memory_bytes=141 * 10**9, push_gbps=350.0, pull_gbps=334.0, flag_us=0.625,
    sm_gbps=346 / 8, copy_gbps=1956.0, nic_gbps=50 * 4096 / (4096 + 82), nic_us=16.7 / 2, message_ns=1e3 / 330,
    launch_us=4.9, count_us=178.9 - 173.6, dispatch_us=5.7, combine_us=4.2,
)  # fmt: skip
MACHINES = {
    "h200": H200,
    # The same die and NVLink; 80 GB of memory at 3.35 instead of 4.8 TB/s, which copies are taken to follow.
    "h100": replace(H200, name="h100", memory_bytes=80 * 10**9, copy_gbps=1956.0 * 3.35 / 4.8),
    # NVLink of 400 instead of 900 GB/s both ways together, used as well as the H200's.
    "h800": replace(
        H200, name="h800", memory_bytes=80 * 10**9, copy_gbps=1956.0 * 3.35 / 4.8, push_gbps=350.0 * 4 / 9,
        pull_gbps=334.0 * 4 / 9,
    ),
}  # fmt: skip


def machine_of(name: str, changes: Mapping[str, float] | None = None) -> Machine:
    """Return a machine by name, with some constants changed. Local.

    Raises
    ------
    ArgumentError
        No such machine or constant, or a value that is not positive.
    """
    if name not in MACHINES:
        raise ArgumentError(f"machine: expected one of {', '.join(MACHINES)}, got {name!r}")
    known = [field.name for field in fields(Machine) if field.name != "name"]
    for key, value in (changes or {}).items():
        if key not in known:
            raise ArgumentError(f"set: no constant {key!r}; expected one of {', '.join(known)}")
        if not isfinite(value) or value < 0 or value == 0 and key.endswith(("gbps", "sms", "bytes")):
            raise ArgumentError(f"set: {key}: expected a positive number, got {value:g}")
        if key in ("num_sms", "memory_bytes") and value != int(value):
            raise ArgumentError(f"set: {key}: expected a whole number, got {value:g}")
    whole = {key: int(v) if key in ("num_sms", "memory_bytes") else v for key, v in (changes or {}).items()}
    return replace(MACHINES[name], **whole)  # type: ignore[arg-type]


def calibrated(machine: Machine, found: Mapping[str, Constants], num_ranks: int) -> Machine:
    """Put what `python -m epcy calibrate` measured on `num_ranks` ranks of one node in place of constants. Local.

    The rates of dispatch and combine there are of all rows, those to the rank itself included: of R ranks a link
    carries (R - 1) / R.
    """
    share = (num_ranks - 1) / num_ranks
    changes: dict[str, float] = {}
    if "dispatch" in found:
        c = found["dispatch"]
        changes |= {"sm_gbps": c.sm_gbps, "push_gbps": c.most_gbps * share, "count_us": c.lane_ns * 32.768}
        changes["launch_us"] = max(0.0, c.fixed_us - 2 * machine.flag_us)
    if "combine" in found:
        changes["pull_gbps"] = found["combine"].most_gbps * share
    for op in ("dispatch", "combine"):
        if f"low_latency_{op}" in found:
            changes[f"{op}_us"] = found[f"low_latency_{op}"].fixed_us
    return replace(machine, **changes) if num_ranks > 1 else machine  # type: ignore[arg-type]


def constants_from(machine: Machine, subject: str, load: Load) -> Constants:
    """Return the constants that `python -m epcy calibrate` should find on one node of such machines. Local.

    Each rate is that of the slower of two: the link, which carries the rows of `load` that go to other ranks, and the
    memory of a GPU, which takes every row that is written once. In the expert layout that is a row for each lane: a
    token crosses once and is copied there. A combine of that layout, and of the low-latency mode, reads the rows of all
    lanes, which costs half a copy, and in the expert layout writes their sums before anything is pulled.
    """
    op, _, by_expert = subject.partition(" ")
    is_low_latency, is_combine = op.startswith("low_latency"), op.endswith("combine")
    port_gbps = machine.pull_gbps if op == "combine" else machine.push_gbps
    line_share = LINE_BYTES / LINE_DATA if is_low_latency else 1.0
    link = load.bytes_to_peer * (load.num_ranks - 1) * line_share / port_gbps
    memory = load.num_bytes / machine.copy_gbps
    if is_combine and is_low_latency:
        memory /= 2
    elif is_combine and by_expert:
        memory = (load.num_bytes + load.bytes_to_peer * load.num_ranks) / 2 / machine.copy_gbps
    took = link + memory if by_expert and is_combine else max(link, memory)
    fixed_us = machine.launch_us + 2 * machine.flag_us  # the words that ranks meet by, and the last one
    if is_low_latency:
        fixed_us = machine.combine_us if is_combine else machine.dispatch_us
    gbps = load.num_bytes / took
    return Constants(
        fixed_us=fixed_us,
        lane_ns=machine.count_us / 32.768 if op == "dispatch" else 0.0,
        element_ps=0.0,
        wake_us=0.0,
        usual_sms=24,
        sm_gbps=machine.sm_gbps,
        most_gbps=gbps,
        sizes_bytes=(load.most_bytes,),
        gbps=(gbps,),
        # Rows of other ranks alone are staged.
        stage_gbps=machine.copy_gbps * load.num_ranks / max(1, load.num_ranks - 1)
        if op == "combine"
        else 0.0,
    )
