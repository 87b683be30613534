"""What `python -m epcy` tells: versions, backends and why one does not work, the machine, the options.

Everything that could take the process down (loading an MPI library, touching a GPU) is asked in a child
process with a time limit, so that the report comes out on any machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from epcy._version import __version__
from epcy.topology import available_cpus

__all__ = ["ask", "collect", "collect_basics", "find_mpiexec", "render"]

SIMD = ("avx2", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "asimd", "sve")
PACKAGES = "numpy ml_dtypes mpi4py mpich cupy-cuda13x nvidia-nvshmem-cu13 cuda-pathfinder".split()

# The version needs no MPI_Init: initialising is what hangs or aborts on a machine set up by halves.
MPI_PROBE = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
library = MPI.Get_library_version().strip("\\0\\n ")
print(json.dumps({"library": library, "standard": list(MPI.Get_version())}))
"""

GPU_PROBE = """
import json
import cupy
runtime = cupy.cuda.runtime
gpus = []
try:
    count, why = runtime.getDeviceCount(), None
except runtime.CUDARuntimeError as error:
    count, why = 0, str(error)
for i in range(count):
    p = runtime.getDeviceProperties(i)
    gpus.append({"name": p["name"].decode(), "memory_bytes": p["totalGlobalMem"],
                 "sms": p["multiProcessorCount"], "compute_capability": f"{p['major']}.{p['minor']}"})
versions = {"driver": runtime.driverGetVersion(), "runtime": runtime.runtimeGetVersion()}
print(json.dumps({"gpus": gpus, "why": why, **versions}))
"""

NVSHMEM_PROBE = """
import json
from epcy import backends
backends.load_nvshmem()
import epcy.backends.nvshmem
print(json.dumps({}))
"""

IMPORT_PROBE = "import json, {module}; print(json.dumps(dict()))"


def collect_basics() -> dict[str, Any]:
    """Return versions, what built the modules, and the MPI library: what `python -m epcy doctor` shares.

    Local, blocking: two child processes.
    """
    return {"versions": _versions(), "build": _build_record(), "mpi": _mpi()}


def collect() -> dict[str, Any]:
    """Return everything that the report holds, as plain values that JSON takes.

    Local, blocking: a few child processes, a second or two. What the machine lacks raises nothing.
    """
    mpi = _mpi()
    gpu = ask(GPU_PROBE)
    return {
        "versions": _versions(),
        "build": _build_record(),
        "mpi": mpi,
        "backends": {"host": _host(mpi), "nvshmem": _nvshmem(mpi, gpu)},
        "machine": _machine(),
        "gpus": gpu.get("gpus", []),
        "ranks": _ranks(),
        "options": _options(),
        "unknown_variables": _unknown_variables(),
        "nvshmem_variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith("NVSHMEM_")},
    }


def render(info: dict[str, Any]) -> str:
    """Return the report as text for a terminal."""
    lines: list[str] = []

    def section(title: str, rows: Iterable[tuple[str, Any]]) -> None:
        rows = list(rows)
        lines.extend(["", title] if lines else [title])
        width = max((len(name) for name, _ in rows), default=0)
        lines.extend(f"  {name:<{width}}  {value}" for name, value in rows)

    section("versions", [(name, version or "not installed") for name, version in info["versions"].items()])
    section("build", _build_rows(info["build"]))
    mpi = info["mpi"]
    library = (mpi["library"] or mpi["error"]).splitlines()[0]
    mpiexec = mpi["mpiexec"] or "not found"
    section("MPI", [("library", library), ("mpiexec", mpiexec), ("launcher", mpi["launcher"] or "-")])
    verdicts = info["backends"].items()
    section("backends", [(name, "works" if v["available"] else f"no: {v['reason']}") for name, v in verdicts])
    section("machine", _machine_rows(info["machine"], info["gpus"]))
    if info["ranks"]:
        ranks = info["ranks"]
        section(
            "ranks at work", [(f"{r['rank']} of {r['size']}", f"pid {r['pid']}, {r['text']}") for r in ranks]
        )
    section("options", [(option["name"], _option_text(option)) for option in info["options"]])
    unknown = info["unknown_variables"]
    if unknown:
        section("variables that no option reads", [(name, os.environ.get(name, "")) for name in unknown])
    if info["nvshmem_variables"]:
        section("variables that NVSHMEM reads", info["nvshmem_variables"].items())
    return "\n".join(lines) + "\n"


