"""`python -m epcy simulate`: predictions and tables for a reader, or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from epcy.command_line import whole
from epcy.errors import ArgumentError
from epcy.model import Constants
from epcy.simulate.footprint import Footprint, footprints
from epcy.simulate.machines import MACHINES, SOURCES, Machine, calibrated, machine_of
from epcy.simulate.paths import PATHS
from epcy.simulate.predict import Prediction, Workload, routing_of, simulate

__all__ = ["add_arguments", "main"]

HT, LL = ("dispatch", "combine"), ("low_latency_dispatch", "low_latency_combine")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    for flag, default, text in (
        ("--nodes", 1, "nodes"),
        ("--gpus-per-node", 8, "GPUs of a node, each with a rank and a NIC"),
        ("--tokens", 4096, "tokens a rank, high throughput"),
        ("--ll-tokens", 128, "tokens a rank, low latency"),
        ("--hidden", 7168, "elements of a token"),
        ("--experts", 256, "experts of all ranks"),
        ("--topk", 8, "experts of a token"),
        ("--num-sms", 24, "SMs of a high-throughput call"),
        ("--qps", 2, "queue pairs to each other rank, for --footprint"),
        ("--seed", 0, "of the routing"),
    ):
        least = 0 if flag == "--seed" else 1
        command.add_argument(
            flag, type=whole(least), default=default, metavar="N", help=f"{text} (%(default)s)"
        )
    command.add_argument(
        "--mode", choices=("ht", "ll", "both"), default="both", help="which operations (%(default)s)"
    )
    command.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32", "fp8"), default="bf16",
        help="of dispatched rows (%(default)s); fp8 has scales and comes back as bf16",
    )  # fmt: skip
    command.add_argument(
        "--path", choices=("auto", *PATHS), default="auto",
        help="auto: hierarchical between nodes in high throughput, else direct; expert: a copy for each lane",
    )  # fmt: skip
    command.add_argument(
        "--routing", default="random", metavar="FILE",
        help="a recording (epcy.record), whose first dispatch gives tokens, experts and lanes, instead of random",
    )  # fmt: skip
    command.add_argument(
        "--groups", type=whole(1), metavar="N", help="a token's experts lie on at most N nodes"
    )
    command.add_argument(
        "--cached", action="store_true", help="the routing of dispatch is known: nothing is counted"
    )
    command.add_argument("--machine", choices=tuple(MACHINES), default="h200", help="constants (%(default)s)")
    command.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="another value of a constant"
    )
    command.add_argument(
        "--calibration", metavar="FILE",
        help="the calibration.json of `python -m epcy calibrate`: its constants of one node's GPUs instead",
    )  # fmt: skip
    command.add_argument(
        "--constants", action="store_true", help="print the constants and where they are from"
    )
    command.add_argument(
        "--footprint", action="store_true", help="memory and queue pairs of 2 to 2048 ranks instead"
    )
    command.add_argument("--json", action="store_true", help="print JSON")


def main(arguments: argparse.Namespace) -> int:
    """Predict, and print it.

    Raises
    ------
    ArgumentError
    """
    machine = _machine(arguments)
    if arguments.constants:
        _print(asdict(machine), arguments.json, _constants_text(machine))
        return 0
    if arguments.footprint:
        found = footprints(
            gpus_per_node=arguments.gpus_per_node, num_tokens=arguments.tokens, hidden=arguments.hidden,
            num_experts=arguments.experts, num_topk=arguments.topk, num_low_latency_tokens=arguments.ll_tokens,
            num_qps_per_rank=arguments.qps,
        )  # fmt: skip
        _print([one.as_dict() for one in found], arguments.json, _footprint_text(found, machine))
        return 0
    works, predictions, sizes = [], [], (0, 0)
    for mode, operations, tokens in (
        ("ht", HT, arguments.tokens),
        ("ll", LL, arguments.ll_tokens),
    ):
        if arguments.mode not in (mode, "both"):
            continue
        work = _work(arguments, mode, tokens)
        works.append(work)
        ids = routing_of(work, mode == "ll")
        sizes = ids[1], int(ids[0][0].shape[1])  # a recording has its own
        predictions += [simulate(operation, work, machine, ids) for operation in operations]
    content = {
        "machine": asdict(machine),
        "workloads": [asdict(work) for work in works],
        "predictions": [one.as_dict() for one in predictions],
    }
    _print(content, arguments.json, _text(works, sizes, machine, predictions))
    return 0


def _print(content: Any, as_json: bool, text: str) -> None:
    sys.stdout.write(json.dumps(content, indent=2) + "\n" if as_json else text)


def _work(arguments: argparse.Namespace, mode: str, tokens: int) -> Workload:
    path = arguments.path
    if path == "auto" or path == "hierarchical" and mode == "ll" and arguments.mode == "both":
        path = "hierarchical" if mode == "ht" and arguments.nodes > 1 else "direct"
    return Workload(
        arguments.nodes, arguments.gpus_per_node, tokens, arguments.hidden, arguments.experts, arguments.topk,
        arguments.dtype, path, arguments.num_sms, arguments.cached, arguments.routing, arguments.groups,
        arguments.seed,
    )  # fmt: skip


def _machine(arguments: argparse.Namespace) -> Machine:
    changes = {}
    for given in arguments.set:
        name, _, value = given.partition("=")
        try:
            changes[name] = float(value)
        except ValueError:
            raise ArgumentError(
                f"set: expected NAME=VALUE with a number, such as nic_gbps=25, got {given!r}"
            ) from None
    machine = machine_of(arguments.machine)
    if arguments.calibration:
        machine = _calibrated(machine, Path(arguments.calibration))
    given_ones = machine_of(arguments.machine, changes)
    return replace(machine, **{name: getattr(given_ones, name) for name in changes})


def _calibrated(machine: Machine, path: Path) -> Machine:
    """Take the entries of the nvshmem backend on one node with the most ranks out of a calibration file."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["entries"]
        by_ranks: dict[int, dict[str, Constants]] = {}
        for key, entry in entries.items():
            backend, _, _, ranks, nodes, subject = key.split(" | ")
            if backend == "nvshmem" and nodes == "1 nodes":
                of = {**entry, "sizes_bytes": tuple(entry["sizes_bytes"]), "gbps": tuple(entry["gbps"])}
                by_ranks.setdefault(int(ranks.split()[0]), {})[subject] = Constants(**of)
    except OSError as error:
        raise ArgumentError(f"calibration: {str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"calibration: {str(path)!r} is not what python -m epcy calibrate writes ({error})"
        ) from None
    if not by_ranks or max(by_ranks) < 2:
        raise ArgumentError(
            f"calibration: {str(path)!r} has nothing of the nvshmem backend on several ranks of one node"
        )
    return calibrated(machine, by_ranks[max(by_ranks)], max(by_ranks))


