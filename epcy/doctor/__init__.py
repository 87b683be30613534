"""What `python -m epcy doctor` asks: whether this machine, and this job, is set up for epcy; and what to do if not.

`facts.gather` reads, `checks` and `network` judge what was read, `ranks` compares what ranks have read, `report` shows.
Judging touches nothing: the same facts give the same findings anywhere.
"""

from __future__ import annotations

from epcy.doctor.finding import Finding
from epcy.doctor.report import examine, render

__all__ = ["Finding", "examine", "render"]
