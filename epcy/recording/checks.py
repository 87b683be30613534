"""Is it the header of a recording? Every value that `epcy.recording` takes from a file is looked at here."""

from __future__ import annotations

import json
from typing import Any

from epcy.errors import ArgumentError
from epcy.options import BY_NAME, DTYPES, resolve

__all__ = ["OPERATIONS", "REFERRING", "ROUTED", "Wrong", "header_of", "known_options"]

ROUTED = ("dispatch", "low_latency_dispatch")
REFERRING = ("combine", "low_latency_combine", "hook")  # to a dispatch; a hook to the call that it receives
OPERATIONS = (*ROUTED, *REFERRING, "barrier")
PLACES = ("device", "status_dir")  # options that mean something on one machine alone
MOST_RANKS = 1 << 16
# The arguments of each operation that is recorded: what kind of value, and which.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "dispatch": {
        "dtype": (*DTYPES, "fp8"), "has_weights": bool, "layout": ("rank", "expert", None), "expert_alignment": int,
        "num_worst_tokens": int, "num_sms": int, "own_output": bool,
    },
    "combine": {"dtype": DTYPES, "has_weights": bool, "num_biases": int, "num_sms": int},
    "low_latency_dispatch": {
        "dtype": DTYPES, "has_weights": bool, "use_fp8": bool, "round_scale": bool, "use_ue8m0": bool, "has_hook": bool,
    },
    "low_latency_combine": {
        "dtype": DTYPES, "has_weights": bool, "reduction": ("rank", "source"), "zero_copy": bool, "use_logfmt": bool,
        "has_hook": bool,
    },
    "hook": {},
    "barrier": {},
}  # fmt: skip
OPTIONAL = ("layout", "expert_alignment", "num_sms")  # None: not given


class Wrong(Exception):
    """Where a file is not what it should be."""


def _is(value: Any, kind: Any) -> bool:
    if isinstance(kind, tuple):
        return any(value is one or isinstance(value, str) and value == one for one in kind)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and -1 <= value < 2**62
    return isinstance(value, kind)


def _want(value: Any, kind: Any, where: str) -> Any:
    if not _is(value, kind):
        name = f"one of {kind}" if isinstance(kind, tuple) else kind.__name__
        raise Wrong(f"{where}: expected {name}, got {value!r:.80}")
    return value


def _list(value: Any, kind: Any, where: str, length: int | None = None) -> list[Any]:
    _want(value, list, where)
    if length is not None and len(value) != length:
        raise Wrong(f"{where}: expected {length} entries, got {len(value)}")
    for number, one in enumerate(value):
        _want(one, kind, f"{where}[{number}]")
    return list(value)


def header_of(data: Any, version: int) -> dict[str, Any]:
    """Return the header that an array of bytes holds. Local.

    Raises
    ------
    Wrong
    """
    try:
        header = json.loads(data.tobytes().decode())
    except (ValueError, RecursionError) as error:
        raise Wrong(f"header: no JSON ({str(error):.200})") from None
    if not isinstance(header, dict):
        raise Wrong(f"header: expected an object, got {header!r:.80}")
    if header.get("format") != "epcy recording":
        raise Wrong(f"header: expected the format 'epcy recording', got {header.get('format')!r:.80}")
    if header.get("version") != version:
        raise Wrong(
            f"header: expected version {version}, got {header.get('version')!r:.80}; record it again, or use the epcy "
            f"that wrote it ({header.get('epcy')!r:.80})"
        )
    for name, kind in (
        ("epcy", str), ("date", str), ("num_ranks", int), ("backend", ("host", "nvshmem")), ("num_dropped", int),
        ("buffers", list), ("calls", list), ("payloads", list),
    ):  # fmt: skip
        _want(header.get(name), kind, name)
    if not 1 <= header["num_ranks"] <= MOST_RANKS:
        raise Wrong(f"num_ranks: expected 1 to {MOST_RANKS}, got {header['num_ranks']}")
    for number, one in enumerate(header["buffers"]):
        _buffer(one, f"buffers[{number}]", header["num_ranks"])
    for number, one in enumerate(header["payloads"]):
        _want(one, dict, f"payloads[{number}]")
        _want(one.get("dtype"), ("|u1", "<u2", "<u4", "<f2", "<f4"), f"payloads[{number}].dtype")
        if any(length < 0 for length in _list(one.get("shape"), int, f"payloads[{number}].shape")):
            raise Wrong(f"payloads[{number}].shape: expected no negative length, got {one['shape']!r:.80}")
    for number, one in enumerate(header["calls"]):
        _call(one, number, header)
    return header


