"""`python -m epcy tune`: find the num_sms with which calls of a shape are fastest, all ranks together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from epcy import measured
from epcy.calibrate import time_calls
from epcy.errors import ArgumentError
from epcy.options import BY_NAME

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["key_of", "lookup", "tune"]


def key_of(backend: str, num_ranks: int, values: dict[str, Any]) -> str:
    """Name the machine and the shape that a result is good for. Local."""
    shape = (f"{name} {values[name]}" for name in ("hidden", "num_experts", "num_topk"))
    return measured.key_of(backend, num_ranks, 1, *shape)


def lookup(backend: str, num_ranks: int, values: dict[str, Any]) -> int | None:
    """Return the num_sms that was found best for a shape, or None. Local; a Buffer asks when it is made.

    Raises
    ------
    ArgumentError
        The file is not what `tune` writes, or says what num_sms cannot be.
    """
    if not (measured.folder() / "tuning.json").exists():
        return None
    key = key_of(backend, num_ranks, values)
    entry = measured.get("tuning", key, {"num_sms": int})
    if entry is None:
        return None
    num_sms, limits = int(entry["num_sms"]), BY_NAME["num_sms"]
    if not limits.minimum <= num_sms <= limits.maximum:  # type: ignore[operator]
        raise ArgumentError(
            f"EPCY_CACHE_DIR: {os.fspath(measured.folder() / 'tuning.json')!r}, entry {key!r}: expected num_sms of "
            f"{limits.minimum} to {limits.maximum}, got {num_sms}; remove the file, or measure again"
        )
    return num_sms


def candidates(backend: str, cores_a_rank: int) -> list[int]:
    """Return the values to try. Local."""
    if backend == "nvshmem":
        return [4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128]
    return sorted({n for n in (1, 2, 3, 4, 6, 8, 12, 16) if n <= max(1, cores_a_rank)})


def tune(
    comm: MPI.Intracomm,
    num_tokens: int,
    *,
    seconds: float = 30.0,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> dict[int, dict[str, float]]:
    """Time a dispatch and a combine for each value of num_sms, and keep the best in the user's cache folder.

    Collective, blocking, for about `seconds` at most: values that the time does not suffice for are left out. What
    counts is the sum of both medians, of the slowest rank; the smallest value within 2 % of the best one wins, so that
    what is left over stays with the experts.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    num_tokens : int
        Of each call and rank.
    seconds : float
    say : callable
        Gets a line of text for each value tried, on rank 0.
    **options
        Of the Buffer: hidden, num_experts and num_topk at least.

    Returns
    -------
    dict of int to dict
        Microseconds by num_sms: "dispatch", "combine".
    """
    import epcy

    found: dict[int, dict[str, float]] = {}
    start = time.monotonic()
    options = {"num_max_tokens_per_rank": num_tokens, "dtype": "float16", **options, "preinitialize": True}
    with epcy.Buffer(comm, **options) as buf:
        cores = min(buf.topology.cpus_per_node) // max(buf.topology.ranks_per_node)
        tried = candidates(buf.backend, cores)
        for at, num_sms in enumerate(tried):
            left = seconds - (time.monotonic() - start)
            if comm.bcast(left <= 0) and found:
                break
            buf.set_num_sms(num_sms)
            share = comm.bcast(max(left, 0.1) / (len(tried) - at))
            found[num_sms] = time_calls(buf, num_tokens, buf.options["num_topk"], share)
            if comm.rank == 0:
                us = found[num_sms]
                say(
                    f"{at + 1} of {len(tried)}: num_sms {num_sms:>3}: dispatch {us['dispatch']:.1f} us, "
                    f"combine {us['combine']:.1f} us"
                )
        best = choose(found)
        if comm.rank == 0:
            key = key_of(buf.backend, comm.size, buf.options)
            path = measured.put(
                "tuning",
                key,
                {"num_sms": best, "num_tokens": num_tokens, "us": {str(n): t for n, t in found.items()}},
            )
            say(f"num_sms {best} is kept in {path} for {key}")
    return found


def choose(found: dict[int, dict[str, float]]) -> int:
    """Return the smallest num_sms within 2 % of the best. Local."""
    whole = {num_sms: sum(us.values()) for num_sms, us in found.items()}
    least = min(whole.values())
    return min(num_sms for num_sms, us in whole.items() if us <= 1.02 * least)
