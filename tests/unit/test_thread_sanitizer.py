"""The flags of src/host under the thread sanitizer, threads as ranks: the sources are without a race, and with a flag's
release or acquire taken out of them they are not."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = ["-std=gnu11", "-O1", "-g", "-fsanitize=thread", "-Wno-tsan", "-Wno-psabi", "-ffp-contract=off",
         "-fno-math-errno"]  # fmt: skip


def compiled(program: Path, host: Path = ROOT / "src" / "host") -> Path:
    sources = [*map(str, sorted(host.glob("*.c"))), str(ROOT / "tests" / "c" / "threads_as_ranks.c")]
    include = [f"-I{ROOT / 'include'}", f"-I{host}"]
    done = subprocess.run(
        ["gcc", *FLAGS, *include, *sources, "-pthread", "-lm", "-o", str(program)],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    if "cannot find" in done.stderr and "tsan" in done.stderr:
        pytest.skip("gcc has no thread sanitizer here")
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, num_ranks: int, num_rounds: int = 200) -> subprocess.CompletedProcess[str]:
    # the sanitizer wants its addresses where they are expected
    command = ["setarch", "-R", str(program), str(num_ranks), str(num_rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60,
                          env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"})  # fmt: skip
    if "setarch" in done.stderr or "unexpected memory mapping" in done.stderr:
        pytest.skip("this machine does not let the sanitizer choose its addresses")
    return done


@pytest.fixture(scope="module", autouse=True)
def tools():
    for tool in ("gcc", "setarch"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool}")


def test_no_race(tmp_path):
    program = compiled(tmp_path / "threads_as_ranks")
    for num_ranks in (2, 3, 4):
        done = run(program, num_ranks)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("line", "order"),
    [
        (
            "atomic_store_explicit(word_at(h, h->rank, word), value, memory_order_release)",
            "memory_order_release",
        ),
        ("atomic_load_explicit(word_at(h, rank, word), memory_order_acquire)", "memory_order_acquire"),
    ],
)
def test_without_an_order_there_is_one(tmp_path, line, order):
    host = tmp_path / "host"
    shutil.copytree(ROOT / "src" / "host", host)
    control = host / "control.c"
    source = control.read_text()
    assert source.count(line) == 1
    control.write_text(source.replace(line, line.replace(order, "memory_order_relaxed")))
    done = run(compiled(tmp_path / "mutant", host), 2)
    assert done.returncode != 0 and "data race" in done.stderr, done.stderr
