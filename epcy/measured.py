"""What was measured on this machine and is kept for later: a JSON file for each kind, in the user's cache folder."""

from __future__ import annotations

import json
import math
import os
import platform
from pathlib import Path
from typing import Any

from epcy.errors import ArgumentError
from epcy.private_file import write_text

__all__ = ["device_name", "folder", "get", "key_of", "put"]

VERSION = 1


def folder() -> Path:
    """Return where the files are: $EPCY_CACHE_DIR, else epcy in $XDG_CACHE_HOME or ~/.cache. Local."""
    given = os.environ.get("EPCY_CACHE_DIR")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "epcy"


def device_name(backend: str) -> str:
    """Return the model of what moves the tokens: the processor, or on nvshmem the GPU. Local."""
    if backend == "nvshmem":
        import cupy

        name: bytes = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"]
        return name.decode()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def key_of(backend: str, num_ranks: int, num_nodes: int, *more: object) -> str:
    """Name a machine and topology, and what else an entry is good for alone. Local."""
    place = (
        f"{backend} | {device_name(backend)} | {os.cpu_count()} cores | {num_ranks} ranks | {num_nodes} nodes"
    )
    return " | ".join([place, *map(str, more)])


def _read(path: Path) -> dict[str, Any]:
    """The entries of a file; none where there is no file."""
    remedy = f"remove the file, or set EPCY_CACHE_DIR to another folder than {os.fspath(path.parent)!r}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:  # the last: brackets in brackets
        raise ArgumentError(
            f"EPCY_CACHE_DIR: {os.fspath(path)!r} cannot be read as JSON ({error}); {remedy}"
        ) from None
    if not isinstance(content, dict) or content.get("version") != VERSION:
        seen = content.get("version") if isinstance(content, dict) else type(content).__name__
        raise ArgumentError(
            f"EPCY_CACHE_DIR: {os.fspath(path)!r}: expected version {VERSION}, got {seen!r}; {remedy}"
        )
    entries = content.get("entries")
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ArgumentError(
            f"EPCY_CACHE_DIR: {os.fspath(path)!r}: expected an object of entries, got "
            f"{type(entries).__name__}; {remedy}"
        )
    return entries


def _finite(value: Any) -> bool:
    try:
        return not isinstance(value, (int, float)) or math.isfinite(value)
    except OverflowError:  # a whole number that no float is near
        return False


def get(
    kind: str, key: str, expected: dict[str, type], optional: dict[str, type] | None = None
) -> dict[str, Any] | None:
    """Find an entry of `kind`.json, or None. Local; what is `optional` may be missing.

    Raises
    ------
    ArgumentError
        The file is not what `put` writes, or the entry lacks a finite value of one of the `expected` names and types.
    """
    path = folder() / f"{kind}.json"
    entry: dict[str, Any] | None = _read(path).get(key)
    if entry is None:
        return None
    there = {name: of for name, of in (optional or {}).items() if name in entry}
    for name, of in {**expected, **there}.items():
        value = entry.get(name)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float) if of is float else of)
            or not _finite(value)
        ):
            raise ArgumentError(
                f"EPCY_CACHE_DIR: {os.fspath(path)!r}, entry {key!r}: expected {name} to be {of.__name__}, "
                f"got {value!r}; "
                "remove the file, or measure again"
            )
    return entry


def put(kind: str, key: str, entry: dict[str, Any]) -> Path:
    """Keep an entry; the file, which only its user may read (0600), is replaced whole. Local.

    Raises
    ------
    ArgumentError
        As `get`, or the folder cannot be written to.
    """
    path = folder() / f"{kind}.json"
    entries = _read(path)
    entries[key] = entry
    text = json.dumps({"version": VERSION, "entries": entries}, indent=1) + "\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise ArgumentError(
            f"EPCY_CACHE_DIR: {os.fspath(path.parent)!r} cannot be written to ({error}); set it to another folder"
        ) from None
    return path