def _buffer(said: Any, where: str, num_ranks: int) -> None:
    _want(said, dict, where)
    ranks = _list(said.get("ranks"), int, f"{where}.ranks")
    if not ranks or not all(-1 <= rank < num_ranks for rank in ranks) or len(ranks) > num_ranks:
        raise Wrong(f"{where}.ranks: expected ranks of {num_ranks}, got {ranks!r:.80}")
    _want(said.get("options"), dict, f"{where}.options")
    options = known_options(said["options"])
    if options["num_experts"] % len(ranks):
        raise Wrong(f"{where}: {options['num_experts']} experts on {len(ranks)} ranks")


def known_options(said: dict[str, Any]) -> dict[str, Any]:
    """Return options as a Buffer takes them; what this version does not know is left out. Local.

    Raises
    ------
    Wrong
    """
    given = {name: value for name, value in said.items() if name in BY_NAME and name not in PLACES}
    try:
        return {name: value.value for name, value in resolve(given, {}).items() if name not in PLACES}
    except ArgumentError as error:
        raise Wrong(f"options: {str(error):.300}") from None


def _call(said: Any, number: int, header: dict[str, Any]) -> None:
    where = f"calls[{number}]"
    _want(said, dict, where)
    op = _want(said.get("op"), OPERATIONS, f"{where}.op")
    buffers = header["buffers"]
    if not 0 <= _want(said.get("buffer"), int, f"{where}.buffer") < len(buffers):
        raise Wrong(f"{where}.buffer: expected one of {len(buffers)}, got {said['buffer']}")
    if _want(said.get("at"), int, f"{where}.at") < 0:
        raise Wrong(f"{where}.at: expected 0 or more, got {said['at']}")
    size = len(buffers[said["buffer"]]["ranks"])
    args = _list(said.get("args"), dict, f"{where}.args")
    if len(args) not in (1, size):
        raise Wrong(f"{where}.args: expected 1 or {size} entries, got {len(args)}")
    for one in args:
        _arguments(one, op, f"{where}.args")
    _list(said.get("tokens"), int, f"{where}.tokens", size)
    routing = _list(said.get("routing"), int, f"{where}.routing", size)
    refers = said.get("refers")
    if op in REFERRING or refers is not None:
        if op == "barrier" or not 0 <= _want(refers, int, f"{where}.refers") < number:
            raise Wrong(f"{where}.refers: expected an earlier call than {number}, got {refers}")
        other = header["calls"][refers]
        fitting = {
            "dispatch": ("dispatch",), "combine": ("dispatch",), "low_latency_combine": ("low_latency_dispatch",),
            "hook": ("low_latency_dispatch", "low_latency_combine"),
        }.get(op, ())  # fmt: skip
        if other["op"] not in fitting or other["buffer"] != said["buffer"]:
            raise Wrong(f"{where}.refers: call {refers} is a {other['op']} of Buffer {other['buffer']}")
    if any(place >= 0 for place in routing) and (op not in ROUTED or refers is not None):
        raise Wrong(f"{where}.routing: a {op} has none of its own")
    for rank, text in _want(said.get("errors", {}), dict, f"{where}.errors").items():
        if not (rank.isascii() and rank.isdigit() and len(rank) < 8 and int(rank) < size):
            raise Wrong(f"{where}.errors: expected ranks below {size}, got {rank!r:.80}")
        _want(text, str, f"{where}.errors[{rank}]")
    for name, places in _want(said.get("payload", {}), dict, f"{where}.payload").items():
        _want(name, ("x", "scales", "topk_weights"), f"{where}.payload")
        _list(places, int, f"{where}.payload.{name}", size)


def _arguments(said: dict[str, Any], op: str, where: str) -> None:
    kinds = ARGUMENTS[op]
    for name in said:
        if name not in kinds:
            raise Wrong(f"{where}: a {op} has no {name!r:.80}")
    for name, kind in kinds.items():
        if not (said.get(name) is None and name in OPTIONAL):
            _want(said.get(name), kind, f"{where}.{name}")
