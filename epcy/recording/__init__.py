"""Calls of a real job, kept to be made again: `record` keeps them, `read` and `write` are their file.

`python -m epcy.bench replay FILE` makes them again, on either backend; `python -m epcy replay --shrink FILE` finds the
smallest part of them that still fails.
"""

from __future__ import annotations

from epcy.recording.calls import Call, Recorded, Recording
from epcy.recording.file import read, write
from epcy.recording.recorder import record
from epcy.recording.spread import spread

__all__ = ["Call", "Recorded", "Recording", "read", "record", "spread", "write"]
