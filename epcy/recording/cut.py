"""Recordings with something taken out: the steps of shrinking one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from epcy.recording.calls import Array, Call, Recording
from epcy.recording.checks import ROUTED

__all__ = ["compact", "keep_calls", "with_arguments", "with_hidden", "without_lane", "with_tokens"]


def keep_calls(recording: Recording, numbers: Collection[int]) -> Recording:
    """Return the recording with these calls alone, less those whose handle is gone. Local."""
    kept: dict[int, int] = {}
    calls: list[Call] = []
    for number, call in enumerate(recording.calls):
        if number in numbers and (call.refers is None or call.refers in kept):
            kept[number] = len(calls)
            calls.append(replace(call, refers=None if call.refers is None else kept[call.refers]))
    return compact(replace(recording, calls=calls))


def compact(recording: Recording) -> Recording:
    """Return the recording without Buffers, routings and payloads that no call names. Local."""
    used = sorted({call.buffer for call in recording.calls})
    routings: list[Array] = []
    payloads: list[Array] = []
    places: dict[tuple[str, int], int] = {}

    def moved(what: str, source: list[Array], into: list[Array], old: list[int]) -> list[int]:
        for place in old:
            if place >= 0 and (what, place) not in places:
                places[what, place] = len(into)
                into.append(source[place])
        return [places[what, place] if place >= 0 else -1 for place in old]

    calls = [
        replace(
            call,
            buffer=used.index(call.buffer),
            routing=moved("routing", recording.routings, routings, call.routing),
            payload={n: moved("payload", recording.payloads, payloads, old) for n, old in call.payload.items()},
        )
        for call in recording.calls
    ]  # fmt: skip
    buffers = [recording.buffers[number] for number in used]
    return replace(recording, buffers=buffers, calls=calls, routings=routings, payloads=payloads)


def _family(recording: Recording, root: int) -> list[int]:
    """Return the calls that use the routing of a dispatch, itself first."""
    found = [root]
    for number, call in enumerate(recording.calls):
        if call.refers in found and number not in found:
            found.append(number)
    return found


def with_tokens(recording: Recording, root: int, rank: int, tokens: Sequence[int]) -> Recording:
    """Return the recording where a rank gives these of its tokens alone to a dispatch, and to those with its handle.

    Local.
    """
    calls, routings, payloads = list(recording.calls), list(recording.routings), list(recording.payloads)
    for number in _family(recording, root):
        call = calls[number]
        payload = {}
        for name, places in call.payload.items():
            if call.op == "combine":  # rows that lie elsewhere now
                continue
            payload[name] = list(places)
            if places[rank] >= 0:
                payload[name][rank] = len(payloads)
                payloads.append(payloads[places[rank]][list(tokens)])
        num_tokens, routing = list(call.num_tokens), list(call.routing)
        if call.op in ROUTED:
            num_tokens[rank] = len(tokens)
            if routing[rank] >= 0:
                routing[rank] = len(routings)
                routings.append(routings[call.routing[rank]][list(tokens)])
        calls[number] = replace(call, num_tokens=num_tokens, routing=routing, payload=payload)
    return compact(replace(recording, calls=calls, routings=routings, payloads=payloads))


def without_lane(recording: Recording, root: int, lane: int) -> Recording:
    """Return the recording where a dispatch leaves a lane unused on all ranks. Local."""
    call = recording.calls[root]
    routings, routing = list(recording.routings), list(call.routing)
    for rank, place in enumerate(call.routing):
        if place >= 0:
            routing[rank] = len(routings)
            changed = recording.routings[place].copy()
            changed[:, lane] = -1
            routings.append(changed)
    calls: list[Call] = list(recording.calls)
    calls[root] = replace(call, routing=routing)
    return compact(replace(recording, calls=calls, routings=routings))


def with_hidden(recording: Recording, hidden: int) -> Recording:
    """Return the recording with shorter tokens, and without payload, which has the old length. Local."""
    buffers = [
        replace(b, options={**b.options, "hidden": min(hidden, b.options["hidden"])})
        for b in recording.buffers
    ]
    calls = [replace(call, payload={}) for call in recording.calls]
    return compact(replace(recording, buffers=buffers, calls=calls, payloads=[]))


def with_arguments(recording: Recording, number: int, changes: dict[str, Any]) -> Recording:
    """Return the recording with other arguments of a call. Local."""
    calls = list(recording.calls)
    calls[number] = replace(calls[number], args=[{**args, **changes} for args in calls[number].args])
    return replace(recording, calls=calls)
