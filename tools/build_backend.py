"""The PEP 517 hooks of epcy, and what they and setup.py need to know about CUDA on this machine.

setuptools does the work; the one thing it cannot say is that a build needs NVSHMEM only where nvcc is
found and there are CUDA sources to compile.

EPCY_CUDA=auto|1|0   auto (default): the CUDA backend where nvcc and NVSHMEM are found; 1: must be; 0: never
NVCC, CUDA_HOME      where nvcc is     (else PATH, /usr/local/cuda, the nvidia-cuda-nvcc wheel)
NVSHMEM_HOME         where NVSHMEM is  (else the nvidia-nvshmem-cu13 wheel)
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  (hooks taken as they are)
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

ROOT = Path(__file__).resolve().parent.parent

# The same in setup.cfg: the host library copies its state struct into our module's symbol, so build and
# run must be of one minor version.
NVSHMEM = "nvidia-nvshmem-cu13==3.4.*"


def wheel_dirs(name: str) -> list[Path]:
    """List the folders nvidia/NAME of installed wheels.

    pip's build isolation hides the target's site-packages from sys.path, but not from sysconfig.
    """
    roots = [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return [p for p in (Path(r, "nvidia", name) for r in dict.fromkeys(roots) if r) if p.is_dir()]


def cuda_sources() -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("src/cuda/*.cu"))


def find_nvcc() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    found = [
        os.environ.get("NVCC"),
        *(f"{home}/bin/nvcc" for home in homes if home),
        shutil.which("nvcc"),
        "/usr/local/cuda/bin/nvcc",
        *(str(d / "bin/nvcc") for d in wheel_dirs("cu13")),
    ]
    return next((f for f in found if f and os.access(f, os.X_OK)), None)


def find_nvshmem() -> Path | None:
    home = os.environ.get("NVSHMEM_HOME")
    places = [Path(home)] if home else wheel_dirs("nvshmem")
    return next((d for d in places if (d / "lib/libnvshmem_device.a").exists()), None)


def nvcc_version(nvcc: str) -> str:
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return next((f"nvcc {line.split()[-1]}" for line in said.splitlines() if "release" in line), "nvcc")


def nvshmem_version(home: Path) -> str:
    header = next(home.glob("include/**/nvshmem_version.h"), None)
    text = header.read_text() if header else ""
    found = dict(re.findall(r"#define NVSHMEM_VENDOR_(MAJOR|MINOR|PATCH)_VERSION\s+(\d+)", text))
    return ".".join(found.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))


def cuda_include_dirs(nvcc: str) -> list[str]:
    """Ask nvcc itself: what lies on PATH may be a script that calls the real one."""
    said = subprocess.run(
        [nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null"], capture_output=True, text=True
    ).stderr
    line = next((text for text in said.splitlines() if "INCLUDES=" in text), "")
    return re.findall(r'-I([^"\s]+)', line)


def cuda_wanted() -> bool:
    """Tell whether this build should try the CUDA backend (NVSHMEM apart); EPCY_CUDA=1 insists."""
    choice = os.environ.get("EPCY_CUDA", "auto")
    if choice not in ("auto", "1", "0"):
        sys.exit(f"epcy: EPCY_CUDA must be auto, 1 or 0, got {choice!r}")
    wanted = choice != "0" and bool(cuda_sources()) and find_nvcc() is not None
    if choice == "1" and not wanted:
        sys.exit(
            "epcy: EPCY_CUDA=1, but "
            + ("nvcc was not found" if cuda_sources() else "src/cuda has no sources")
        )
    return wanted


def _nvshmem_requirement() -> list[str]:
    return [NVSHMEM] if cuda_wanted() and find_nvshmem() is None else []


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_nvshmem_requirement()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_nvshmem_requirement()]
