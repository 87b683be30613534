"""Build epcy: the host backend always; the CUDA backend where nvcc and NVSHMEM are found.

Every epcy/**/*.pyx is one extension module. epcy/backends/NAME.pyx is linked with src/NAME/*.c. Libraries that several
modules may share are made here: a .pyx that says `# distutils: libraries = epcy_host` links epcy/libepcy_host.so
(src/host/*.c); those that say `epcy_cuda` or `epcy_put` are built only with the CUDA backend and link
epcy/libepcy_cuda.so (src/cuda/*.cu) or epcy/libepcy_put.so (src/cuda/put_*.cu, which NVSHMEM's device library is linked
into: a process loads it only where puts are used). See tools/build_backend.py for the variables that steer the search.

EPCY_CUDA_ARCH       default "90"; several: "80;90;100"
EPCY_SANITIZE        compile the C code with -fsanitize=THIS: "address,undefined"; see `make sanitize`
MAX_JOBS             how many compilers at once; default: the cores this process may use
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

ROOT = Path(__file__).resolve().parent
os.chdir(ROOT)
sys.path.insert(0, str(ROOT / "tools"))

from build_backend import (  # noqa: E402
    cuda_include_dirs,
    cuda_sources,
    cuda_wanted,
    find_nvcc,
    find_nvshmem,
    nvcc_version,
    nvshmem_version,
)
from setuptools import Extension, setup  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402
from setuptools.command.build_py import build_py  # noqa: E402

# No -march: what ships must run on any machine of its architecture; SIMD paths are chosen at run time.
# No fast-math and no contraction: both backends and the reference agree to the bit.
CFLAGS = ["-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-pthread"]
CFLAGS += ["-fno-plt"]  # a call from one library into another is one jump: short calls make many
CFLAGS += ["-Wno-psabi"]  # a note about vectors that no function boundary sees
LDFLAGS = ["-pthread"]
if os.environ.get("EPCY_SANITIZE"):
    SANITIZE = [
        f"-fsanitize={os.environ['EPCY_SANITIZE']}",
        "-fno-sanitize-recover=undefined",
        "-g",
        "-fno-omit-frame-pointer",
    ]
    CFLAGS = ["-O1" if flag == "-O3" else flag for flag in CFLAGS] + SANITIZE
    LDFLAGS += SANITIZE
HEADERS = sorted(glob("include/**/*.h", recursive=True))
JOBS = int(os.environ.get("MAX_JOBS", 0)) or len(os.sched_getaffinity(0))


def needs(library: str, pyx: str) -> bool:
    line = re.search(r"^# distutils: libraries = (.*)$", Path(pyx).read_text(encoding="utf-8"), flags=re.M)
    return line is not None and library in line[1].split()


def extension(pyx: str) -> Extension:
    path = Path(pyx)
    shared = any(needs(library, pyx) for library in ("epcy_host", "epcy_cuda", "epcy_put"))
    kernels = f"src/{path.stem}" if path.parent.name == "backends" and not shared else None
    # the libraries lie in epcy/, whatever folder below it the module is in
    up = "/..".join(["$ORIGIN", *[""] * (len(path.parts) - 2)])
    return Extension(
        ".".join(path.with_suffix("").parts),
        [pyx, *(sorted(glob(f"{kernels}/*.c")) if kernels else [])],
        include_dirs=["include", *([kernels] if kernels else [])],
        extra_compile_args=CFLAGS,
        extra_link_args=LDFLAGS,
        runtime_library_dirs=[up] if shared else [],
        depends=[*HEADERS, "setup.py", *(sorted(glob(f"{kernels}/*.h")) if kernels else [])],
    )


class BuildExt(build_ext):
    """build_ext that makes the libraries first, and cythonizes into the build folder in parallel."""

    def run(self) -> None:
        if self.editable_mode:
            # pip hands over temporary folders; the fixed ones let `make` and pip share what is built
            tag = f"{self.plat_name}-{sys.implementation.cache_tag}"
            self.build_temp, self.build_lib = f"build/temp.{tag}", f"build/lib.{tag}"
        self.parallel = self.parallel or JOBS
        # asked now, since build_extensions runs as if nothing were in place
        self.host_library = self.beside("libepcy_host.so")
        for ext in self.extensions:
            ext.library_dirs.append(str(self.host_library.parent))
        if WITH_CUDA:
            self.make_cuda_libraries()
        self.cythonize()
        self.write_record()
        super().run()

    def build_extensions(self) -> None:
        # A python may bring its own folder as a run path: no path of this machine belongs into what is shipped.
        linker = [word for word in self.compiler.linker_so if not word.startswith("-Wl,-rpath,/")]
        self.compiler.set_executables(linker_so=linker)
        self.make_host_library()
        super().build_extensions()

    def cythonize(self) -> None:
        from Cython.Build import cythonize
        from Cython.Compiler.Version import version

        # A folder a Cython version: C made by another one is never taken for current.
        options = {"build_dir": f"build/cython-{version}", "compiler_directives": {"language_level": "3"}}
        made = cythonize(self.extensions, nthreads=JOBS, quiet=True, force=self.force, **options)
        for ext, its in zip(self.extensions, made, strict=True):
            ext.sources, ext.libraries = its.sources, its.libraries

    def beside(self, name: str) -> Path:
        """Name a file of package epcy where this build puts it: in the tree, or in the build folder."""
        return Path(self.get_ext_fullpath("epcy.any")).parent / name

    def write_record(self) -> None:
        """Keep what built these modules, for `python -m epcy`."""
        from Cython.Compiler.Version import version

        record = {
            "cython": version,
            "python": platform.python_version(),
            "cflags": CFLAGS,
            "cuda": CUDA_RECORD,
        }
        text = json.dumps(record, indent=1) + "\n"
        path = self.beside("_build.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)

    def make_host_library(self) -> None:
        """Link src/host once: its modules share one pool of threads a Buffer, one choice of instructions."""
        sources, target = sorted(glob("src/host/*.c")), self.host_library
        target.parent.mkdir(parents=True, exist_ok=True)
        newest = max(map(os.path.getmtime, [*HEADERS, *glob("src/host/*"), "setup.py"]))
        if not self.force and target.exists() and target.stat().st_mtime >= newest:
            return
        temp, cflags = str(Path(self.build_temp, "host")), [*CFLAGS, "-fno-semantic-interposition"]

        def compile_one(source: str) -> list[str]:
            return self.compiler.compile([source], temp, include_dirs=["include"], extra_postargs=cflags)

        with ThreadPoolExecutor(JOBS) as pool:
            objects = [made for part in pool.map(compile_one, sources) for made in part]
        part = target.with_suffix(".part")  # a running process keeps the library that it has mapped
        flags = [*LDFLAGS, "-Wl,-Bsymbolic", "-Wl,-soname,libepcy_host.so"]
        self.compiler.link_shared_object(objects, str(part), extra_postargs=flags)
        part.replace(target)

    def make_cuda_libraries(self) -> None:
        nvcc, nvshmem = find_nvcc(), find_nvshmem()
        archs = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in CUDA_ARCH.split(";")]
        base = [nvcc, *archs, "-rdc=true", "-O3", "-std=c++17", "--fmad=false"]
        base += ["-lineinfo", "-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off"]
        cccl = [f"{d}/cccl" for d in cuda_include_dirs(nvcc) if os.path.isdir(f"{d}/cccl")]
        includes = ["-Iinclude", *(f"-isystem={d}" for d in [nvshmem / "include", *cccl[:1]])]

        # An object is good for one compiler, one NVSHMEM, one architecture list and one set of flags.
        key = "\n".join([nvcc_version(nvcc), nvshmem_version(nvshmem), *map(str, base + includes)])
        temp = Path(self.build_temp, "cuda", hashlib.sha256(key.encode()).hexdigest()[:16])
        temp.mkdir(parents=True, exist_ok=True)
        headers = [*HEADERS, *glob("src/**/*.cuh", recursive=True), *glob("src/**/*.h", recursive=True)]
        newest = max(map(os.path.getmtime, [*headers, "setup.py"]))

        def compile_one(source: str) -> Path:
            obj = temp / (Path(source).stem + ".o")
            if self.force or not obj.exists() or obj.stat().st_mtime < max(newest, os.path.getmtime(source)):
                part = obj.with_suffix(".part.o")  # an interrupted compile leaves no object that looks whole
                few = ["-maxrregcount=64"] if Path(source).stem in CROWDED else []
                self.spawn([*base, *few, *includes, "-c", source, "-o", str(part)])
                part.replace(obj)
            return obj

        with ThreadPoolExecutor(JOBS) as pool:
            objects = list(pool.map(compile_one, cuda_sources()))
        puts = [obj for obj in objects if obj.name.startswith("put_")]
        # nvcc does the device link itself; -cudart static is its default. Kernels of the first library reach peers by
        # plain pointers: of NVSHMEM only the host library is linked, from a folder that wheels share.
        libraries = [
            f"-L{nvshmem}/lib",
            "-l:libnvshmem_host.so.3",
            "-Xlinker=-rpath,$ORIGIN/../nvidia/nvshmem/lib",
        ]
        hidden = "-Xlinker=--exclude-libs,libcudart_static.a:libcudadevrt.a"
        stores = [obj for obj in objects if obj not in puts]
        self.link_cuda("libepcy_cuda.so", stores, [*base, *map(str, stores), *libraries, hidden])
        libraries, hidden = ["-lnvshmem_device", *libraries], f"{hidden}:libnvshmem_device.a"
        self.link_cuda("libepcy_put.so", puts, [*base, *map(str, puts), *libraries, hidden])

    def link_cuda(self, name: str, objects: list[Path], command: list[str]) -> None:
        """Link objects, unless that is done, and copy the library to where the build puts it."""
        linked, target = objects[0].with_name(name), self.beside(name)
        newest = max(obj.stat().st_mtime for obj in objects)
        if self.force or not linked.exists() or linked.stat().st_mtime < newest:
            part = linked.with_name(f"part-{name}")
            self.spawn([*command, "-shared", f"-Xlinker=-soname,{name}", "-o", str(part)])
            part.replace(linked)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")  # a running process keeps the library that it has mapped
        shutil.copyfile(linked, part)
        part.chmod(0o755)
        part.replace(target)


# Two blocks of 512 threads share a multiprocessor there: functions that are called must do with as few registers.
CROWDED = ("put_nodes_combine", "put_nodes_dispatch")


class BuildPy(build_py):
    """build_py that puts include/epcy/*.h into the wheel as epcy/include/epcy/*.h (see epcy/_include.py)."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self.header_pairs():
                os.makedirs(os.path.dirname(target), exist_ok=True)
                shutil.copyfile(source, target)

    def header_pairs(self) -> list[tuple[str, str]]:
        return [(h, os.path.join(self.build_lib, "epcy", h)) for h in HEADERS]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        made = [] if self.editable_mode else [target for _, target in self.header_pairs()]
        return super().get_outputs(include_bytecode) + made


WITH_CUDA = cuda_wanted()
CUDA_ARCH = os.environ.get("EPCY_CUDA_ARCH", "90")
CUDA_RECORD: str | None = None
if WITH_CUDA and find_nvshmem() is None:
    if os.environ.get("EPCY_CUDA") == "1":
        sys.exit("epcy: EPCY_CUDA=1, but NVSHMEM was not found: pip install '.[cuda]' or set NVSHMEM_HOME")
    CUDA_RECORD = "not built: nvcc was found, NVSHMEM was not"
    print(f"epcy: the CUDA backend is {CUDA_RECORD}", file=sys.stderr)
    WITH_CUDA = False
elif WITH_CUDA:
    CUDA_RECORD = f"{nvcc_version(find_nvcc())}, NVSHMEM {nvshmem_version(find_nvshmem())}, sm_{CUDA_ARCH}"

pyx = sorted(glob("epcy/**/*.pyx", recursive=True))
setup(
    ext_modules=[extension(p) for p in pyx if WITH_CUDA or not needs("epcy_cuda", p)],
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
)
