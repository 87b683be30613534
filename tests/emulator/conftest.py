"""Every test of this folder runs the kernels of src/cuda on an emulated machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)


@pytest.fixture(scope="session", autouse=True)
def machine() -> None:
    import build

    reason = build.missing()
    if reason is not None:
        pytest.skip(f"the emulator needs GCC: {reason}")
    build.library(90)


def pytest_configure() -> None:
    sys.path.insert(0, HERE)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
