"""Timestamps around the parts of a step, and a Chrome trace of all ranks' (Perfetto, chrome://tracing).

On a GPU a timestamp is a CUDA event on the current stream, so a part lasts as long as its kernels do and not as long as
their launch. Ranks' timelines begin together there, as far as a barrier lets them; on a host all read one clock.
"""

import json
import time
from contextlib import contextmanager

import numpy as np


class Timeline:
    """Parts are recorded while `take` runs a step, and cost nothing otherwise."""

    def __init__(self, xp):
        self.xp, self.parts = xp, None

    def now(self):
        if self.xp is np:
            return time.perf_counter()
        event = self.xp.cuda.Event()
        event.record()
        return event

    @contextmanager
    def part(self, name, row):
        """Record the body under `name`; `row` is who it is done for."""
        if self.parts is None:
            yield
            return
        begin = self.now()
        yield
        self.parts.append((name, row, begin, self.now()))

    def take(self, step):
        """Return (name, row, begin us, end us) of the parts of `step()`; on a GPU since the first of them began."""
        self.parts = []
        try:
            step()
            if self.xp is np:
                return [(name, row, begin * 1e6, end * 1e6) for name, row, begin, end in self.parts]
            first = self.parts[0][2]
            self.parts[-1][3].synchronize()

            def us(event):
                return self.xp.cuda.get_elapsed_time(first, event) * 1e3

            return [(name, row, us(begin), us(end)) for name, row, begin, end in self.parts]
        finally:
            self.parts = None


def with_flights(parts):
    """Add what lies between the halves of a call: from the end of "X send" to the beginning of "X receive"."""
    sent, flights = {}, []
    for name, row, begin, end in parts:
        call, _, half = name.rpartition(" ")
        if half == "send":
            sent[call, row] = end
        elif half == "receive":
            flights.append((f"{call} under way", f"{row}, under way", sent.pop((call, row)), begin))
    return parts + flights


def write_trace(path, comm, timelines):
    """Write every rank's timelines, a dict by title, into one file. Collective."""
    gathered = comm.gather(timelines)
    if comm.rank:
        return
    events = []

    def name_it(kind, name, **place):
        events.append({"name": kind, "ph": "M", "args": {"name": name}, **place})

    for title in timelines:
        zero = min(begin for of_rank in gathered for _, _, begin, _ in of_rank[title])
        for rank, of_rank in enumerate(gathered):
            pid = len(gathered) * list(timelines).index(title) + rank
            name_it("process_name", f"{title}, rank {rank}", pid=pid)
            parts = with_flights(of_rank[title])
            rows = sorted({row for _, row, _, _ in parts})
            for tid, row in enumerate(rows):
                name_it("thread_name", row, pid=pid, tid=tid)
            for name, row, begin, end in parts:
                times = {"ts": round(begin - zero, 3), "dur": round(end - begin, 3)}
                events.append({"name": name, "ph": "X", **times, "pid": pid, "tid": rows.index(row)})
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ns"}, file)