def _build_rows(build: dict[str, Any]) -> list[tuple[str, Any]]:
    if "error" in build:
        return [("record", build["error"])]
    return [
        ("cython", build["cython"]),
        ("python", build["python"]),
        ("cuda", build["cuda"] or "host backend alone"),
    ]


def _machine_rows(machine: dict[str, Any], gpus: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    shm = machine["shm"]
    rows: list[tuple[str, Any]] = [
        ("host", f"{machine['hostname']}, {machine['system']}"),
        ("processor", f"{machine['processor']} ({', '.join(machine['simd']) or 'no SIMD flags read'})"),
        ("cores", f"{machine['cpus_available']} for this process, {machine['cpus']} in all"),
        ("memory", f"{_gib(machine['memory_available_bytes'])} free of {_gib(machine['memory_bytes'])}"),
        ("/dev/shm", f"{_gib(shm['free_bytes'])} free of {_gib(shm['bytes'])}" if shm else "not there"),
    ]
    for i, gpu in enumerate(gpus):
        size = _gib(gpu["memory_bytes"])
        what = f"{gpu['name']}, {size}, {gpu['sms']} SMs, compute capability {gpu['compute_capability']}"
        rows.append((f"GPU {i}", what))
    return rows if gpus else [*rows, ("GPUs", "none seen")]


def _option_text(option: dict[str, Any]) -> str:
    if "error" in option:
        return f"wrong: {option['error']}"
    value = "-" if option["value"] is None else repr(option["value"])
    variable = f", {option['env']}" if option["env"] and option["env"] != option["origin"] else ""
    return f"{value}  ({option['origin']}{variable})"


def _gib(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


def ask(code: str, timeout: float = 20.0) -> dict[str, Any]:
    """Run code in a child and return the JSON of its last line, or {"error": why not}."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    try:
        found = json.loads(done.stdout.splitlines()[-1])
        return found if isinstance(found, dict) else {"error": done.stdout}
    except (IndexError, ValueError):
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return {"error": said[-1] if said else f"the process ended with {done.returncode}"}


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"epcy": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _build_record() -> dict[str, Any]:
    path = Path(__file__).with_name("_build.json")
    try:
        record = json.loads(path.read_text())
        return record if isinstance(record, dict) else {"error": f"{path.name} is no record"}
    except (OSError, ValueError, RecursionError):
        return {"error": "the extension modules were not built here"}


def find_mpiexec() -> str | None:
    """Return the mpiexec on PATH, else the one beside this python. Local."""
    beside = Path(sys.executable).with_name("mpiexec")
    return shutil.which("mpiexec") or (str(beside) if os.access(beside, os.X_OK) else None)


def _mpi() -> dict[str, Any]:
    found = ask(MPI_PROBE)
    mpiexec = find_mpiexec()
    launcher = None
    if mpiexec is not None:
        try:
            said = subprocess.run(
                [mpiexec, "--version"], capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL
            ).stdout.split("\n")
            # MPICH: "HYDRA build details:", then "    Version:   5.0.2"; Open MPI: one line
            version = next((line.split()[-1] for line in said if line.strip().startswith("Version:")), None)
            launcher = f"{said[0].split()[0]} {version}" if version else said[0].strip() or None
        except (OSError, subprocess.SubprocessError, IndexError):
            launcher = "does not run"
    return {
        "library": found.get("library"),
        "standard": found.get("standard"),
        "error": found.get("error"),
        "mpiexec": mpiexec,
        "launcher": launcher,
    }


def _module(name: str) -> str | None:
    """Return why a module cannot be imported, or None."""
    try:
        if importlib.util.find_spec(name) is None:
            return f"{name} was not built"
    except (ImportError, ValueError) as error:
        return f"{name}: {error}"
    return ask(IMPORT_PROBE.format(module=name)).get("error")


def _verdict(reason: str | None) -> dict[str, Any]:
    return {"available": reason is None, "reason": reason}


def _host(mpi: dict[str, Any]) -> dict[str, Any]:
    if mpi["error"]:
        return _verdict(
            f"mpi4py.MPI cannot be imported: {mpi['error']}; pip install 'epcy[mpi]' brings a library"
        )
    return _verdict(_module("epcy.backends.host"))


def _nvshmem(mpi: dict[str, Any], gpu: dict[str, Any]) -> dict[str, Any]:
    if importlib.util.find_spec("epcy") and not list(Path(__file__).parent.glob("backends/nvshmem*.so")):
        return _verdict("epcy.backends.nvshmem was not built: it needs nvcc and NVSHMEM at build time")
    if mpi["error"]:
        return _verdict(f"no MPI library ({mpi['error']})")
    if importlib.util.find_spec("cupy") is None:
        return _verdict("CuPy is not installed; pip install 'epcy[cuda]' brings it and NVSHMEM")
    if "error" in gpu:
        return _verdict(f"CuPy: {gpu['error']}")
    if not gpu["gpus"]:
        return _verdict("no GPU is visible" + (f" ({gpu['why']})" if gpu.get("why") else ""))
    return _verdict(ask(NVSHMEM_PROBE).get("error"))


def _machine() -> dict[str, Any]:
    cpuinfo = _fields("/proc/cpuinfo")
    flags = set(cpuinfo.get("flags", cpuinfo.get("Features", "")).split())
    meminfo = _fields("/proc/meminfo")

    def memory(name: str) -> int | None:
        words = meminfo.get(name, "").split()
        return int(words[0]) * 1024 if words and words[0].isdigit() else None

    try:
        stat = os.statvfs("/dev/shm")
        shm = {"bytes": stat.f_blocks * stat.f_frsize, "free_bytes": stat.f_bavail * stat.f_frsize}
    except OSError:
        shm = None
    return {
        "hostname": socket.gethostname(),
        "system": platform.platform(),
        "processor": cpuinfo.get("model name") or platform.machine(),
        "simd": [f for f in SIMD if f in flags],
        "cpus": os.cpu_count(),
        "cpus_available": len(available_cpus()),
        "memory_bytes": memory("MemTotal"),
        "memory_available_bytes": memory("MemAvailable"),
        "shm": shm,
    }


def _fields(path: str) -> dict[str, str]:
    """Read `name: value` lines; of a repeated name the first counts."""
    fields: dict[str, str] = {}
    try:
        for line in Path(path).read_text().splitlines():
            name, colon, value = line.partition(":")
            if colon:
                fields.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    return fields


def _ranks() -> list[dict[str, Any]]:
    """Return where this user's running ranks are, by their status pages."""
    from epcy import status
    from epcy.errors import EpcyError

    directory = os.environ.get("EPCY_STATUS_DIR")
    try:
        pages = [] if directory == "" else status.read_all(directory)
    except (EpcyError, OSError):
        return []
    return [{"rank": page.rank, "size": page.size, "pid": page.pid, "text": str(page)} for page in pages]


def _options() -> list[dict[str, Any]]:
    from epcy.errors import ArgumentError
    from epcy.options import OPTIONS, resolve

    needed = {option.name: max(1, int(option.minimum or 1)) for option in OPTIONS if option.required}
    rows = []
    for option in OPTIONS:
        row: dict[str, Any] = {
            "name": option.name,
            "kind": option.kind,
            "env": option.env,
            "value": option.default,
            "origin": "argument, required" if option.required else "default",
            "help": option.help,
        }
        if option.env and option.env in os.environ:
            try:  # alone, so that one wrong variable does not hide the others
                found = resolve(needed, {option.env: os.environ[option.env]})[option.name]
                row["value"], row["origin"] = found.value, found.origin
            except ArgumentError as error:
                row["error"] = str(error)
        rows.append(row)
    return rows


def _unknown_variables() -> list[str]:
    from epcy.options import OPTIONS

    known = {option.env for option in OPTIONS} | {"EPCY_CUDA", "EPCY_CUDA_ARCH", "EPCY_CACHE_DIR"}
    return sorted(
        n for n in os.environ if n.startswith("EPCY_") and not n.startswith("EPCY_TEST_") and n not in known
    )
