"""Results as a file that the user of the bench names: for everybody whom the umask lets, like any program's output."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["write"]


def write(path: str, content: dict[str, Any]) -> None:
    """Write the file anew; what JSON cannot say leaves it as it is. Local, blocking.

    Raises
    ------
    OSError
    """
    text = json.dumps(content, indent=1) + "\n"
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
