"""The file of a recording: routing, shapes, options and times of every rank; payload only where asked for.

It is an .npz without pickles: `header` holds JSON (version, Buffers, calls), `topk_idx` the expert ids of all
routings in a row, `routings` where each begins and its shape, `times` the start and duration of every call on every
rank. What is not such a file is an ArgumentError that says why; nothing in it is trusted.
"""

from __future__ import annotations

import glob
import json
import os
import re
import struct
import time
import zipfile
import zlib
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from epcy import private_file
from epcy.errors import ArgumentError
from epcy.recording.calls import Array, Call, Recorded, Recording, smallest_type
from epcy.recording.checks import Wrong, header_of, known_options
from epcy.recording.join import join, part_of

__all__ = ["VERSION", "read", "write"]

VERSION = 1
MEMBERS = {"header": "|u1", "topk_idx": "", "routings": "<i8", "times": "<i8", "payload": "|u1"}
HEADER = re.compile(
    rb"\{'descr': '([^']{1,40})', 'fortran_order': False, 'shape': \(((?:\d{1,18}(?:, ?|,?(?=\))))*)\), \} *\n"
)
MOST_DEFLATED = 1100  # times that deflate can make something smaller


def write(path: str | os.PathLike[str], recording: Recording) -> None:
    """Write a recording whole or not at all, readable by this user alone (0600). Local, blocking.

    Raises
    ------
    OSError
    """
    path = Path(path)
    starts = np.cumsum([0, *(routing.size for routing in recording.routings)])
    table = [(at, *r.shape) for at, r in zip(starts, recording.routings, strict=False)]
    flat = np.concatenate([np.zeros(0, np.int64), *(r.reshape(-1) for r in recording.routings)])
    arrays = {
        "header": np.frombuffer(_header(recording).encode(), np.uint8),
        "topk_idx": flat.astype(smallest_type(flat)),
        "routings": np.array(table, np.int64).reshape(-1, 3),
        "times": np.concatenate([np.zeros((0, 2), np.int64), *(call.times_ns for call in recording.calls)]),
    }
    if recording.payloads:
        parts = [np.ascontiguousarray(p).reshape(-1).view(np.uint8) for p in recording.payloads]
        arrays["payload"] = np.concatenate(parts)
    with private_file.replace(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def _header(recording: Recording) -> str:
    calls = []
    for call in recording.calls:
        alike = all(one == call.args[0] for one in call.args)
        said: dict[str, Any] = {
            "buffer": call.buffer,
            "at": call.at,
            "op": call.op,
            "args": call.args[:1] if alike else call.args,
            "tokens": call.num_tokens,
            "routing": call.routing,
        }
        if call.refers is not None:
            said["refers"] = call.refers
        if call.errors:
            said["errors"] = {str(rank): text for rank, text in call.errors.items()}
        if call.payload:
            said["payload"] = call.payload
        calls.append(said)
    content = {
        "format": "epcy recording",
        "version": VERSION,
        "epcy": recording.epcy,
        "date": recording.date or time.strftime("%Y-%m-%d %H:%M:%S"),
        "num_ranks": recording.num_ranks,
        "backend": recording.backend,
        "num_dropped": recording.num_dropped,
        "buffers": [{"ranks": list(b.ranks), "options": b.options} for b in recording.buffers],
        "calls": calls,
        "payloads": [{"dtype": p.dtype.str, "shape": list(p.shape)} for p in recording.payloads],
    }
    return json.dumps(content, separators=(",", ":"))


def read(path: str | os.PathLike[str]) -> Recording:
    """Read a recording; where the parts that ranks wrote after an exception are newer, those together.

    Local, blocking.

    Raises
    ------
    ArgumentError
        It cannot be read, or is no recording of this version; the message says where it is wrong.
    """
    path = Path(path)
    parts = [
        other for other in path.parent.glob(f"{glob.escape(path.name)}.rank*") if _rank_of(other) is not None
    ]
    newest = max((part.stat().st_mtime_ns for part in parts), default=0)
    if not parts or path.exists() and path.stat().st_mtime_ns >= newest:
        return _read_one(path)
    found = {_rank_of(part) or 0: _read_one(part) for part in sorted(parts)}
    num_ranks = max(found.values(), key=lambda one: one.date).num_ranks
    found = {rank: one for rank, one in sorted(found.items()) if one.num_ranks == num_ranks}
    joined = join([part_of(one, rank) for rank, one in found.items()], num_ranks)
    joined.num_dropped += max(one.num_dropped for one in found.values())
    joined.date = max(one.date for one in found.values())
    return joined


def _rank_of(part: Path) -> int | None:
    """Return the rank that a file is the part of; None if it is none."""
    number = part.name.rpartition(".rank")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 8 else None


def _read_one(path: Path) -> Recording:
    try:
        arrays = _arrays(path)
        return _recording(header_of(arrays["header"], VERSION), arrays)
    except Wrong as wrong:
        raise ArgumentError(f"path: recording {os.fspath(path)!r}: {wrong}") from None


def _arrays(path: str | os.PathLike[str]) -> dict[str, Array]:
    """Unpack the members, without trusting any size that they claim."""
    arrays = {}
    try:
        with zipfile.ZipFile(path) as file:
            for info in file.infolist():
                name = info.filename.removesuffix(".npy")
                if name not in MEMBERS or name in arrays:
                    raise Wrong(
                        f"expected one each of {', '.join(MEMBERS)}, got a member {info.filename!r:.80}"
                    )
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
                    raise Wrong(f"{name}: expected deflated data, got something else")
                if info.file_size > MOST_DEFLATED * info.compress_size + 1024:
                    raise Wrong(
                        f"{name}: {info.compress_size} bytes cannot hold the {info.file_size} claimed"
                    )
                arrays[name] = _array(name, file.read(info))
    except FileNotFoundError:
        raise Wrong("there is no such file") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, struct.error, NotImplementedError) as error:
        raise Wrong(f"it is no .npz file, or is damaged ({str(error):.200})") from None
    except (OSError, ValueError, RuntimeError, OverflowError, LookupError) as error:
        raise Wrong(f"it cannot be read ({type(error).__name__}: {str(error):.200})") from None
    for name in ("header", "topk_idx", "routings", "times"):
        if name not in arrays:
            raise Wrong(f"{name} is missing")
    return arrays


