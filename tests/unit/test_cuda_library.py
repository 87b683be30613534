"""What was built of the CUDA backend: the architectures of its kernels, and what is said where there is no GPU."""

import json
import re
import shutil
import struct
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

import epcy
from parallel import ROOT

PACKAGE = Path(epcy.__file__).parent
LIBRARY = PACKAGE / "libepcy_cuda.so"
built = pytest.mark.skipif(not LIBRARY.exists(), reason="the CUDA modules were not built")


@pytest.fixture(scope="module")
def check_wheel():
    spec = util.spec_from_file_location("check_wheel", ROOT / "tools/check_wheel.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fat_binary(*entries):
    """The bytes of a fat binary; an entry is (kind, architecture)."""
    parts = b"".join(
        struct.pack("<HHIQ12xI", kind, 0x101, 64, 24, arch).ljust(64 + 24) for kind, arch in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(parts)) + parts


def test_architectures_are_read(check_wheel):
    library = b"\x7fELF" + fat_binary((2, 80), (2, 100)) + bytes(7) + fat_binary((2, 90), (1, 120))
    assert check_wheel.kernels(library) == ({80, 90, 100}, {120})
    assert check_wheel.complaints(library, {80, 90, 100}) == ["PTX for sm [120]"]
    assert "expected [90]" in check_wheel.complaints(fat_binary((2, 80)), {90})[0]
    assert check_wheel.complaints(None, {90}) == ["epcy/libepcy_cuda.so is missing"]
    assert check_wheel.complaints(None, set()) == []
    assert check_wheel.complaints_of_puts(library, {80, 90}) == []
    assert check_wheel.complaints_of_puts(library, {80, 89}) == [
        "epcy/libepcy_put.so has no machine code for sm [89]"
    ]
    assert check_wheel.complaints_of_puts(None, {90}) == ["epcy/libepcy_put.so is missing"]
    assert check_wheel.complaints_of_puts(None, set()) == []
    with pytest.raises(ValueError, match="kind 9"):
        check_wheel.kernels(fat_binary((9, 80)))


@built
def test_the_library_holds_what_the_build_was_asked_for(check_wheel):
    record = json.loads((PACKAGE / "_build.json").read_text())["cuda"]
    asked = {int(arch) for arch in re.findall(r"\d+", record.split("sm_")[1])}
    assert check_wheel.complaints(LIBRARY.read_bytes(), asked) == []


@built
@pytest.mark.skipif(shutil.which("cuobjdump") is None, reason="no cuobjdump")
def test_cuobjdump_sees_the_same(check_wheel):
    def archs(option):
        done = subprocess.run(["cuobjdump", option, str(LIBRARY)], capture_output=True, text=True, check=True)
        return {int(arch) for arch in re.findall(r"\bsm_(\d+)", done.stdout)}

    assert archs("--list-elf") == check_wheel.kernels(LIBRARY.read_bytes()).sass
    assert archs("--list-ptx") == set()


@built
@pytest.mark.parametrize("library", ["libepcy_cuda.so", "libepcy_put.so"])
def test_the_library_needs_one_library_of_nvidia(library):
    """libcuda comes with a driver, which the machine may lack; it is asked for when a GPU is looked for."""
    if shutil.which("readelf") is None:
        pytest.skip("no readelf")
    done = subprocess.run(
        ["readelf", "-d", str(PACKAGE / library)], capture_output=True, text=True, check=True
    )
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", done.stdout))
    system = r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so\.\d+|ld-linux.*"
    assert {name for name in needed if not re.fullmatch(system, name)} == {"libnvshmem_host.so.3"}


@built
def test_no_module_has_a_path_of_the_machine_that_built_it():
    if shutil.which("readelf") is None:
        pytest.skip("no readelf")
    modules = [*map(str, PACKAGE.rglob("*.so"))]
    done = subprocess.run(["readelf", "-d", *modules], capture_output=True, text=True, check=True)
    found = re.findall(r"(?:RPATH|RUNPATH).*\[(.*)\]", done.stdout)
    assert found
    assert [path for path in ":".join(found).split(":") if not path.startswith("$ORIGIN")] == []


def reason(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@built
def test_the_run_path_finds_nvshmem_without_pathfinder():
    home = PACKAGE.parent / "nvidia/nvshmem/lib/libnvshmem_host.so.3"
    if not home.exists():
        pytest.skip("NVSHMEM's wheel is not beside epcy")
    program = "import sys; sys.modules['cuda.pathfinder'] = None\n"
    program += (
        f"sys.path.insert(0, {str(PACKAGE.parent)!r}); from epcy import backends; backends.load_nvshmem()\n"
    )
    assert reason(program + "from epcy.backends import symmetric; print(symmetric.version()[0])") == "3"


@built
def test_the_modules_import_and_say_why_the_backend_does_not_work():
    program = (
        f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); import epcy; from epcy import backends\n"
    )
    program += "backends.load_nvshmem(); import epcy.backends.nvshmem; from epcy.backends import symmetric\n"
    program += "import epcy.backends.puts\n"
    program += "print(symmetric.num_devices())\n"
    if int(reason(program)):
        pytest.skip("there is a GPU")
    told = reason(
        program + "try: backends.find('nvshmem')\nexcept epcy.BackendUnavailableError as error: print(error)"
    )
    why = "needs a GPU, and CUDA sees none" if util.find_spec("cupy") else "needs CuPy"
    assert why in told and "backend='host'" in told
    assert reason(program + "print(backends.find(None)[0])").endswith("host")
