"""Findings of a job: what ranks see alike is told once, and what must not differ is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from epcy.doctor.finding import FAILURE, OK, WARNING, Facts, Finding

__all__ = ["compare", "merge"]

# What must be equal on all ranks: its name, where it is in the facts, how bad a difference is, what to do.
EQUAL: tuple[tuple[str, Callable[[Facts], Any], str, str], ...] = (
    ("epcy's version", lambda f: f["versions"]["epcy"], FAILURE, "install one version everywhere"),
    ("epcy's build", lambda f: f["build"].get("cuda") or "host backend alone", FAILURE, "install one build"),
    ("MPI library", lambda f: (f["mpi"]["library"] or "none").splitlines()[0], FAILURE, "use one library everywhere"),
    ("NVSHMEM's version", lambda f: _version(f["nvshmem"]), FAILURE, "install one version of NVSHMEM everywhere"),
    ("python", lambda f: f["versions"]["python"].rpartition(".")[0], WARNING, "use one environment everywhere"),
    ("driver", lambda f: (f["nvidia"] or {}).get("driver") or "none", WARNING, "update the older machines' driver"),
    ("number of GPUs", lambda f: len(f["cuda"]["gpus"]), WARNING, "give every rank's machine the same GPUs"),
    ("variables", lambda f: f["environ"], WARNING, "let the launcher pass EPCY_* and NVSHMEM_* on (-genvall, -x)"),
)  # fmt: skip
PER_RANK = ("EPCY_DEVICE", "EPCY_STATUS_DIR")


def _version(said: dict[str, Any]) -> str:
    return ".".join(map(str, said["version"])) if "version" in said else "none"


def merge(of_ranks: list[list[Finding]]) -> list[Finding]:
    """Join findings of ranks in the order of the first rank that has each; equal ones are one. Local."""
    ranks: dict[tuple[str, str, str, str], list[int]] = {}
    order: list[str] = []
    for rank, findings in enumerate(of_ranks):
        for one in findings:
            ranks.setdefault((one.name, one.state, one.text, one.remedy), []).append(rank)
            if one.name not in order:
                order.append(one.name)
    found = [Finding(*key, ranks=tuple(theirs)) for key, theirs in ranks.items()]
    return sorted(found, key=lambda one: (order.index(one.name), one.ranks))


def compare(all_facts: list[Facts]) -> Iterator[Finding]:
    """Compare what the ranks of a job have read. Local."""
    everybody = tuple(range(len(all_facts)))
    hosts = list(dict.fromkeys(facts["host"] for facts in all_facts))
    where = ", ".join(f"{sum(f['host'] == host for f in all_facts)} on {host}" for host in hosts[:8])
    more = f" and {len(hosts) - 8} more machines" if len(hosts) > 8 else ""
    if len(hosts) > 1:
        yield Finding(
            "ranks", WARNING, f"{len(all_facts)} ranks: {where}{more}; between machines only backend='host' works",
            "for nvshmem use sub-communicators of Split_type(COMM_TYPE_SHARED); see docs/nodes.md", everybody,
        )  # fmt: skip
    else:
        yield Finding("ranks", OK, f"{len(all_facts)} ranks: {where}{more}", ranks=everybody)
    alike = []
    for name, read, state, remedy in EQUAL:
        values = [read(facts) for facts in all_facts]
        if name == "variables":
            yield from _variables(values)
        elif all(value == values[0] for value in values):
            alike.append(name)
        else:
            groups: dict[str, list[int]] = {}
            for rank, value in enumerate(values):
                groups.setdefault(str(value), []).append(rank)
            text = "; ".join(f"{value} on {_some(theirs)}" for value, theirs in groups.items())
            yield Finding(name, state, text, remedy, everybody)
    if alike:
        yield Finding("equal on all ranks", OK, ", ".join(alike), ranks=everybody)
    for host in hosts:
        here = tuple(rank for rank, facts in enumerate(all_facts) if facts["host"] == host)
        num_gpus = len(all_facts[here[0]]["cuda"]["gpus"])
        if 0 < num_gpus < len(here):
            yield Finding(
                "GPU of each rank", WARNING, f"{len(here)} ranks share {num_gpus} GPUs on {host}",
                "start no more ranks than GPUs: kernels that wait for each other on one GPU are slow", here,
            )  # fmt: skip


def _variables(values: list[dict[str, str]]) -> Iterator[Finding]:
    """EPCY_* and NVSHMEM_* of all ranks."""
    remedy = EQUAL[-1][3]
    for name in sorted({name for one in values for name in one} - set(PER_RANK)):
        groups: dict[str, list[int]] = {}
        for rank, one in enumerate(values):
            groups.setdefault(one.get(name, "not set"), []).append(rank)
        if len(groups) > 1:
            text = "; ".join(f"{value} on {_some(theirs)}" for value, theirs in groups.items())
            yield Finding(name, WARNING, text, remedy, tuple(range(len(values))))


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
