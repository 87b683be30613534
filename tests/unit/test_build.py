"""What is shipped: sdist and wheel, stubs, generated pages, and the commands that README.md names."""

import configparser
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from functools import cache

import pytest

from parallel import ROOT

PYX = sorted(ROOT.glob("epcy/**/*.pyx"))


def run(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# ---- sdist and wheel


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The unpacked sdist of a copy of the tree (building leaves files behind)."""
    copy = tmp_path_factory.mktemp("copy of") / "tree"
    built = shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", "*.so", "*.egg-info", "__pycache__", ".*_cache", "_build.json"
    )
    shutil.copytree(ROOT, copy, ignore=built)
    run([sys.executable, "setup.py", "-q", "sdist"], cwd=copy, env={**os.environ, "EPCY_CUDA": "0"})
    (archive,) = copy.glob("dist/*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(copy / "unpacked", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (folder,) = (copy / "unpacked").iterdir()
    return folder


def test_sdist_has_every_source(sdist):
    patterns = (
        "epcy/**/*.py*",
        "epcy/py.typed",
        "include/**/*.h",
        "src/**/*.*",
        "tools/*.py",
        "tests/**/*.py*",
    )
    patterns += ("tests/**/*.c", "examples/*.py", "docs/*.*", "*.md", "LICENSE", "Makefile", "setup.*")
    wanted = {p.relative_to(ROOT) for pattern in patterns for p in ROOT.glob(pattern) if p.is_file()}
    wanted = {p for p in wanted if p.suffix not in (".pyc", ".so") and p.name != "_build.json"}
    missing = sorted(str(p) for p in wanted if not (sdist / p).exists())
    assert not missing
    assert not list(sdist.glob("**/*.so")), "an sdist has no binaries"


@pytest.fixture(scope="module")
def site(sdist, tmp_path_factory):
    """A folder with what a wheel made from the sdist installs; neither nvcc nor an index is asked."""
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index"]
    run([*command, "-w", str(target), str(sdist)], env={**os.environ, "EPCY_CUDA": "0"})
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target / "site")
    return target / "site"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_wheel_works_alone(site, tmp_path):
    for kind in ("*.pxd", "*.pyi", "py.typed"):
        for path in ROOT.glob(f"epcy/**/{kind}"):
            assert (site / path.relative_to(ROOT)).exists(), path
    for header in ROOT.glob("include/epcy/*.h"):
        assert (site / "epcy" / header.relative_to(ROOT)).exists(), header
    program = (
        "import epcy, epcy.buffer as b; print(epcy.get_include(), b.__file__, epcy.__version__, sep='\\n')"
    )
    said = run([sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)})
    include, module, version = said.splitlines()
    assert include == str(site / "epcy" / "include")
    assert module.startswith(str(site))
    (metadata,) = site.glob("epcy-*.dist-info/METADATA")
    text = metadata.read_text()
    assert f"\nVersion: {version}\n" in text
    assert "\nLicense-Expression: MIT\n" in text or "\nLicense: MIT\n" in text


# ---- the package


def test_version_is_written_once():
    import epcy

    assert importlib.metadata.version("epcy") == epcy.__version__
    places = ["setup.py", "setup.cfg", "pyproject.toml", *map(str, ROOT.glob("epcy/**/*.py"))]
    assert [p for p in places if epcy.__version__ in (ROOT / p).read_text()] == [
        str(ROOT / "epcy/_version.py")
    ]


def test_nvshmem_is_pinned_alike_for_build_and_run():
    spec = importlib.util.spec_from_file_location("build_backend", ROOT / "tools/build_backend.py")
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert backend.NVSHMEM in config["options.extras_require"]["cuda"].splitlines()
    assert f"\nNVSHMEM := {backend.NVSHMEM}\n" in (ROOT / "Makefile").read_text()


def test_import_starts_nothing():
    program = (
        "import sys, epcy; epcy.get_include(); epcy.ArgumentError; "
        "assert 'mpi4py.MPI' not in sys.modules and 'cupy' not in sys.modules"
    )
    run([sys.executable, "-c", program], cwd=ROOT)


@pytest.mark.parametrize("pyx", PYX, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_stub_and_declarations_lie_beside_each_module(pyx):
    assert pyx.with_suffix(".pyi").exists()
    assert pyx.with_suffix(".pxd").exists()


def test_generated_pages_are_current():
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}run `make docs`"


# ---- README.md


def readme_commands():
    """Return the command lines of the shell blocks of README.md, continuation lines joined."""
    readme = ROOT / "README.md"
    blocks = re.findall(r"```(?:sh|bash|shell|console)\n(.*?)```", readme.read_text(), flags=re.S)
    text = "\n".join(blocks).replace("\\\n", " ")
    lines = (line.strip().removeprefix("$ ").split("  #")[0] for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


@cache
def help_of(*program):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return run([sys.executable, *program, "--help"], cwd=ROOT, env=env)


@pytest.mark.parametrize("command", readme_commands())
def test_readme_command_exists(command):
    words = [w for w in shlex.split(command) if not re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", w)]
    if words[:1] == ["mpiexec"]:
        assert words[1] == "-n" and words[2].isdigit()
        words = words[3:]
        assert words[1:3] == ["-m", "mpi4py"], "a rank that raises would hang the job"
        del words[1:3]
    if words[0] in ("make", "git", "cd", "pip"):
        if words[0] == "make":
            makefile = (ROOT / "Makefile").read_text()
            for verb in words[1:]:
                pattern = re.sub(r"-\d+$", "-%", verb)
                assert re.search(rf"^{re.escape(pattern)}:", makefile, flags=re.M), f"make has no verb {verb}"
        return
    assert re.fullmatch(r"python3?", words[0]), f"a test cannot check {command!r}"
    program = tuple(words[1:3] if words[1] == "-m" else words[1:2])
    if program[0].endswith(".py"):
        assert (ROOT / program[0]).exists()
    flags = [w.split("=")[0] for w in words[1 + len(program) :] if re.match(r"--?[a-z]", w)]
    for flag in flags:
        assert re.search(rf"(^|[\s,\[]){re.escape(flag)}\b", help_of(*program)), f"{program} has no {flag}"