def _array(name: str, data: bytes) -> Array:
    """Read a .npy member; NumPy's own reader evaluates the header and allocates what it claims."""
    length = int.from_bytes(data[8:10], "little")
    found = HEADER.fullmatch(data[10 : 10 + length])
    if data[:8] != b"\x93NUMPY\x01\x00" or found is None:
        raise Wrong(f"{name}: no array in version 1.0 of the .npy format")
    dtype, shape = found[1].decode(), tuple(int(one) for one in found[2].split(b",") if one.strip())
    types = [MEMBERS[name]] if MEMBERS[name] else ["<i2", "<i4", "<i8"]
    start, count = 10 + length, prod(shape)
    if dtype not in types or count * np.dtype(dtype).itemsize != len(data) - start:
        raise Wrong(f"{name}: expected an array of {' or '.join(types)} that fills its {len(data) - start} bytes, got "
                    f"{dtype:.10} of shape {shape[:4]}")  # fmt: skip
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


def _recording(header: dict[str, Any], arrays: dict[str, Array]) -> Recording:
    ids, table, times = arrays["topk_idx"], arrays["routings"], arrays["times"]
    if ids.ndim != 1 or table.ndim != 2 or table.shape[1] != 3 or times.ndim != 2 or times.shape[1] != 2:
        raise Wrong(
            f"arrays of shapes {ids.shape}, {table.shape}, {times.shape} where (n,), (n, 3), (n, 2) belong"
        )
    routings = []
    for number, (at, num_tokens, num_topk) in enumerate(table.tolist()):
        if min(at, num_tokens) < 0 or num_topk < 1 or at + num_tokens * num_topk > ids.size:
            raise Wrong(f"routing {number}: ({num_tokens}, {num_topk}) ids from {at} on, of {ids.size}")
        routings.append(ids[at : at + num_tokens * num_topk].reshape(num_tokens, num_topk))
    buffers = [Recorded(tuple(one["ranks"]), known_options(one["options"])) for one in header["buffers"]]
    payloads = _payloads(header["payloads"], arrays.get("payload", np.zeros(0, np.uint8)))
    calls: list[Call] = []
    row = 0
    for number, said in enumerate(header["calls"]):
        size = buffers[said["buffer"]].num_ranks
        if row + size > len(times):
            raise Wrong(f"call {number}: times of {size} ranks from row {row} on, of {len(times)}")
        args = said["args"] * size if len(said["args"]) == 1 else said["args"]
        errors = {int(rank): text for rank, text in said.get("errors", {}).items()}
        call = Call(
            said["buffer"], said["at"], said["op"], [dict(one) for one in args], said.get("refers"), said["tokens"],
            said["routing"], times[row : row + size], errors, said.get("payload", {}),
        )  # fmt: skip
        _fits(number, call, buffers, routings, payloads)
        calls.append(call)
        row += size
    if row != len(times):
        raise Wrong(f"times of {len(times)} rows where the calls have {row}")
    return Recording(
        header["num_ranks"], header["backend"], buffers, calls, routings, payloads, header["num_dropped"],
        header["epcy"], header["date"],
    )  # fmt: skip


def _payloads(said: Sequence[dict[str, Any]], data: Array) -> list[Array]:
    if data.ndim != 1:
        raise Wrong(f"payload: expected bytes, got shape {data.shape}")
    found: list[Array] = []
    at = 0
    for number, one in enumerate(said):
        dtype, count = np.dtype(one["dtype"]), prod(one["shape"])
        if at + count * dtype.itemsize > data.size:
            raise Wrong(f"payload {number}: {count * dtype.itemsize} bytes from {at} on, of {data.size}")
        part = data[at : at + count * dtype.itemsize]
        found.append(np.frombuffer(part.tobytes(), dtype).reshape(one["shape"]))
        at += count * dtype.itemsize
    if at != data.size:
        raise Wrong(f"payload: {data.size} bytes where the header says {at}")
    return found


def _fits(
    number: int, call: Call, buffers: list[Recorded], routings: list[Array], payloads: list[Array]
) -> None:
    """Compare a call with the arrays that it names."""
    options, size = buffers[call.buffer].options, buffers[call.buffer].num_ranks
    for rank in range(size):
        place, num_tokens = call.routing[rank], call.num_tokens[rank]
        if (
            place >= len(routings)
            or place >= 0
            and routings[place].shape != (num_tokens, options["num_topk"])
        ):
            raise Wrong(
                f"call {number}: routing {place} on rank {rank} is not ({num_tokens}, {options['num_topk']})"
            )
    widths = {
        "topk_weights": options["num_topk"],
        "scales": -(-options["hidden"] // 128),
        "x": options["hidden"],
    }
    for name, places in call.payload.items():
        for rank, place in enumerate(places):
            if place >= len(payloads) or place >= 0 and (
                payloads[place].ndim < 2 or payloads[place].shape[-1] != widths[name]
            ):  # fmt: skip
                raise Wrong(f"call {number}: payload {place} is no {name} of rank {rank}")
