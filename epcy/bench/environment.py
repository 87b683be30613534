"""What a result was measured on: models and versions, no names of hosts and no paths."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mpi4py import MPI


def describe(argv: Sequence[str], num_ranks: int) -> dict[str, Any]:
    """Return the ``env`` of the JSON file. Local."""
    return {
        "date": date.today().isoformat(),
        "command": command(argv, num_ranks),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "mpi": " ".join(MPI.Get_library_version().split("\n")[0].strip("\0").split()),
        "versions": {name: _version(name) for name in ("epcy", "numpy", "ml_dtypes", "mpi4py")},
    }


def describe_devices(comm: MPI.Intracomm, device: int) -> dict[str, Any]:
    """Return what is added to ``env`` on the nvshmem backend. Collective, blocking."""
    import cupy

    from epcy.backends import symmetric

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(device)
    name, num_sms = properties["name"].decode(), int(properties["multiProcessorCount"])
    # By its place in the machine too: ranks may share a GPU, and then times say nothing.
    gpus = comm.allgather((name, num_sms, str(cupy.cuda.Device(device).pci_bus_id)))
    return {
        "devices": [one for one, _, _ in gpus],
        "device_sms": [sms for _, sms, _ in gpus],
        "ranks_share_a_device": len({place for _, _, place in gpus}) < comm.size,
        "driver": driver(),
        "cuda_driver": cuda_version(runtime.driverGetVersion()),
        "cuda_runtime": cuda_version(runtime.runtimeGetVersion()),
        "cupy": cupy.__version__,
        "nvshmem": ".".join(map(str, symmetric.version())),
    }


def cuda_version(number: int) -> str:
    """Return "13.0" for 13000."""
    return f"{number // 1000}.{number % 1000 // 10}"


def driver() -> str | None:
    """Return the version of the GPU driver, where the system tells."""
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
        found = re.search(r"Module\s+(\d+\.[\d.]+)", text) or re.search(r"\b(\d{3}\.\d[\d.]*)", text)
        if found:
            return found[1]
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    return None


def command(argv: Sequence[str], num_ranks: int) -> str:
    """Return the command that gives the same run: files without their folders, nothing of this machine."""
    words = [Path(word).name if os.sep in word else word for word in argv]
    return " ".join([f"mpiexec -n {num_ranks} python -m mpi4py -m epcy.bench", *words])


def processor() -> str:
    """Return the model name of the processor, or the machine's kind where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str | None:
    module = sys.modules.get(name)
    try:
        return version(name)
    except PackageNotFoundError:
        return getattr(module, "__version__", None)
