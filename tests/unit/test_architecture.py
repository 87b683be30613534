"""ARCHITECTURE.md's map names what there is, and nothing that there is not."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAP = re.search(
    r"^## Where things are\n\n```\n(.*?)^```", (ROOT / "ARCHITECTURE.md").read_text(), flags=re.S | re.M
)[1]
WORDS = set(re.findall(r"[\w./*]*\w(?:\.\w+|/)", MAP))  # files and folders


def tracked():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("no git checkout")
    return [Path(line) for line in done.stdout.splitlines()]


def shown(path):
    """Whether the map is to name a file: headers of one source, and what Python wants, go with others."""
    if path.name.startswith(("_", "conftest")) or path.suffix not in (".py", ".pyx", ".c", ".cu"):
        return False
    folder = path.parent.as_posix()
    return folder in (
        "epcy",
        "epcy/backends",
        "epcy/recording",
        "epcy/doctor",
        "src/meter",
        "src/window",
        "tests",
    )


def test_every_module_is_named():
    missing = [path.as_posix() for path in tracked() if shown(path) and path.name not in WORDS]
    assert not missing, missing


def test_every_folder_is_named():
    folders = {
        parent
        for path in tracked()
        for parent in list(path.parents)[:-1]
        if parent.parts[0] in ("epcy", "tests", "src")
    }
    deep = {folder for folder in folders if len(folder.parts) == 2}
    missing = [
        folder.as_posix() for folder in deep if not {f"{folder.name}/", f"{folder.as_posix()}/"} & WORDS
    ]
    assert not missing, missing


def test_what_is_named_is_there():
    names = {path.name for path in tracked()}
    gone = [word for word in WORDS if not word.endswith("/") and not word.startswith("epcy.") and "*" not in word
            and word not in names]  # fmt: skip
    assert not gone, gone
