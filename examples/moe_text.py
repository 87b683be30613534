"""The text of moe_lm.py: the sources of the Python standard library, which every machine has."""

import sysconfig
from pathlib import Path

import numpy as np

LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "lib2to3",
    "pydoc_data",
    "encodings",
}
SHARE = 12  # one byte in about so many is for validation


def read_standard_library(num_bytes):
    """Return (train, validation), uint8 arrays of ``num_bytes`` together (less where the library is shorter).

    The files in the order of their names; whole files go to one side or the other.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    sides, sizes = ([], []), [0, 0]
    for name in files:
        if LEFT_OUT & set(name.split("/")):
            continue
        content = (root / name).read_bytes()[: num_bytes - sum(sizes)]
        side = sizes[1] * SHARE < sizes[0]  # validation's turn as soon as it has less than its share
        sides[side].append(content)
        sizes[side] += len(content)
        if sum(sizes) >= num_bytes:
            break
    train, validation = (np.frombuffer(b"".join(side), np.uint8) for side in sides)
    if min(len(train), len(validation)) < 10_000:
        raise SystemExit(
            "this Python came without the sources of its standard library: there is no text to train on"
        )
    return train, validation


def unigram_entropy(text):
    """Return the entropy of the bytes of ``text`` in nats: what a model that sees no context can reach at best."""
    share = np.bincount(text, minlength=256) / len(text)
    share = share[share > 0]
    return float(-(share * np.log(share)).sum())