def _constants_text(machine: Machine) -> str:
    lines = [f"{machine.name}; GB/s of one direction"]
    for name, value in asdict(machine).items():
        if name != "name":
            lines.append(f"  {name:<14}{value:>14.6g}  {SOURCES.get(name, '')}".rstrip())
    return "\n".join(lines) + "\n"


def _text(
    works: list[Workload], sizes: tuple[int, int], machine: Machine, predictions: list[Prediction]
) -> str:
    first = works[0]
    routing = first.routing
    if routing == "random" and first.num_groups is not None:
        routing = f"random on at most {first.num_groups} nodes"
    lines = [
        f"{first.num_ranks} ranks on {first.num_nodes} nodes of {first.gpus_per_node} {machine.name}; "
        f"H {first.hidden}, K {sizes[1]}, E {sizes[0]}, {first.dtype}, {routing} routing, "
        f"seed {first.seed}",
        f"  {'':<22}{'tokens':>7}  {'path':<13}{'us':>9}{'floor':>9}{'fixed':>7}  {'most busy':<15}"
        f"{'NIC MB':>8}{'NVL MB':>8}{'NIC GB/s':>9}",
    ]
    tokens = {
        name: w.num_tokens
        for w, names in zip(works, _names(works, predictions), strict=True)
        for name in names
    }
    for one in predictions:
        busy = f"{one.bottleneck} {one.busy[one.bottleneck]:.0%}"
        nic, nvlink = (part / first.num_ranks / 1e6 for part in (one.nic_bytes, one.nvlink_bytes))
        shown = tokens[one.operation] if first.routing == "random" else "file"
        lines.append(
            f"  {one.operation:<22}{shown:>7}  {one.path:<13}{one.us:>9.1f}{one.floor_us:>9.1f}{one.fixed_us:>7.1f}  "
            f"{busy:<15}{nic:>8.2f}{nvlink:>8.2f}{nic / one.us * 1e3:>9.1f}"
        )
    return (
        "\n".join(lines)
        + "\n  MB and GB/s: sent by a rank, on average; floor: the busiest server without any wait\n"
    )


def _names(works: list[Workload], predictions: list[Prediction]) -> list[list[str]]:
    each = len(predictions) // len(works)
    return [[one.operation for one in predictions[at * each : (at + 1) * each]] for at in range(len(works))]


def _footprint_text(found: list[Footprint], machine: Machine) -> str:
    lines = [
        f"{'ranks':>6}{'experts':>9}{'control':>10}{'receive':>10}{'combine':>10}{'low lat.':>10}{'total':>10}"
        f"{'bounded':>10}{'QPs':>7}{'of rail':>9}{'queues':>9}   GB, of a {machine.name}'s "
        f"{machine.memory_bytes / 1e9:.0f}"
    ]
    for one in found:
        sizes = one.control, one.receive, one.combine, one.low_latency, one.total, one.bounded_total
        lines.append(
            f"{one.num_ranks:>6}{one.num_experts:>9}"
            + "".join(f"{size / 1e9:>10.3f}" for size in sizes)
            + f"{one.num_qps:>7}{one.num_used_qps:>9}{one.qp_bytes / 1e9:>9.3f}"
            + ("   does not fit" if one.total > machine.memory_bytes else "")
            + (", bounded neither" if one.bounded_total > machine.memory_bytes else "")
        )
    return "\n".join(lines) + "\n"
