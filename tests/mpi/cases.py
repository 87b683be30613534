"""Inputs of all ranks drawn from one seed; what a Buffer gives compared with the reference, bit by bit.

Every rank draws the inputs of all ranks, so that each can run the reference and compare its own part.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from epcy import reference

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"bfloat16": BFLOAT16, "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
# As unsigned integers: zeros, subnormals, largest numbers, infinities, quiet and signalling NaNs.
SPECIAL = {
    2: [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFC5,
        0x7C00, 0xFC00],
    4: [0x0, 0x80000000, 0x1, 0x807FFFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000,
        0xFFC12345],
}  # fmt: skip


@dataclass
class Sent:
    """What all ranks give to one dispatch, one entry a rank."""

    xs: list[Any]
    idxs: list[np.ndarray]
    weights: list[np.ndarray] | None


def to_host(a: Any) -> np.ndarray:
    if not hasattr(a, "get"):
        return np.asarray(a)
    # A copy that waits inside CUDA for a kernel keeps the copies of other threads waiting, and with them their ranks.
    import cupy

    cupy.cuda.get_current_stream().synchronize()
    return a.get()


def settle(buf: Any) -> None:
    """Wait for the calls made so far: a GPU's count when they end. Local."""
    if buf.backend == "nvshmem":
        buf.capture().synchronize()


def to_device(buf: Any, a: Any) -> Any:
    """The array, or the arrays of a tuple or list, in the memory of the Buffer's backend; all else as it is."""
    if isinstance(a, (tuple, list)):
        return type(a)(to_device(buf, part) for part in a)
    return buf.xp.asarray(a) if isinstance(a, np.ndarray) and buf.xp is not np else a


def mine(buf: Any, sent: Sent) -> tuple[Any, Any, Any]:
    """This rank's x, topk_idx and topk_weights, in the memory of the Buffer's backend."""
    weights = None if sent.weights is None else sent.weights[buf.rank]
    return to_device(buf, (sent.xs[buf.rank], sent.idxs[buf.rank], weights))


def to_expert_0(buf: Any, num_tokens: int) -> tuple[Any, Any]:
    """x of `counted_rows` and the ids that send all of it to expert 0, in the memory of the Buffer's backend."""
    return to_device(buf, (counted_rows(buf, num_tokens), np.zeros((num_tokens, 2), np.int64)))


def address_of(a: Any) -> int:
    return a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr


def assert_bits(got: Any, want: Any, what: str) -> None:
    """Compare row by row and bit by bit; the message names the first element that differs."""
    if isinstance(want, tuple):
        assert isinstance(got, tuple) and len(got) == len(want), f"{what}: expected a pair, got {type(got)}"
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            assert_bits(g, w, f"{what}[{i}]")
        return
    got, want = to_host(got), to_host(want)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    unsigned = f"u{want.dtype.itemsize}"
    g, w = np.ascontiguousarray(got).view(unsigned), np.ascontiguousarray(want).view(unsigned)
    if not np.array_equal(g, w):
        at = tuple(np.argwhere(g != w)[0].tolist())
        raise AssertionError(
            f"{what}{list(at)}: {g[at]:#x} ({got[at]}), expected {w[at]:#x} ({want[at]}); "
            f"{np.count_nonzero(g != w)} of {g.size} elements differ"
        )


