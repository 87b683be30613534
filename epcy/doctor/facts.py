"""What the doctor reads of a machine; nothing here says what is good.

`root` stands in for "/", so that tests can build a machine that they do not have.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epcy import info
from epcy.doctor import probes
from epcy.doctor.finding import Facts

__all__ = ["gather", "launched"]

# Who started this process, by the variables that say how many it started, and which of them this one is.
LAUNCHERS = (
    ("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("MPICH", "PMI_SIZE", "PMI_RANK"),
    ("JSM", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    ("Slurm", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)
# What MPI libraries call their files in /dev/shm, by the beginning of the name.
MPI_FILES = (
    "mpich_",
    "vader_segment",
    "sm_segment",
    "psm2_shm",
    "psm3_shm",
    "ucx_shm",
    "Intel_MPI",
    "osc_rdma",
)
LIBRARIES = (
    "usr/lib",
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/local/lib",
    "opt/gdrcopy/lib",
)


def gather(root: str | os.PathLike[str] = "/", environ: Mapping[str, str] | None = None) -> Facts:
    """Read everything that the findings are made of, as plain values that JSON takes.

    Local, blocking: a few child processes, some seconds. What is missing raises nothing.
    """
    top, environ = Path(root), os.environ if environ is None else environ
    said = info.collect_basics()
    return {
        "host": socket.gethostname(),
        "versions": said["versions"],
        "build": said["build"],
        "mpi": said["mpi"],
        "launch": launched(environ),
        "size": None,
        "environ": {k: v for k, v in sorted(environ.items()) if k.startswith(("EPCY_", "NVSHMEM_"))},
        "shm": _shm(top),
        "memlock_bytes": _memlock(top),
        "rdma": _rdma(top),
        "modules": {
            name: _module(top, name) for name in ("nvidia", "nvidia_peermem", "nv_peer_mem", "gdrdrv")
        },
        "nvidia": _nvidia(top),
        "gdrcopy": {
            "device": os.access(top / "dev/gdrdrv", os.R_OK | os.W_OK),
            "library": any(any((top / place).glob("libgdrapi.so*")) for place in LIBRARIES),
        },
        "cuda": {"gpus": [], "pairs": [], "error": None, "driver_cuda": None, **info.ask(probes.GPUS)},
        "nvshmem": info.ask(probes.NVSHMEM),
    }


def launched(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what a launcher's variables say: its name, "size" and "rank"; None where there are none. Local."""
    for name, size, rank in LAUNCHERS:
        if environ.get(size, "").isdigit() and environ.get(rank, "").isdigit():
            return {"name": name, "size": int(environ[size]), "rank": int(environ[rank]), "variable": size}
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _shm(root: Path) -> dict[str, Any] | None:
    folder = root / "dev/shm"
    try:
        stat = os.statvfs(folder)
    except OSError:
        return None
    sizes = []
    for name in _names(folder):
        if name.startswith(MPI_FILES):
            try:
                sizes.append((folder / name).stat().st_size)
            except OSError:
                continue
    return {
        "bytes": stat.f_blocks * stat.f_frsize,
        "free_bytes": stat.f_bavail * stat.f_frsize,
        "writable": os.access(folder, os.W_OK | os.X_OK),
        "num_mpi_files": len(sizes),
        "mpi_bytes": sum(sizes),
    }


def _memlock(root: Path) -> int | None:
    """Return the soft limit in bytes; -1: none; None: not known."""
    found = re.search(r"^Max locked memory\s+(\S+)", _text(root / "proc/self/limits"), re.MULTILINE)
    if found is None:
        return None
    return int(found[1]) if found[1].isdigit() else -1


def _rdma(root: Path) -> list[dict[str, Any]]:
    """Return the ports of the RDMA devices."""
    ports = []
    for device in _names(root / "sys/class/infiniband"):
        folder = root / "sys/class/infiniband" / device
        verbs = [
            name
            for name in _names(root / "sys/class/infiniband_verbs")
            if _text(root / "sys/class/infiniband_verbs" / name / "ibdev") == device
        ]
        for port in _names(folder / "ports"):
            at = folder / "ports" / port
            types = {_text(at / "gid_attrs/types" / index) for index in _names(at / "gid_attrs/types")}
            ports.append(
                {
                    "device": device,
                    "port": port,
                    "link_layer": _text(at / "link_layer"),
                    "state": _text(at / "state").rpartition(":")[2].strip(),
                    "rate": _text(at / "rate"),
                    "gid_types": sorted(types - {""}),
                    "usable": bool(verbs)
                    and all(os.access(root / "dev/infiniband" / name, os.R_OK | os.W_OK) for name in verbs),
                }
            )
    return ports


def _module(root: Path, name: str) -> str | None:
    """Return a kernel module's version, "" where it has none, None where it is not loaded."""
    folder = root / "sys/module" / name
    return _text(folder / "version") if folder.is_dir() else None


def _nvidia(root: Path) -> dict[str, Any] | None:
    said = _text(root / "proc/driver/nvidia/version")
    if not said:
        return None
    line = next((one for one in said.splitlines() if "NVRM" in one), "")
    version = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", line)
    lines = (one.partition(":") for one in _text(root / "proc/driver/nvidia/params").splitlines())
    params = {name.strip(): value.strip() for name, colon, value in lines if colon}
    return {"driver": version[0] if version else None, "open": "Open Kernel" in line, "params": params}
