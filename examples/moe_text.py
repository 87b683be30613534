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
EVERY = 12  # one file in so many is for validation


def read_standard_library(num_bytes):
    """Return (train, validation), uint8 arrays of ``num_bytes`` together (less where the library is shorter).

    The files in the order of their names; whole files go to one side or the other.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    sides, total = ([], []), 0
    for index, name in enumerate(name for name in files if not LEFT_OUT & set(name.split("/"))):
        content = (root / name).read_bytes()[: num_bytes - total]
        sides[index % EVERY == EVERY - 1].append(content)
        total += len(content)
        if total >= num_bytes:
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