def draw_rows(rng: np.random.Generator, num_rows: int, hidden: int, dtype: str, special: bool = False) -> Any:
    """Draw (num_rows, hidden); with `special` any bits at all, and every special value among them."""
    if dtype == "fp8":
        payload = rng.integers(0, 256, (num_rows, hidden), np.uint8)
        return payload, draw_rows(rng, num_rows, -(-hidden // reference.GROUP), "float32", special)
    kind = DTYPES[dtype]
    if not special:
        return rng.standard_normal((num_rows, hidden), np.float32).astype(kind)
    size = kind.itemsize
    raw = rng.integers(0, 2 ** (8 * size), (num_rows, hidden), f"u{size}")
    chosen = rng.random(raw.shape) < 0.25
    raw[chosen] = rng.choice(np.array(SPECIAL[size], raw.dtype), np.count_nonzero(chosen))
    return raw.view(kind)


def draw(
    seed: int,
    num_ranks: int,
    tokens: int | Sequence[int],
    *,
    num_experts: int,
    num_topk: int = 2,
    hidden: int = 512,
    dtype: str = "bfloat16",
    ids: Any = np.int64,
    weights: bool = True,
    special: bool = False,
    unused: float = 0.1,
) -> Sent:
    """Draw what all ranks send; experts repeat inside a token, and some lanes are unused (weight NaN)."""
    rng = np.random.default_rng(seed)
    tokens = [tokens] * num_ranks if isinstance(tokens, int) else list(tokens)
    xs, idxs, all_weights = [], [], []
    for num_tokens in tokens:
        xs.append(draw_rows(rng, num_tokens, hidden, dtype, special))
        idx = rng.integers(0, num_experts, (num_tokens, num_topk)).astype(ids)
        idx[rng.random(idx.shape) < unused] = -1
        idxs.append(idx)
        weight = draw_rows(rng, num_tokens, num_topk, "float32", special)
        weight[idx < 0] = np.nan
        all_weights.append(weight)
    return Sent(xs, idxs, all_weights if weights else None)


def limit_of(worst: Any, rank: int) -> int:
    return (worst[rank] or 0) if isinstance(worst, (list, tuple)) else worst


def check_dispatch(
    buf: Any,
    sent: Sent,
    *,
    handle: Any = None,
    routing: Any = None,
    layout: str = "rank",
    alignment: int = 1,
    worst: Any = 0,
    out: Any = None,
) -> tuple[Any, Any]:
    """Dispatch, compare with the reference, and return the result and the reference's routing. Collective.

    `worst` may be one a rank. With `handle` (and the `routing` of it) the ids of `sent` are not given.
    """
    rank, (x, idx, weights) = buf.rank, mine(buf, sent)
    if handle is not None:
        r = buf.dispatch(x, None, weights, handle=handle, out=out)
    else:
        r = buf.dispatch(
            x,
            idx,
            weights,
            layout=layout,
            expert_alignment=alignment,
            num_worst_tokens=limit_of(worst, rank),
            out=out,
        )
    received, routing = reference.dispatch(
        sent.xs,
        sent.idxs if handle is None else None,
        sent.weights,
        num_experts=buf.num_local_experts * buf.size,
        layout=layout,
        expert_alignment=alignment,
        num_worst_tokens=worst,
        routing=routing,
    )
    compare_received(r, received[rank], routing, rank)
    return r, routing


def compare_received(r: Any, want: reference.Received, routing: reference.Routing, rank: int) -> None:
    num_valid = min(want.num_recv_tokens, routing.num_rows(rank))
    got, rows = r.recv_x, want.recv_x
    if isinstance(rows, tuple):
        assert got[0].shape == rows[0].shape and got[1].shape == rows[1].shape
        got, rows = tuple(part[:num_valid] for part in got), tuple(part[:num_valid] for part in rows)
    else:
        assert got.shape == rows.shape
        got, rows = got[:num_valid], rows[:num_valid]
    assert_bits(got, rows, "recv_x")
    assert_bits(r.recv_topk_idx, want.recv_topk_idx, "recv_topk_idx")
    if want.recv_topk_weights is None:
        assert r.recv_topk_weights is None
    else:
        assert_bits(r.recv_topk_weights, want.recv_topk_weights, "recv_topk_weights")
    assert r.num_recv_tokens_per_expert == want.num_recv_tokens_per_expert
    assert_bits(r.handle.num_tokens_per_expert, routing.num_tokens_per_expert[rank], "num_tokens_per_expert")
    assert int(r.handle.num_recv_tokens) == want.num_recv_tokens
    assert bool(r.handle.overflow) == want.overflow
    if want.expert_offsets is None:
        assert r.handle.expert_offsets is None
    else:
        assert_bits(r.handle.expert_offsets, want.expert_offsets, "expert_offsets")


def check_combine(
    buf: Any,
    handle: Any,
    routing: reference.Routing,
    seed: int,
    *,
    dtype: str = "bfloat16",
    weights: bool = True,
    num_biases: int = 0,
    special: bool = False,
    staged: bool = True,
    out: Any = None,
) -> Any:
    """Combine drawn rows, compare with the reference, and return the result. Collective.

    `staged` False writes the rows into combine_input first.
    """
    rng, rank = np.random.default_rng([seed, 1]), buf.rank
    hidden, ranks = buf.options["hidden"], range(buf.size)
    tokens, num_topk = [len(idx) for idx in routing.topk_idx], routing.topk_idx[0].shape[1]
    ys = [draw_rows(rng, routing.num_rows(r), hidden, dtype, special) for r in ranks]
    by_rank = routing.layout == "rank"
    num_weights = [routing.num_rows(r) for r in ranks] if by_rank else tokens
    ws = [draw_rows(rng, n, num_topk, "float32", special) for n in num_weights]
    ws = ws if weights else None
    bias = None
    if num_biases:
        pairs = [tuple(draw_rows(rng, n, hidden, dtype, special) for _ in range(num_biases)) for n in tokens]
        bias = pairs if num_biases == 2 else [pair[0] for pair in pairs]
    y = to_device(buf, ys[rank])
    if not staged:
        inside = buf.combine_input(handle, DTYPES[dtype])
        assert inside.shape == y.shape and inside.dtype == y.dtype
        inside[...] = y
        y = inside
    c = buf.combine(
        y,
        handle,
        None if ws is None else to_device(buf, ws[rank]),
        bias=None if bias is None else to_device(buf, bias[rank]),
        out=out,
    )
    want, want_weights = reference.combine(
        ys, routing, ws, bias=bias, node_of_rank=buf.topology.node_of_rank, path=buf.options["path"]
    )[rank]
    assert_bits(c.combined_x, want, "combined_x")
    if want_weights is None:
        assert c.combined_topk_weights is None
    else:
        assert_bits(c.combined_topk_weights, want_weights, "combined_topk_weights")
    return c


def counted_rows(comm: Any, num_tokens: int, hidden: int = 512) -> np.ndarray:
    """Rows of the listed cases: x[t, :] = 1 + 16 * rank + t, exact in bfloat16 while it is below 256.

    `comm` is a communicator or a Buffer.
    """
    column = 1 + 16 * (comm.rank % 8) + np.arange(num_tokens)[:, None] % 16
    return np.broadcast_to(column, (num_tokens, hidden)).astype(BFLOAT16)


def raised(call: Any) -> BaseException | None:
    """The error that a call raises, or None."""
    try:
        call()
    except Exception as error:
        return error
    return None


def works(buf: Any, seed: int = 3) -> None:
    """A legal dispatch and combine are right. Collective."""
    options = buf.options
    sent = draw(
        seed,
        buf.size,
        min(6, options["num_max_tokens_per_rank"]),
        num_experts=buf.num_local_experts * buf.size,
        hidden=options["hidden"],
        num_topk=options["num_topk"],
    )
    r, routing = check_dispatch(buf, sent)
    check_combine(buf, r.handle, routing, seed)


@contextlib.contextmanager
def counting() -> Iterator[list[int]]:
    """A thread that counts up the one number of the list, every millisecond, as long as it gets the interpreter."""
    counts, over = [0], threading.Event()

    def count() -> None:
        while not over.is_set():
            counts[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        yield counts
    finally:
        over.set()
        thread.join()


def told(buf: Any, call: Any) -> BaseException | None:
    """The error of a call, raised by it or, where its host does not wait, by check() after it."""
    return raised(lambda: (call(), buf.check()))
