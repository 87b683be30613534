"""The same calls on another number of ranks: tokens keep their order over all ranks, experts theirs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from epcy.errors import ArgumentError
from epcy.recording.calls import Array, Call, Recorded, Recording, smallest_type

__all__ = ["pieces", "room_of", "spread"]


def pieces(num_tokens: list[int], num_ranks: int) -> list[list[tuple[int, int, int]]]:
    """Say which tokens a rank of `num_ranks` takes over: (recorded rank, first, end), in order.

    Local. Token t of T on rank s of R lies at s + t / T of R; ranks share that line evenly.
    """
    recorded = len(num_tokens)
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]
    for rank, count in enumerate(num_tokens):
        for new in range(num_ranks):
            # the first t with (rank * count + t) * num_ranks // (recorded * count) >= new
            first, end = (
                min(max(-(-bound * recorded * count // num_ranks) - rank * count, 0), max(count, 0))
                for bound in (new, new + 1)
            )
            if first < end:
                found[new].append((rank, first, end))
    return found


def spread(recording: Recording, num_ranks: int) -> Recording:
    """Return the calls as `num_ranks` ranks make them, every Buffer over all of them; of as many ranks, unchanged.

    Local.

    Raises
    ------
    ArgumentError
        The experts of some Buffer do not divide among so many ranks.
    """
    for number, buffer in enumerate(recording.buffers):
        if buffer.options["num_experts"] % num_ranks:
            raise ArgumentError(
                f"ranks: expected a number that divides the {buffer.options['num_experts']} experts of Buffer "
                f"{number}, got {num_ranks}; it was recorded on {buffer.num_ranks}"
            )
    if all(buffer.num_ranks == num_ranks for buffer in recording.buffers):
        return replace(recording, num_ranks=num_ranks)
    routings: list[Array] = []
    payloads: list[Array] = []
    places: dict[tuple[Any, ...], int] = {}
    calls = [_call(recording, call, num_ranks, routings, payloads, places) for call in recording.calls]
    found = replace(
        recording,
        num_ranks=num_ranks,
        buffers=[Recorded(tuple(range(num_ranks)), dict(b.options)) for b in recording.buffers],
        calls=calls,
        routings=routings,
        payloads=payloads,
    )
    for number, buffer in enumerate(found.buffers):
        if recording.buffers[number].num_ranks != num_ranks:
            buffer.options |= room_of(found, number)
    for call in calls:
        if recording.buffers[call.buffer].num_ranks != num_ranks and call.args[0].get("num_worst_tokens"):
            most = found.buffers[call.buffer].options["num_max_recv_tokens"]
            call.args = [{**one, "num_worst_tokens": most} for one in call.args]
    return found


def _call(
    recording: Recording,
    call: Call,
    num_ranks: int,
    routings: list[Array],
    payloads: list[Array],
    places: dict[tuple[Any, ...], int],
) -> Call:
    size = recording.buffers[call.buffer].num_ranks
    if size == num_ranks:
        cut = [[(rank, 0, max(count, 0))] for rank, count in enumerate(call.num_tokens)]
    else:
        cut = pieces(call.num_tokens, num_ranks)

    def joined(into: list[Array], source: list[Array], old: list[int], what: str) -> list[int]:
        new = []
        for parts in cut:
            names = tuple((old[rank], first, end) for rank, first, end in parts if old[rank] >= 0)
            key = (what, names)
            if names and key not in places:
                places[key] = len(into)
                arrays = [source[place][first:end] for place, first, end in names]
                array = np.concatenate(arrays)
                into.append(array.astype(smallest_type(array)) if what == "routing" else array)
            new.append(places[key] if names else -1)
        return new

    # The rows of combine lie where the experts are.
    kept = {name: old for name, old in call.payload.items() if call.op != "combine" or size == num_ranks}
    first = min((start for start, _ in call.times_ns.tolist()), default=0)
    took = int(call.times_ns[:, 1].max(initial=-1))
    return replace(
        call,
        args=[call.args[0]] * num_ranks if size != num_ranks else call.args,
        num_tokens=[sum(end - start for _, start, end in parts) for parts in cut],
        routing=joined(routings, recording.routings, call.routing, "routing"),
        times_ns=call.times_ns if size == num_ranks else np.array([(first, took)] * num_ranks, np.int64),
        errors=call.errors if size == num_ranks else dict.fromkeys(range(num_ranks), next(iter(call.errors.values())))
        if call.errors else {},
        payload={name: joined(payloads, recording.payloads, old, "payload") for name, old in kept.items()},
    )  # fmt: skip


def room_of(recording: Recording, number: int) -> dict[str, int]:
    """Return the sizes that a Buffer needs for its calls: tokens, low-latency tokens, rows. Local."""
    options, num_ranks = recording.buffers[number].options, recording.buffers[number].num_ranks
    local = options["num_experts"] // num_ranks
    tokens = low_latency = rows = 1
    for call in recording.calls:
        if call.buffer != number or call.op not in ("dispatch", "low_latency_dispatch"):
            continue
        most = max(call.num_tokens)
        if call.op == "low_latency_dispatch":
            low_latency = max(low_latency, most)
            continue
        tokens = max(tokens, most)
        if call.refers is not None:
            continue
        into = np.zeros(num_ranks, np.int64)
        by_expert = call.args[0].get("layout") == "expert"
        for rank in range(num_ranks):
            idx = recording.routing_of(call, rank)
            owner = np.where((idx >= 0) & (idx < options["num_experts"]), idx // local, num_ranks)
            if by_expert:
                into += np.bincount(owner.reshape(-1), minlength=num_ranks + 1)[:num_ranks]
            else:
                into += np.array([(owner == r).any(1).sum() for r in range(num_ranks)])
        padding = local * ((call.args[0].get("expert_alignment") or 1) - 1) if by_expert else 0
        rows = max(rows, int(into.max()) + padding)
    found = {"num_max_tokens_per_rank": tokens, "num_max_recv_tokens": rows}
    if options["low_latency_mode"]:
        found["num_max_low_latency_tokens_per_rank"] = low_latency
        found["num_max_tokens_per_rank"] = max(tokens, low_latency)
    return found
