"""The options of a Buffer: one table that the constructor, the environment, the docs and `python -m epcy` read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from epcy.errors import ArgumentError

__all__ = ["DTYPES", "OPTIONS", "Option", "Value", "resolve"]

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Option:
    """One option of `epcy.Buffer`.

    `env` is the variable that stands in where the argument is not given ("" for none); `compared` says whether the
    ranks must agree; `minimum` and `choices` bound the value; `default` None with `required` False means computed.
    """

    name: str
    kind: str  # "int", "float", "bool", "str" or "choice"
    help: str
    default: Any = None
    required: bool = False
    env: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    compared: bool = True


@dataclass(frozen=True)
class Value:
    """An option's value and where it came from: "argument", the name of a variable, or "default"."""

    value: Any
    origin: str


OPTIONS: tuple[Option, ...] = (
    Option("num_max_tokens_per_rank", "int", "The most tokens that one rank dispatches in one call (M).",
           required=True, minimum=0, maximum=2**31 - 1),
    Option("hidden", "int", "Elements of a token (H). A row must be a multiple of 16 bytes.",
           required=True, minimum=1, maximum=2**31 - 1),
    Option("num_experts", "int", "Experts over all ranks (E), a multiple of the number of ranks; expert e lives on "
           "rank e // (E / R).", required=True, minimum=1, maximum=2**31 - 1),
    Option("num_topk", "int", "Lanes of a token (K): the experts it may go to.", required=True, minimum=1,
           maximum=1024),
    Option("dtype", "choice", "The widest payload that the Buffer carries; it sizes the rows. Narrower payloads "
           "(fp8 pairs too) may be sent as well.", default="bfloat16", choices=DTYPES),
    Option("backend", "choice", "What moves the tokens; by default nvshmem where it works, else host.",
           env="EPCY_BACKEND", choices=("host", "nvshmem")),
    Option("num_max_recv_tokens", "int", "Rows of one receive area. By default enough for every token of every rank "
           "in the rank layout (R * M), and for twice a balanced load (2 * M * K, never more than R * M * min(K, L)) "
           "plus padding (128 * L) in the expert layout. More rows than this in one call are a CapacityError.",
           env="EPCY_NUM_MAX_RECV_TOKENS", minimum=1, maximum=2**40),
    Option("low_latency_mode", "bool", "Take memory for the low-latency calls (decoding).", default=False,
           env="EPCY_LOW_LATENCY_MODE"),
    Option("num_max_low_latency_tokens_per_rank", "int", "The most tokens that one rank dispatches in one low-latency "
           "call (M'); a low-latency area holds R * M' rows for each local expert. By default M, at most 256.",
           env="EPCY_NUM_MAX_LOW_LATENCY_TOKENS_PER_RANK", minimum=1, maximum=2**24),
    Option("allow_nvlink_for_low_latency_mode", "bool", "Let low-latency calls move data over NVLink by "
           "plain stores; otherwise everything goes by NVSHMEM's put with signal, the path of RDMA, also inside a node "
           "(nvshmem; it takes memory for mirrors of the other ranks). The host backend takes shared memory, and "
           "messages between nodes, whatever this says.",
           default=True, env="EPCY_ALLOW_NVLINK_FOR_LOW_LATENCY_MODE"),
    Option("num_max_nvl_peers", "int", "The most ranks of one node, which is what NVLink joins. By default all of a "
           "machine; with fewer it holds several virtual nodes, as `Buffer.topology` tells. The host backend then "
           "shares memory inside each and sends messages between them; nvshmem stores inside each, and between them "
           "rows go by NVSHMEM's put.",
           env="EPCY_NUM_MAX_NVL_PEERS", minimum=1, maximum=2**20),
    Option("path", "choice", "How rows go to ranks of other nodes. hierarchical (the default): a token once to each "
           "node, to the rank of the same place in it, which passes it on; a node's sum goes back. direct: to each "
           "rank, and from each. They round differently (docs/numerics.md). On one node there is no difference.",
           env="EPCY_PATH", choices=("direct", "hierarchical")),
    Option("node_chunk_tokens", "int", "Tokens of a message between nodes. By default as many as 256 KiB hold; on "
           "nvshmem 128 KiB, and at most 16.",
           env="EPCY_NODE_CHUNK_TOKENS", minimum=1, maximum=2**24),
    Option("num_node_buffers", "int", "Messages that may be on their way to a rank of another node, and those that it "
           "has not worked on yet.", default=2, env="EPCY_NUM_NODE_BUFFERS", minimum=1, maximum=1024),
    Option("num_qps_per_rank", "int", "Queue pairs to each rank for RDMA (nvshmem; the host backend has none): a "
           "setting of the process, made before NVSHMEM starts; another value later is a StateError. By default "
           "NVSHMEM's own. Its effect on a NIC is untried.",
           env="EPCY_NUM_QPS_PER_RANK", minimum=1, maximum=4096),
    Option("rdma_transport", "choice", "Who drives the NIC (nvshmem; the host backend has none): the GPU (ibgda), the "
           "CPU (proxy), or NVLink alone (auto, as ranks of one machine need no NIC). A setting of the process, like "
           "num_qps_per_rank; BackendUnavailableError without a device for it. Untried on a NIC.", default="auto",
           env="EPCY_RDMA_TRANSPORT", choices=("auto", "ibgda", "proxy")),
    Option("timeout", "float", "Seconds that any wait for another rank may last.", default=60.0, env="EPCY_TIMEOUT",
           minimum=1e-3, maximum=1e6),
    Option("on_timeout", "choice", "What a low-latency call does when a rank is late, gone or dead: raise "
           "PeerTimeoutError, or mask that rank and go on without it.", default="raise",
           env="EPCY_ON_TIMEOUT", choices=("raise", "mask")),
    Option("check", "bool", "Look for mistakes that are otherwise silent: Buffers used in another order on another "
           "rank, bad ids (low latency: at once), writes past the ends of the Buffer's regions (canaries), rows that "
           "were announced and did not come; rows that nobody wrote are NaN. Costs time and touches all memory.",
           default=False, env="EPCY_CHECK"),
    Option("faults", "str", "Faults on purpose, to try a job against them: `epcy.faults` describes them. Not all "
           "of them are possible on nvshmem (docs/errors.md).", env="EPCY_FAULTS", compared=False),
    Option("num_sms", "int", "How much of the machine a call may use: threads a rank on the host backend (default 1), "
           "multiprocessors on nvshmem (default 16 for dispatch on two ranks, 24 for combine). Where `python -m epcy "
           "tune` or `calibrate` has measured the machine, the default is theirs.",
           env="EPCY_NUM_SMS", minimum=1, maximum=1024),
    Option("device", "int", "The GPU of this rank (nvshmem). By default the ranks of one machine take its visible GPUs "
           "in turn.", env="EPCY_DEVICE", minimum=0, maximum=1023, compared=False),
    Option("preinitialize", "bool", "Run warmup() in the constructor.", default=False, env="EPCY_PREINITIALIZE"),
    Option("spin_us", "float", "Microseconds that a host wait spins before it yields its core. By default 50 where "
           "every rank of the node has a core, else 2.", env="EPCY_SPIN_US", minimum=0, maximum=1e6),
    Option("stream_bytes", "int", "From how many bytes of rows on a dispatch writes them past the caches (host). "
           "By default 2 MiB; `python -m epcy tune` finds a better one.", env="EPCY_STREAM_BYTES", minimum=0,
           maximum=2**62, compared=False),
    Option("chunk_tokens", "int", "Tokens that a thread takes at a time, where num_sms is more than 1 (host). "
           "By default 16; `python -m epcy tune` finds a better one.", env="EPCY_CHUNK_TOKENS", minimum=1,
           maximum=2**31 - 1, compared=False),
    Option("stats", "bool", "Count calls, tokens, waits and times, for `Buffer.stats()`, `epcy.trace`, "
           "`epcy.metrics` and `python -m epcy top`. On the host backend it costs 0.3 us a call at most.",
           default=True, env="EPCY_STATS", compared=False),
    Option("status_dir", "str", "The private folder of the status pages that `python -m epcy` reads. By default "
           "epcy-UID in $XDG_RUNTIME_DIR, else one in the temporary folder that ends at random; empty: no status page.",
           env="EPCY_STATUS_DIR", compared=False),
)  # fmt: skip

