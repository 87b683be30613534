"""Look into a wheel, or into a built libepcy_cuda.so: the GPUs its kernels were compiled for, and what it bundles.

python tools/check_wheel.py [--archs "80;90;100"] FILE

Exit 1 where the architectures are others than asked, where there is PTX (it would be compiled on the user's
machine, by a driver that may be too old for it), or where a wheel holds a library that is not ours.
"""

from __future__ import annotations

import argparse
import re
import struct
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

# A fat binary: a header (magic, version, header bytes, bytes), then entries, one an architecture.
HEADER, ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ12xI")
MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, HEADER.size)
PTX, SASS = 1, 2
LIBRARY, PUT_LIBRARY = "epcy/libepcy_cuda.so", "epcy/libepcy_put.so"


class Kernels(NamedTuple):
    """Architectures (80 is sm_80) for which a library holds machine code, and those with PTX."""

    sass: set[int]
    ptx: set[int]


def kernels(library: bytes) -> Kernels:
    """Find the fat binaries in a library and list their entries; needs no tool of CUDA's."""
    found = Kernels(set(), set())
    for match in re.finditer(re.escape(MAGIC), library):
        _, _, header_bytes, nbytes = HEADER.unpack_from(library, match.start())
        at = match.start() + header_bytes
        end = at + nbytes
        while at < end:
            kind, _, entry_bytes, payload_bytes, arch = ENTRY.unpack_from(library, at)
            if kind not in (PTX, SASS) or entry_bytes < ENTRY.size:
                raise ValueError(f"an entry of unknown kind {kind} in a fat binary")
            (found.ptx if kind == PTX else found.sass).add(arch)
            at += entry_bytes + payload_bytes
    return found


def complaints(library: bytes | None, archs: set[int]) -> list[str]:
    """List what is wrong with the kernels; without `archs` there shall be none."""
    if library is None:
        return [f"{LIBRARY} is missing"] if archs else []
    found = kernels(library)
    wrong = []
    if found.sass != archs:
        wrong.append(f"machine code for sm {sorted(found.sass)}, expected {sorted(archs)}")
    if found.ptx:
        wrong.append(f"PTX for sm {sorted(found.ptx)}")
    return wrong


def complaints_of_puts(library: bytes | None, archs: set[int]) -> list[str]:
    """The same of what NVSHMEM's device library is linked into, which has more: its objects, for any later link."""
    if library is None:
        return [f"{PUT_LIBRARY} is missing"] if archs else []
    missing = archs - kernels(library).sass
    return [f"{PUT_LIBRARY} has no machine code for sm {sorted(missing)}"] if missing else []


def main() -> int:
    parser = argparse.ArgumentParser("check_wheel.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--archs", default="", help='as in EPCY_CUDA_ARCH: "80;90;100"; none: the host backend alone'
    )
    args = parser.parse_args()
    archs = {int(arch) for arch in re.findall(r"\d+", args.archs)}
    if args.file.suffix == ".whl":
        with zipfile.ZipFile(args.file) as wheel:
            names = wheel.namelist()
            library = wheel.read(LIBRARY) if LIBRARY in names else None
            puts = wheel.read(PUT_LIBRARY) if PUT_LIBRARY in names else None
        foreign = [n for n in names if re.search(r"\.so(\.|$)", n) and not re.fullmatch(r"epcy/.*\.so", n)]
        wrong = [f"bundles {name}" for name in foreign] + complaints_of_puts(puts, archs)
    else:
        library, wrong = args.file.read_bytes(), []
    wrong += complaints(library, archs)
    shown = "no kernels" if library is None else f"kernels for sm {sorted(kernels(library).sass)}"
    print(f"{args.file.name}: {shown}" + "".join(f"\n  wrong: {what}" for what in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
