"""What is worked out of a line's times: bytes, rates, and the floor beside them."""

from __future__ import annotations

from typing import Any

import numpy as np

from epcy.bench.clocks import Measured
from epcy.bench.datasets import DataSet
from epcy.bench.measure import Bytes


def count_bytes(case: str, sets: list[list[DataSet]]) -> Bytes:
    """Count the bytes that one call moves, a rank: the mean over ranks and over the drawings that are timed."""
    setting = sets[0][0].setting
    ranks = range(setting.size)
    by_lane = setting.mode == "ll" or setting.layout == "expert"
    wire, moved = [], []
    for data in (one for of_generation in sets for one in of_generation):
        back_by_lane = setting.mode == "ll" and setting.reduction == "source"
        there, back, all_rows = (
            np.array([[data.rows_between(s, d, every_lane) for d in ranks] for s in ranks])
            for every_lane in (False, back_by_lane, by_lane)
        )
        away = [int(rows.sum() - rows.trace()) for rows in (there, back)]
        row_bytes = [
            setting.sent_row_bytes if case != "combine" else 0,
            setting.returned_row_bytes if case != "dispatch" else 0,
        ]
        wire.append(sum(n * one for n, one in zip(away, row_bytes, strict=True)) / setting.size)
        moved.append(2 * int(all_rows.sum()) * sum(row_bytes) / setting.size)
    return Bytes(wire=float(np.mean(wire)), moved=float(np.mean(moved)))


def figures(
    measured: Measured, moved: Bytes, peer_copy_gbps: float | None, floor_gbps: float | None
) -> dict[str, Any]:
    """Return the fields of a row that are worked out from times, bytes and rates."""
    times = measured.times
    gbps_wire = moved.wire / times.us_p50 / 1e3
    floor_gbps = floor_gbps or peer_copy_gbps
    floor_us = moved.wire / floor_gbps / 1e3 if floor_gbps and moved.wire else None
    return {
        "us_min": times.us_min,
        "us_p50": times.us_p50,
        "us_p99": times.us_p99,
        "us_undisturbed_p50": times.us_undisturbed_p50,
        "num_disturbed": times.num_disturbed,
        "bytes_wire": round(moved.wire),
        "gbps_wire": gbps_wire,
        "bytes_moved": round(moved.moved),
        "gbps_moved": moved.moved / times.us_p50 / 1e3,
        "peer_copy_gbps": peer_copy_gbps,
        "peer_copy_share": gbps_wire / peer_copy_gbps if peer_copy_gbps else None,
        "floor_gbps": floor_gbps,
        "floor_us": floor_us,
        "over_floor": times.us_p50 / floor_us if floor_us else None,
    }
