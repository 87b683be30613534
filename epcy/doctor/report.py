"""Running the doctor, on one process or on all ranks of a job, and showing what it found."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from epcy.doctor import checks, network, ranks
from epcy.doctor.facts import gather, launched
from epcy.doctor.finding import FAILURE, OK, WARNING, Facts, Finding

__all__ = ["SCHEMA", "examine", "main", "render", "status"]

SCHEMA = 1
TIMEOUT = 120.0  # s that a rank waits for the others: on a cold file system each takes its time to import


def examine(
    root: str | os.PathLike[str] = "/", environ: Mapping[str, str] | None = None
) -> tuple[list[Finding], list[Facts]]:
    """Look at this machine; under a launcher, at all ranks' machines.

    Collective over COMM_WORLD under a launcher (its variables tell), else local; blocking, some seconds. Only under
    a launcher MPI is started.

    Parameters
    ----------
    root : path
        Stands in for "/": where /sys, /proc and /dev are read.
    environ : mapping, optional
        Stands in for os.environ.

    Returns
    -------
    findings : list of Finding
        Equal on all ranks.
    facts : list of dict
        What each rank has read, by rank.

    Raises
    ------
    PeerTimeoutError
        A rank did not come.
    """
    facts = gather(root, environ)
    if facts["launch"] is None or facts["mpi"]["error"]:
        return _judge(facts), [facts]
    from mpi4py import MPI

    from epcy.backends import bootstrap

    facts["size"] = MPI.COMM_WORLD.size
    if facts["size"] == 1:
        return _judge(facts), [facts]
    comm = bootstrap.duplicate(MPI.COMM_WORLD, TIMEOUT, "epcy doctor")
    all_facts = bootstrap.allgather(comm, facts, TIMEOUT, "epcy doctor")
    comm.Free()
    first: dict[str, Facts] = {}
    for one in all_facts:  # what changes all the time is the same on a machine if it is read once
        one["shm"] = first.setdefault(one["host"], one)["shm"]
    found = ranks.merge([_judge(one) for one in all_facts])
    return [*found, *ranks.compare(all_facts)], all_facts


def _judge(facts: Facts) -> list[Finding]:
    return [*checks.judge(facts), *network.judge(facts)]


def render(findings: list[Finding], num_ranks: int = 1) -> str:
    """Return the report as text for a terminal. Local."""
    width = max(len(one.name) for one in findings)
    lines = []
    for one in findings:
        some = one.ranks and len(one.ranks) < num_ranks
        where = f" (rank{'s' if len(one.ranks) > 1 else ''} {', '.join(map(str, one.ranks))})" if some else ""
        lines.append(f"{one.state:<7}  {one.name:<{width}}  {one.text}{where}")
        if one.remedy:
            lines.append(f"{'':<7}  {'':<{width}}  -> {one.remedy}")
    counts = {state: sum(one.state == state for one in findings) for state in (OK, WARNING, FAILURE)}
    lines.append(", ".join(f"{number} {state}" for state, number in counts.items()))
    return "\n".join(lines) + "\n"


def as_json(findings: list[Finding], facts: list[Facts]) -> str:
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "num_ranks": len(facts),
        "findings": [vars(one) for one in findings],
        "facts": facts,
    }
    return json.dumps(content, indent=1) + "\n"


def status(findings: list[Finding], strict: bool = False) -> int:
    """Return the exit status: 1 where something fails, or with `strict` where something is not ok. Local."""
    bad = (FAILURE, WARNING) if strict else (FAILURE,)
    return int(any(one.state in bad for one in findings))


def main(json_wanted: bool, strict: bool, root: str = "/") -> int:
    """Examine, write one report, return the exit status; see `examine`."""
    findings, facts = examine(root)
    launch = launched(os.environ)
    # The launcher's count: ranks that are alone are all rank 0 of MPI's.
    if launch is None or launch["rank"] == 0:
        sys.stdout.write(as_json(findings, facts) if json_wanted else render(findings, len(facts)))
        sys.stdout.flush()
    return status(findings, strict)
