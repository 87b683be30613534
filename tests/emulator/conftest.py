"""Every test of this folder runs the kernels of src/cuda on an emulated machine."""

from __future__ import annotations

import pytest

from emulator import build


@pytest.fixture(scope="session", autouse=True)
def machine() -> None:
    """Compile everything, once."""
    reason = build.missing()
    if reason is not None:
        pytest.skip(f"the emulator needs GCC: {reason}")
    for arch in (90, 80):
        build.library(arch)
