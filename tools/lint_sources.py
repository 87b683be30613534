"""Lint what ruff does not read: cython-lint on .pyx and .pxd, clang-format and gcc's warnings on C and CUDA.

python tools/lint_sources.py          check; exit 1 when something is found
python tools/lint_sources.py --fix    let clang-format rewrite the sources
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARNINGS = ["-std=c11", "-D_GNU_SOURCE=1", "-Wall", "-Wextra", "-Wshadow", "-Wno-unused-parameter", "-Werror", "-fsyntax-only"]


def files(*patterns: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for pattern in patterns for p in ROOT.glob(pattern))


def tool(name: str) -> str:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


def call(command: list[str], inputs: list[str]) -> bool:
    return not inputs or subprocess.run([*command, *inputs], cwd=ROOT).returncode == 0


def main() -> int:
    os.chdir(ROOT)
    sources = files("include/**/*.h", "src/**/*.[ch]", "src/**/*.cu", "src/**/*.cuh")
    clang_format = [sys.executable, "-m", "clang_format"] if shutil.which(tool("clang-format")) is None else [tool("clang-format")]
    if "--fix" in sys.argv[1:]:
        return not call([*clang_format, "-i"], sources)
    good = call([sys.executable, "-m", "cython_lint", "--max-line-length=110"], files("epcy/**/*.pyx", "epcy/**/*.pxd", "tests/**/*.pyx"))
    good &= call([*clang_format, "--dry-run", "-Werror"], sources)
    compiler = os.environ.get("CC", "gcc")
    good &= call([compiler, *WARNINGS, "-Iinclude", "-Isrc/host"], files("src/host/*.c"))
    return not good


if __name__ == "__main__":
    sys.exit(main())
