"""Compile src/cuda for the emulated machine, into build/emulator."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MACHINE = Path(__file__).resolve().parent / "machine"
HOST_ALONE = ("runtime.cu", "stamp.cu", "put_runtime.cu")
KERNELS = sorted(p for p in (ROOT / "src/cuda").glob("*.cu") if p.name not in HOST_ALONE)

FLAGS = (
    "-g1 -std=c++17 -fPIC -fvisibility=hidden -fno-gnu-unique -ffp-contract=off -fno-strict-aliasing".split()
)
# Each `__shared__` variable is reached by a call that the machine answers: see fibers.cpp.
FLAGS += ["-ftls-model=global-dynamic"]
FLAGS += {"x86_64": ["-mtls-dialect=gnu"], "aarch64": ["-mtls-dialect=trad"]}.get(platform.machine(), [])
FLAGS += ["-DEPCY_EMULATED", f"-I{ROOT / 'include'}", f"-I{ROOT / 'src/cuda'}", f"-I{MACHINE}"]
# Each store of a kernel is told to the machine: see memory.cpp. Nothing of the sanitizer itself is linked.
OF_MACHINE = ["-O2", "-Wall"]
OF_KERNELS = ["-O1", "-fsanitize=thread", "--param", "tsan-distinguish-volatile=1"]
OF_KERNELS += [
    "-fno-threadsafe-statics"
]  # launchers run in one thread, and the guards are the sanitizer's calls
OF_KERNELS += [
    "--param",
    "tsan-instrument-func-entry-exit=0",
    "-include",
    "cuda_runtime.h",
    "-x",
    "c++",
    "-w",
]


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def missing() -> str | None:
    """Say why there is no machine here, or None."""
    if compiler() is None:
        return "there is no g++"
    if platform.machine() not in ("x86_64", "aarch64"):
        return f"the emulator does not know the processor {platform.machine()}"
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    return None if "Free Software Foundation" in version else f"{compiler()} is not GCC"


@functools.cache
def library(arch: int = 90, kernels: tuple[Path, ...] = ()) -> ctypes.CDLL:
    """Load the machine with the kernels of src/cuda for sm_`arch`, or with others, compiled if anything has changed."""
    if not kernels:  # without bulk copies the low-latency kernels are the same
        kernels = tuple(k for k in KERNELS if arch >= 90 or "low_latency" not in k.name)
    machine = sorted(MACHINE.glob("*.cpp"))
    read = [
        *machine,
        *kernels,
        *MACHINE.glob("*.h"),
        *ROOT.glob("src/cuda/*.cuh"),
        *ROOT.glob("include/epcy/*.h"),
    ]
    digest = hashlib.sha256(repr((compiler(), FLAGS, OF_KERNELS, arch)).encode())
    for path in sorted(read):
        digest.update(path.read_bytes())
    folder = ROOT / "build" / "emulator" / f"{arch}-{digest.hexdigest()[:16]}"
    target = folder / "libemulated.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)

        def run(command: list[str]) -> None:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")

        def compile_one(source: Path) -> Path:
            out = folder / f"{source.name}.o"
            flags = [*OF_KERNELS, f"-D__CUDA_ARCH__={arch}0"] if source in kernels else OF_MACHINE
            run([compiler(), *FLAGS, *flags, "-c", str(source), "-o", str(out)])
            return out

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            # the longest first
            objects = list(
                pool.map(compile_one, sorted([*kernels, *machine], key=lambda p: -p.stat().st_size))
            )
        part = folder / f"part-{os.getpid()}.so"
        run([compiler(), "-shared", "-Wl,--no-undefined", *map(str, objects), "-o", str(part)])
        part.replace(target)
    return ctypes.CDLL(str(target))