BY_NAME: dict[str, Option] = {option.name: option for option in OPTIONS}


def _bool(text: str) -> bool:
    values = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }
    return values[text.strip().lower()]


_PARSERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": _bool,
    "str": str,
    "choice": str,
}


def _check(option: Option, value: Any, source: str) -> Any:
    """Bring `value` to the option's kind, or say what was expected."""

    def wrong(expected: str) -> ArgumentError:
        return ArgumentError(f"{source}: expected {expected}, got {value!r}")

    if option.kind == "bool":
        if isinstance(value, bool):
            return value
        raise wrong("True or False")
    if option.kind == "choice":
        if isinstance(value, str) and value in option.choices:
            return value
        raise wrong("one of " + ", ".join(repr(choice) for choice in option.choices))
    if option.kind == "str":
        if isinstance(value, (str, os.PathLike)):
            return os.fspath(value)
        raise wrong("a string")
    kind: type = int if option.kind == "int" else float
    noun = "a whole number" if option.kind == "int" else "a number"
    try:
        if isinstance(value, (bool, str, bytes)):
            raise TypeError
        number = value.__index__() if kind is int else float(value)
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise wrong(noun) from None
    if not number == number:
        raise wrong(noun)
    if option.minimum is not None and number < option.minimum:
        raise wrong(f"{noun}, at least {option.minimum:g}")
    if option.maximum is not None and number > option.maximum:
        raise wrong(f"{noun}, at most {option.maximum:g}")
    return number


def resolve(given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> dict[str, Value]:
    """Find every option's value: the argument, else its EPCY_* variable, else the default.

    Local, blocking. An argument of None counts as not given.

    Raises
    ------
    ArgumentError
        For an unknown name, a missing required option, or a value of the wrong kind or out of bounds.
    """
    environ = os.environ if environ is None else environ
    unknown = sorted(set(given) - set(BY_NAME))
    if unknown:
        raise ArgumentError(f"{unknown[0]}: no such option; the options are {', '.join(BY_NAME)}")
    values: dict[str, Value] = {}
    for option in OPTIONS:
        value = given.get(option.name)
        text = environ.get(option.env) if option.env else None
        if value is not None:
            values[option.name] = Value(_check(option, value, option.name), "argument")
        elif text is not None and (text != "" or option.kind == "str"):
            try:
                parsed = _PARSERS[option.kind](text)
            except (KeyError, ValueError):
                raise ArgumentError(
                    f"{option.env}: expected {option.kind} for {option.name}, got {text!r}"
                ) from None
            values[option.name] = Value(_check(option, parsed, option.env), option.env)
        elif option.required:
            raise ArgumentError(f"{option.name}: expected a value, got none")
        else:
            values[option.name] = Value(option.default, "default")
    return values
