"""What a file must be for the trace-event format's readers."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

SHARED_GPU_US = (
    20_000  # ranks of one GPU take turns, a time slice each, between any two of their instructions
)


def check(path: Path, shares_gpu: bool = False) -> dict[str, Any]:
    """Read a trace; fail where slices do not nest, a flow lacks an end, or time goes back. Returns the file."""
    content = json.loads(Path(path).read_text())
    events = content["traceEvents"]
    slices, flows = defaultdict(list), defaultdict(dict)
    last = 0.0
    for event in events:
        assert event["ph"] in "XMsf", event
        if event["ph"] == "M":
            continue
        assert event["ts"] >= last, f"{event} comes before {last}"
        last = event["ts"]
        place = event["pid"], event["tid"]
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["name"], event
            slices[place].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        else:
            assert event["ph"] not in flows[event["id"]], f"two ends {event}"
            flows[event["id"]][event["ph"]] = (place, event["ts"])
            assert (event["ph"] == "f") == (event.get("bp") == "e"), event
    for place, found in slices.items():
        open_until: list[tuple[float, str]] = []
        for begin, end, name in sorted(found, key=lambda one: (one[0], -one[1])):
            while open_until and open_until[-1][0] <= begin + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1][0] + 1e-3, (
                f"{name} of {place} leaves {open_until[-1]}"
            )
            open_until.append((end, name))
    slack_us = 2 * content.get("otherData", {}).get("clock_error_us", 0.0) + shares_gpu * SHARED_GPU_US
    for number, ends in flows.items():
        assert set(ends) == {"s", "f"}, f"flow {number} has {set(ends)} alone"
        assert ends["s"][1] <= ends["f"][1] + slack_us, f"flow {number} goes back in time: {ends}"
        for place, at in ends.values():
            inside = any(begin - 1e-3 <= at <= end + 1e-3 for begin, end, _ in slices[place])
            assert inside, f"flow {number} begins or ends outside of every slice of {place}"
    names = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    assert {place[0] for place in slices} <= names or not names
    return content
