"""The errors of a call that the ranks find in each other's records and words, with their texts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from epcy.backends.names import LAYOUTS, PAYLOADS, REDUCTIONS
from epcy.errors import (
    ArgumentError,
    BackendError,
    CapacityError,
    EpcyError,
    HeapError,
    MismatchError,
    PeerError,
    PeerTimeoutError,
)
from epcy.status import OPERATIONS

__all__ = [
    "as_our_own",
    "bad_id",
    "crossed",
    "dropped",
    "elsewhere",
    "ended",
    "implausible",
    "late",
    "left_out",
    "low_latency_mismatch",
    "mismatch",
    "never_came",
    "no_room_for_rows",
    "nonsense",
    "not_announced",
    "with_rank",
]

# A record's fields, as they are compared: operation, dtype, layout, cached, has weights, alignment, routing.
Record = tuple[int, int, int, int, int, int, int]
# Those of a low-latency call: operation, dtype, use_fp8, round_scale, use_ue8m0, reduction, use_logfmt, has weights,
# routing.
LowLatencyRecord = tuple[int, int, int, int, int, int, int, int, int]


# What is left to do after a free() that failed: no reset(), which a Buffer that was freed does not take.
FREED = "this rank has left the Buffer all the same, and its memory goes when the process ends"


def late(
    operation: str,
    epoch: int,
    rank: int,
    culprits: Sequence[int],
    phase: str,
    expected: int,
    seen: Sequence[int],
    where: str,
    gone: Sequence[int],
    waited: float,
    timeout: float,
) -> PeerTimeoutError:
    """Return the error of a wait that did not end: `culprits` are late, `gone` gave up themselves."""
    # Nobody is late: this rank was, and they left without it.
    if gone and all(word >= expected for word in seen):
        happened = f"rank {gone[0]} gave up before this rank came (timeout={timeout:g} s)"
        remedy = f"Find out what kept rank {rank}"
    else:
        gave_up = f"rank {gone[0]} gave up" if gone and waited < timeout else "gave up"
        happened = (
            f"{gave_up} {waited:.2f} s into this wait (timeout={timeout:g} s); waited for ranks {culprits} in phase "
            f"{phase}, expected {expected}, seen {seen}"
        )
        remedy = f"Find out what keeps rank {culprits[0]}"
    after = "reset() on all ranks makes this Buffer usable again"
    if operation == "reset":
        after = "call reset() again on every rank where it raised: it goes on where it was"
    elif operation == "free":
        after = FREED
    return PeerTimeoutError(
        f"{operation} (call {epoch}) on rank {rank}: {happened}: {where}. {remedy}, or give a larger timeout; {after}",
        culprits,
        phase,
        epoch,
    )


def ended(
    operation: str, epoch: int, rank: int, dead: Sequence[int], pid: int, phase: str, node: str = ""
) -> PeerTimeoutError:
    """Return the error of a wait for processes that have ended; `node` is a word on where the first one was."""
    return PeerTimeoutError(
        f"{operation} (call {epoch}) on rank {rank}: rank {dead[0]} (pid {pid}{node}) has ended, phase {phase}; dead "
        f"ranks: {dead}. This Buffer cannot go on; look for that rank's own error and restart the job",
        dead,
        phase,
        epoch,
    )


def mismatch(epoch: int, records: Sequence[Record]) -> MismatchError:
    """Return the error that names the first field in which the records differ."""
    rows = []
    for op, dtype, layout, cached, has_weights, alignment, routing in records:
        rows.append(
            [
                ("operation", f"in {OPERATIONS[op]}"),
                ("x.dtype", PAYLOADS[dtype]),
                ("layout", LAYOUTS[layout]),
                ("handle", "given" if cached else "not given"),
                ("topk_weights", "given" if has_weights else "not given"),
                ("expert_alignment", str(alignment)),
                ("handle", f"that of call {routing}"),
            ]
        )
    return _first_difference(epoch, rows)


def elsewhere(epoch: int, rank: int, operations: Sequence[int]) -> MismatchError:
    """Return the error of ranks that wait for each other in different operations; 0: a rank that is in none yet."""
    shown = ", ".join(
        f"rank {r}: {f'in {OPERATIONS[op]}' if op else 'in no call yet'}" for r, op in enumerate(operations)
    )
    after = FREED if operations[rank] == OPERATIONS.index("free") else "call reset() on all ranks first"
    return MismatchError(
        f"operation: the ranks disagree in call {epoch} of rank {rank}: {shown}; every rank must make the same calls "
        f"on a Buffer in the same order; {after}"
    )


def low_latency_mismatch(epoch: int, records: Sequence[LowLatencyRecord]) -> MismatchError:
    """Return the same for low-latency calls; a rank in another call has a record of zeros after its operation."""
    rows = []
    for op, dtype, use_fp8, round_scale, use_ue8m0, reduction, use_logfmt, has_weights, routing in records:
        rows.append(
            [
                ("operation", f"in {OPERATIONS[op]}" if op else "in another call"),
                ("x.dtype", PAYLOADS[dtype]),
                ("use_fp8", str(bool(use_fp8))),
                ("round_scale", str(bool(round_scale))),
                ("use_ue8m0", str(bool(use_ue8m0))),
                ("reduction", repr(REDUCTIONS[reduction])),
                ("use_logfmt", str(bool(use_logfmt))),
                ("topk_weights", "given" if has_weights else "not given"),
                ("handle", f"that of call {routing}"),
            ]
        )
    return _first_difference(epoch, rows)


def _first_difference(epoch: int, rows: Sequence[Sequence[tuple[str, str]]]) -> MismatchError:
    columns = list(zip(*rows, strict=True))
    column = next((c for c in columns if len({value for _, value in c}) > 1), columns[-1])
    shown = ", ".join(f"rank {rank}: {value}" for rank, (_, value) in enumerate(column[:16]))
    return MismatchError(
        f"{column[0][0]}: the ranks disagree in call {epoch}: {shown}; every rank must make the same calls on a Buffer "
        "in the same order"
    )


def bad_id(
    rank: int, token: int, lane: int, value: int, num_experts: int, num_bad: int | None = None
) -> ArgumentError:
    """Return the error of ids in topk_idx that name no expert: one of them, and their number where it is known."""
    more = "" if num_bad is None else f"; {num_bad} such ids in all"
    return ArgumentError(
        f"topk_idx[{token}, {lane}]: expected an expert id in 0..{num_experts - 1} or -1, got {value} (rank {rank}, "
        f"token {token}, lane {lane}{more})"
    )


def implausible(epoch: int, rank: int, to: int, count: int, num_tokens: int, num_lanes: int) -> PeerError:
    """Return the error of counts that no routing gives."""
    return PeerError(
        f"rank {rank} announced {count} tokens with {num_lanes} lanes for rank {to} in dispatch (call {epoch}), of "
        f"{num_tokens} tokens in all: that cannot be, its memory was overwritten; nothing was moved. Look for writes "
        "past the ends of recv_x on any rank (EPCY_CHECK=1 watches them)",
        [rank],
    )


def nonsense(epoch: int, rank: int) -> PeerError:
    """Return the error of a low-latency slot whose lists no routing gives."""
    return PeerError(
        f"rank {rank} sent lists in low_latency_dispatch (call {epoch}) that cannot be: its memory was overwritten; "
        "nothing was received. Look for writes past the ends of recv_x on any rank (EPCY_CHECK=1 watches them)",
        [rank],
    )


def left_out(epoch: int, operation: str, ranks: Sequence[int]) -> PeerError:
    """Return the error of a rank that others go on without."""
    return PeerError(
        f"{operation} (call {epoch}): ranks {list(ranks)} have masked this one by now and go on without it; what comes "
        "from them and goes to them may be missing (handle.missing_ranks). They may call unmask_rank, and all ranks "
        "reset()",
        ranks,
    )


def crossed(
    operation: str, epoch: int, rank: int, other: int, other_operation: str, other_epoch: int, here: int
) -> MismatchError:
    """Return the error of two ranks that wait for each other in different Buffers."""
    after = f"reset() the other one; of this one, {FREED}" if operation == "free" else "reset() both"
    return MismatchError(
        f"operation: the ranks use their Buffers in different orders: rank {rank} is in {operation} (call {epoch}) of "
        f"this Buffer and has not left call {here} of another one, where rank {other} is in {other_operation} (call "
        f"{other_epoch}); issue the calls of different Buffers in the same order on every rank, and {after}"
    )


def never_came(epoch: int, rank: int, row: int, num_rows: int, announced: Sequence[int] | None) -> PeerError:
    """Return the error of a row that was announced and not written."""
    source, before = _source(row, announced)
    return PeerError(
        f"dispatch (call {epoch}): row {row} of {num_rows} on rank {rank} was announced and never came{source}; the "
        f"counts by rank were {announced}. Its count lied, or its rows went elsewhere",
        before,
    )


def not_announced(
    epoch: int, rank: int, row: int, num_rows: int, announced: Sequence[int] | None
) -> PeerError:
    """Return the error of a row past all that were announced."""
    return PeerError(
        f"dispatch (call {epoch}): row {row} of rank {rank} was written, {num_rows} were announced (by rank "
        f"{announced}); some rank's count lied",
        [],
    )


def _source(row: int, announced: Sequence[int] | None) -> tuple[str, list[int]]:
    end = 0
    for rank, count in enumerate(announced or ()):
        end += count
        if row < end:
            return f" from rank {rank}", [rank]
    return "", []


def no_room_for_rows(epoch: int, rank: int, num_rows: int, limit: int) -> str:
    """Say that a receive area is too small; on `rank` a CapacityError, elsewhere a PeerError."""
    return (
        f"num_max_recv_tokens: rank {rank} would receive {num_rows} rows in dispatch (call {epoch}), its receive area "
        f"holds {limit}; construct the Buffer with num_max_recv_tokens={num_rows} or more"
    )


def dropped(epoch: int, rank: int, num_rows: int, limit: int) -> CapacityError:
    """Return the error of rows past num_worst_tokens."""
    return CapacityError(
        f"num_worst_tokens: rank {rank} received {num_rows} rows in dispatch (call {epoch}), num_worst_tokens={limit}; "
        f"the rest was dropped: give num_worst_tokens={num_rows} or more"
    )


def as_our_own(error: Exception, step: str) -> Exception:
    """Return an error of Python's for want of memory or of the operating system as one of ours; others as they are."""
    if isinstance(error, EpcyError):
        return error
    text = str(error) or type(error).__name__
    if isinstance(error, MemoryError):
        return HeapError(
            f"memory: none left in {step} ({text}); give smaller sizes, or allow more memory (ulimit -v, cgroup)"
        )
    if isinstance(error, OSError):
        return BackendError(f"system: a call failed in {step} ({text})", "libc", error.errno or 0)
    return error


def with_rank(error: EpcyError, rank: int) -> EpcyError:
    """Return an error that says on which rank it is: itself, where its text names one. Local.

    What looks at options, variables and files does not know its rank; who exchanges errors does.
    """
    if re.search(r"\brank \d", str(error)):
        return error
    named = type(error)(f"{error} (rank {rank})")
    named.__dict__.update(error.__dict__)
    return named.with_traceback(error.__traceback__)
