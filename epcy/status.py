"""The status page of a rank: a small private file that says where it is, read by `python -m epcy` and by error texts.

The page is mapped memory; the C code of the backend writes it with plain stores. Layout: `epcy_status` in
epcy/host.h.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import stat
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from epcy.errors import ArgumentError

__all__ = ["OPERATIONS", "PHASES", "Gauges", "Status", "folder", "open_page", "parse", "read_all"]

OPERATIONS = (
    "nothing",
    "dispatch",
    "combine",
    "barrier",
    "free",
    "low_latency_dispatch",
    "low_latency_combine",
)
PHASES = ("idle", "arrival", "data", "completion")
PAGE_BYTES = mmap.PAGESIZE
_FORMAT = struct.Struct("<QiiiiiiQq7q")
_WATCHED_AT = _FORMAT.size
_VERSION = 4
_GAUGES_AT = 128
_GAUGES = struct.Struct("<8q")
_MAGIC = 0x7375746174737965
_serial = itertools.count()


@dataclass(frozen=True)
class Gauges:
    """Running sums of a rank's Buffer since it was made: epcy_gauges of epcy/meter.h."""

    first_expert: int
    num_calls: int
    busy_ns: int  # inside of calls
    wait_ns: int  # of it, waiting for other ranks
    tokens_sent: int
    tokens_received: int
    bytes_moved: int
    tokens_per_expert: tuple[int, ...]


@dataclass(frozen=True)
class Status:
    """Where a rank is: its operation, the phase of it, the number of the call (epoch), and since when."""

    pid: int
    rank: int
    size: int
    operation: str
    phase: str
    epoch: int
    age: float  # s since it entered the phase
    num_calls: dict[str, int]
    gauges: Gauges | None = None  # None: the Buffer counts nothing

    def __str__(self) -> str:
        if self.phase == "idle":
            return f"outside of epcy for {self.age:.1f} s, after call {self.epoch}"
        return f"in {self.operation} (call {self.epoch}), phase {self.phase}, for {self.age:.1f} s"


def folder(given: str | None = None) -> Path:
    """Return the private folder of status pages, made with mode 0700 if it is not there.

    Without one given: epcy-UID in $XDG_RUNTIME_DIR, which is the user's alone; else one in the temporary folder, which
    everybody shares, so its name ends at random: nobody else can be there first.

    Raises
    ------
    ArgumentError
        The folder is another user's, or others may write to it.
    """
    path = Path(given) if given else _in_runtime_folder()
    if path is None:
        found = _in_temporary_folder()
        return found[0] if found else Path(tempfile.mkdtemp(prefix=_prefix()))
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    info = path.lstat()
    if not _is_private(info):
        raise ArgumentError(
            f"status_dir: expected a folder of this user that nobody else may write to, got {os.fspath(path)!r} "
            f"(owner {info.st_uid}, mode {stat.S_IMODE(info.st_mode):04o}); set EPCY_STATUS_DIR, or to '' for none"
        )
    return path


def _is_private(info: os.stat_result) -> bool:
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o022


def _prefix() -> str:
    return f"epcy-{os.getuid()}-"


def _in_runtime_folder() -> Path | None:
    """The folder in $XDG_RUNTIME_DIR; None where that is not set, or is not there: batch systems hand it on."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if not runtime or not os.path.isdir(runtime) or not os.access(runtime, os.W_OK | os.X_OK):
        return None
    return Path(runtime) / f"epcy-{os.getuid()}"


def _in_temporary_folder() -> list[Path]:
    """This user's folders there: ranks that start together may each make one."""
    found = []
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_prefix()):
                with contextlib.suppress(OSError):
                    if _is_private(entry.stat(follow_symlinks=False)):
                        found.append(Path(entry.path))
    return sorted(found)


def _folders(given: str | None) -> list[Path]:
    """Where pages may lie."""
    if given or _in_runtime_folder() is not None:
        return [folder(given)]
    return _in_temporary_folder()


def open_page(directory: Path, rank: int, num_bytes: int = PAGE_BYTES) -> tuple[mmap.mmap, Path]:
    """Make this rank's page (mode 0600), of num_bytes or more, and map it."""
    num_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    path = directory / f"{os.getpid()}-{next(_serial)}-{rank}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, num_bytes)
        return mmap.mmap(descriptor, num_bytes), path
    finally:
        os.close(descriptor)


def parse(data: bytes) -> Status | None:
    """Read one page; None if it is not (yet) one."""
    if len(data) < _FORMAT.size:
        return None
    magic, version, pid, rank, size, op, phase, epoch, since_ns, *calls = _FORMAT.unpack_from(data)
    if magic != _MAGIC or version != _VERSION or not (0 <= op < len(OPERATIONS) and 0 <= phase < len(PHASES)):
        return None
    age = max(0.0, time.monotonic() - since_ns * 1e-9)
    num_calls = dict(zip(OPERATIONS, calls, strict=True))
    return Status(pid, rank, size, OPERATIONS[op], PHASES[phase], epoch, age, num_calls, _gauges(data))


def _gauges(data: bytes) -> Gauges | None:
    if len(data) < _GAUGES_AT + _GAUGES.size:
        return None
    first, num_experts, calls, busy, wait, sent, received, moved = _GAUGES.unpack_from(data, _GAUGES_AT)
    at = _GAUGES_AT + _GAUGES.size
    if num_experts < 1 or at + num_experts * 8 > len(data):
        return None
    experts = struct.unpack_from(f"<{num_experts}q", data, at)
    return Gauges(first, calls, busy, wait, sent, received, moved, experts)


def read_all(given: str | None = None, *, watch: bool = False) -> list[Status]:
    """Read the pages of this user's live ranks on this machine; pages of ended processes are removed.

    `watch`: leave word that somebody looks on; ranks whose sums lie on a GPU fetch them once a second for three more.
    """
    found = []
    for path in [path for directory in _folders(given) for path in sorted(directory.iterdir())]:
        with contextlib.suppress(OSError):
            pid = path.name.partition("-")[0]
            if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                path.unlink()
                continue
            if not stat.S_ISREG(path.lstat().st_mode):  # a pipe would be waited for
                continue
            status = parse(path.read_bytes())
            if status is None:
                continue
            found.append(status)
            if watch:
                with open(path, "r+b", buffering=0) as page:
                    os.pwrite(page.fileno(), struct.pack("<q", time.monotonic_ns()), _WATCHED_AT)
    return found
