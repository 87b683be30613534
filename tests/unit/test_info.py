"""`python -m epcy` comes out on any machine, and says why a backend is missing."""

import json
import os
import subprocess
import sys

import pytest

from epcy.__main__ import main
from epcy.options import OPTIONS
from parallel import ROOT


def run(*arguments, path=None, **env):
    """Run `python -m epcy` with changed variables; None removes one. `path` goes in front of PYTHONPATH."""
    merged = {**os.environ, "PYTHONPATH": os.pathsep.join([*([str(path)] if path else []), str(ROOT)]), **env}
    return subprocess.run(
        [sys.executable, "-m", "epcy", *arguments],
        env={name: value for name, value in merged.items() if value is not None},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture
def fake(tmp_path):
    """A function that makes an importable package whose import raises."""

    def make(name, text):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
        return tmp_path

    return make


def test_text():
    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for section in ("versions", "build", "MPI", "backends", "machine", "options"):
        assert f"\n{section}\n" in "\n" + done.stdout
    for option in OPTIONS:
        assert option.name in done.stdout and option.env in done.stdout


def test_json():
    done = run("--json", EPCY_TIMEOUT="12.5", EPCY_TIMEOTU="3", EPCY_CACHE_DIR="somewhere")
    info = json.loads(done.stdout)
    assert [o["name"] for o in info["options"]] == [o.name for o in OPTIONS]
    timeout = next(o for o in info["options"] if o["name"] == "timeout")
    assert (timeout["value"], timeout["origin"]) == (12.5, "EPCY_TIMEOUT")
    assert info["unknown_variables"] == ["EPCY_TIMEOTU"]
    assert json.loads(run("info", "--json").stdout).keys() == info.keys()
    for verdict in info["backends"].values():
        assert verdict["available"] is (verdict["reason"] is None)


def test_a_wrong_variable_is_told_and_hides_nothing():
    info = json.loads(run("--json", EPCY_TIMEOUT="soon", EPCY_NUM_SMS="2").stdout)
    options = {o["name"]: o for o in info["options"]}
    assert "EPCY_TIMEOUT" in options["timeout"]["error"] and "soon" in options["timeout"]["error"]
    assert options["num_sms"]["value"] == 2


def test_variables_of_nvshmem():
    env = {"NVSHMEM_IBGDA_NUM_RC_PER_PE": "4"}
    assert json.loads(run("--json", **env).stdout)["nvshmem_variables"].items() >= env.items()
    assert "NVSHMEM_IBGDA_NUM_RC_PER_PE  4" in run(**env).stdout


def test_without_mpi_library(fake):
    package = fake(
        "mpi4py", "class rc: pass\ndef __getattr__(name): raise ImportError('cannot load MPI library')\n"
    )
    done = run("--json", path=package)
    info = json.loads(done.stdout)
    assert not info["backends"]["host"]["available"]
    assert "mpi4py.MPI cannot be imported" in info["backends"]["host"]["reason"]
    assert "cannot load MPI" in info["backends"]["host"]["reason"]
    assert run(path=package).returncode == 0


def test_without_mpiexec(tmp_path):
    info = json.loads(run("--json", PATH=str(tmp_path)).stdout)
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    assert info["mpi"]["mpiexec"] == (beside if os.path.exists(beside) else None)


def test_a_cupy_that_breaks(fake):
    package = fake("cupy", "import os\nos.abort()\n")
    info = json.loads(run("--json", path=package).stdout)
    assert not info["backends"]["nvshmem"]["available"] and info["gpus"] == []


def test_bad_command():
    done = run("nonsense")
    assert done.returncode == 2 and "nonsense" in done.stderr


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf", "1e30", "soon"])
@pytest.mark.parametrize(
    "command", ["top --interval", "calibrate --seconds", "tune --seconds", "replay x --timeout"]
)
def test_seconds_that_nobody_can_wait(capsys, command, seconds):
    with pytest.raises(SystemExit) as left:
        main([*command.split(), seconds])
    assert left.value.code == 2
    assert f"expected seconds, above 0 and at most 1e+09, got '{seconds}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, words",
    [("--launcher no-such-launcher", "launcher: 'no-such-launcher' is no program on PATH"),
     ("--launcher '", "launcher: cannot be read as words")],
)  # fmt: skip
def test_replays_that_nothing_can_start(capsys, options, words):
    assert main(["replay", "no-such-file.npz", "--launcher", "true", *options.split()]) == 2
    assert words in capsys.readouterr().err
