"""Lint what ruff does not read: cython-lint on .pyx and .pxd, clang-format and gcc's warnings on C and CUDA.

python tools/lint_sources.py          check; exit 1 when something is found
python tools/lint_sources.py --fix    let clang-format rewrite the sources
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# psabi: vectors wider than the target's registers never cross a function that is not inlined
WARNINGS = "-std=c11 -Wall -Wextra -Wshadow -Wno-unused-parameter -Wno-psabi -Werror -fsyntax-only".split()


def files(*patterns: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for pattern in patterns for p in ROOT.glob(pattern))


def tool(name: str) -> str:
    """Prefer the tool beside this python, as `make lint` calls it."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


def call(command: list[str], inputs: list[str]) -> bool:
    # cython-lint calls pycodestyle by its name
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    env = {**os.environ, "PATH": path}
    return not inputs or subprocess.run([*command, *inputs], cwd=ROOT, env=env).returncode == 0


def main() -> int:
    sources = files("include/**/*.h", "src/**/*.[ch]", "src/**/*.cu", "src/**/*.cuh")
    sources += files("tests/emulator/**/*.h", "tests/emulator/**/*.cpp", "tests/emulator/**/*.cu")
    if "--fix" in sys.argv[1:]:
        return not call([tool("clang-format"), "-i"], sources)
    cython = files("epcy/**/*.pyx", "epcy/**/*.pxd", "tests/**/*.pyx")
    good = call([tool("cython-lint"), "--max-line-length=120"], cython)
    good &= call([tool("clang-format"), "--dry-run", "-Werror"], sources)
    gcc = [os.environ.get("CC", "gcc"), *WARNINGS, "-Iinclude", "-Isrc/host"]
    good &= call(gcc, files("src/host/*.c", "src/meter/*.c", "src/window/*.c"))
    return not good


if __name__ == "__main__":
    sys.exit(main())
