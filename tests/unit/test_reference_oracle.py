"""The reference against a second telling of the same rules: one token at a time, numbers as Python's own.

Nothing here comes from NumPy's arithmetic. A float32 operation is a double operation rounded once to float32
(for + and * of two float32 that is exact), formats are rounded on their bits, and rows are found by listing
them.
"""

import ctypes
import math
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epcy import reference

DTYPES = {
    "bf16": (np.dtype(ml_dtypes.bfloat16), np.uint16),
    "fp16": (np.dtype(np.float16), np.uint16),
    "fp32": (np.dtype(np.float32), np.uint32),
}
# Zeros, subnormals, ones, the largest, infinities, quiet and signalling NaNs, of both signs.
SPECIAL = {
    "bf16": [0x0000, 0x0001, 0x007F, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7FC1, 0x7F81],
    "fp16": [0x0000, 0x0001, 0x03FF, 0x3C00, 0x3C01, 0x7BFF, 0x7C00, 0x7E01, 0x7C01],
    "fp32": [0x00000000, 0x00000001, 0x3F800000, 0x3F800001, 0x7F7FFFFF, 0x7F800000, 0x7FC00001, 0x7F800001],
}


def f32(x):
    return ctypes.c_float(x).value


def from_bits(bits, kind):
    if kind == "bf16":
        return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    code, integer = ("<e", "<H") if kind == "fp16" else ("<f", "<I")
    return struct.unpack(code, struct.pack(integer, bits))[0]


def to_bits(x, kind):
    if math.isnan(x):
        return {"bf16": 0x7FC0, "fp16": 0x7E00, "fp32": 0x7FC00000}[kind]
    word = struct.unpack("<I", bytes(ctypes.c_float(x)))[0]
    if kind == "fp32":
        return word
    if kind == "bf16":
        return (word + 0x7FFF + ((word >> 16) & 1)) >> 16
    try:
        return struct.unpack("<H", struct.pack("<e", x))[0]
    except OverflowError:
        return 0xFC00 if x < 0 else 0x7C00


class World:
    """All ranks of one drawn case."""

    def __init__(self, draw):
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        self.R, self.L = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        self.E, self.K, self.H = self.R * self.L, draw(st.integers(1, 4)), draw(st.integers(1, 3))
        self.T = [draw(st.integers(0, 5)) for _ in range(self.R)]
        self.kind = draw(st.sampled_from(sorted(DTYPES)))
        self.layout = draw(st.sampled_from(["rank", "expert"]))
        self.alignment = draw(st.sampled_from([1, 2, 4, 5]))
        self.limits = draw(st.none() | st.lists(st.integers(0, 12), min_size=self.R, max_size=self.R))
        id_type = draw(st.sampled_from([np.int32, np.int64]))
        self.idx = [rng.integers(-2, self.E + 1, (t, self.K)).astype(id_type) for t in self.T]
        self.w = [self.weights(rng, (t, self.K)) for t in self.T]
        self.rng = rng

    def weights(self, rng, shape):
        w = rng.standard_normal(shape).astype(np.float32)
        return np.where(rng.random(shape) < 0.1, np.float32("nan"), w)

    def floats(self, shape):
        """Bits of the payload type: numbers of similar size (so that sums round and cancel), and specials."""
        dtype, unsigned = DTYPES[self.kind]
        bits = self.rng.standard_normal(shape).astype(dtype).view(unsigned)
        special = self.rng.choice(np.array(SPECIAL[self.kind], dtype=unsigned), shape)
        sign = self.rng.integers(0, 2, shape).astype(unsigned) << unsigned(8 * dtype.itemsize - 1)
        return np.where(self.rng.random(shape) < 0.2, special | sign, bits)

    def array(self, bits):
        return bits.view(DTYPES[self.kind][0])

    def owner(self, e):
        return e // self.L if 0 <= e < self.E else None

    def rows(self, rank):
        """All rows due at a rank, in order: (source, token, lane, local expert), None for padding."""
        rows = []
        if self.layout == "rank":
            for s in range(self.R):
                for t in range(self.T[s]):
                    if any(self.owner(e) == rank for e in self.idx[s][t].tolist()):
                        rows.append((s, t, None, None))
            return rows
        for local in range(self.L):
            for s in range(self.R):
                for t in range(self.T[s]):
                    for k in range(self.K):
                        if self.idx[s][t, k] == rank * self.L + local:
                            rows.append((s, t, k, local))
            while len(rows) % self.alignment:
                rows.append(None)
        return rows

    def limit(self, rank):
        return self.limits[rank] if self.limits and self.limits[rank] else None


@st.composite
def worlds(draw):
    return World(draw)


def dispatched(world):
    xs = [world.floats((t, world.H)) for t in world.T]
    received, routing = reference.dispatch(
        [world.array(x) for x in xs],
        world.idx,
        world.w,
        num_experts=world.E,
        layout=world.layout,
        expert_alignment=world.alignment,
        num_worst_tokens=world.limits,
    )
    return xs, received, routing


@settings(max_examples=300, deadline=None)
@given(worlds())
def test_dispatch(world):
    xs, received, _ = dispatched(world)
    for rank, got in enumerate(received):
        rows, limit = world.rows(rank), world.limit(rank)
        num_rows = len(rows) if limit is None else limit
        assert got.num_recv_tokens == len(rows)
        assert got.overflow == (len(rows) > num_rows)
        assert got.recv_x.shape == (num_rows, world.H)
        x_bits = got.recv_x.view(DTYPES[world.kind][1])
        w_bits = got.recv_topk_weights.view(np.uint32)
        for n in range(num_rows):
            row = rows[n] if n < len(rows) else None
            if row is None:
                assert (np.atleast_1d(got.recv_topk_idx[n]) == -1).all()
                assert (np.atleast_1d(w_bits[n]) == 0).all()
                if n < len(rows):
                    assert (x_bits[n] == 0).all()
                continue
            s, t, lane, local = row
            assert x_bits[n].tolist() == xs[s][t].tolist()
            sent = world.w[s].view(np.uint32)[t].tolist()
            if world.layout == "expert":
                assert got.recv_topk_idx[n] == local
                assert w_bits[n] == sent[lane]
                continue
            ids = world.idx[s][t].tolist()
            mine = [world.owner(e) == rank for e in ids]
            assert got.recv_topk_idx[n].tolist() == [
                e - rank * world.L if m else -1 for e, m in zip(ids, mine, strict=True)
            ]
            assert w_bits[n].tolist() == [w if m else 0 for w, m in zip(sent, mine, strict=True)]
        every = [e for idx in world.idx for e in idx.ravel().tolist()]
        counts = [every.count(rank * world.L + local) for local in range(world.L)]
        assert got.num_recv_tokens_per_expert == (counts if limit is None else None)
        if world.layout == "rank":
            assert got.expert_offsets is None
        else:
            starts = [
                sum(-(-c // world.alignment) * world.alignment for c in counts[:e])
                for e in range(world.L + 1)
            ]
            assert got.expert_offsets.tolist() == starts


def value_from_rank(world, place, ys, s, t, h, rank, scale):
    """What one rank contributes to element h of a token, as a float; None if it holds no row of it."""
    if world.layout == "rank":
        n = place[rank].get((s, t, None))
        return None if n is None else from_bits(int(ys[rank][n, h]), world.kind)
    lanes = [k for k in range(world.K) if (s, t, k) in place[rank]]
    if not lanes:
        return None
    p = 0.0
    for k in lanes:
        y = from_bits(int(ys[rank][place[rank][s, t, k], h]), world.kind)
        w = 1.0 if scale is None else float(scale[s][t, k])
        p = f32(p + f32(w * y))
    return from_bits(to_bits(p, world.kind), world.kind)


@settings(max_examples=300, deadline=None)
@given(worlds(), st.booleans(), st.integers(0, 2), st.none() | st.integers(1, 4), st.randoms())
def test_combine(world, weighted, num_biases, ranks_per_node, random):
    # Nodes of ranks that follow each other, or any ranks at all.
    placed = None
    if ranks_per_node is not None and random.random() < 0.5:
        placed, ranks_per_node = [random.randrange(ranks_per_node) for _ in range(world.R)], None
    _, received, routing = dispatched(world)
    ys = [world.floats(r.recv_x.shape) for r in received]
    biases = [[world.floats((t, world.H)) for _ in range(num_biases)] for t in world.T]
    by_rank = world.layout == "rank"
    given_weights = (
        [world.weights(world.rng, r.recv_topk_idx.shape) for r in received] if by_rank else world.w
    )
    combined = reference.combine(
        [world.array(y) for y in ys],
        routing,
        given_weights if weighted else None,
        bias=[tuple(world.array(b) for b in pair) for pair in biases] if num_biases else None,
        ranks_per_node=ranks_per_node,
        node_of_rank=placed,
        path="direct" if ranks_per_node is None and placed is None else "hierarchical",
    )
    place = []
    for rank in range(world.R):
        rows = world.rows(rank)
        limit = len(rows) if world.limit(rank) is None else world.limit(rank)
        place.append({row[:3]: n for n, row in enumerate(rows[:limit]) if row is not None})
    scale = world.w if weighted and not by_rank else None
    size = world.R if ranks_per_node is None else ranks_per_node
    node_of = placed or [r // size for r in range(world.R)]
    nodes = [[r for r in range(world.R) if node_of[r] == node] for node in sorted(set(node_of))]
    one_node = len(nodes) == 1
    for s, (got, got_weights) in enumerate(combined):
        got_bits = got.view(DTYPES[world.kind][1])
        for t in range(world.T[s]):
            for h in range(world.H):
                acc = 0.0
                for b in biases[s]:
                    acc = f32(acc + from_bits(int(b[t, h]), world.kind))
                for node in nodes:
                    here = [value_from_rank(world, place, ys, s, t, h, rank, scale) for rank in node]
                    here = [v for v in here if v is not None]
                    if not one_node and here:
                        total = 0.0
                        for v in here:
                            total = f32(total + v)
                        here = [from_bits(to_bits(total, world.kind), world.kind)]
                    for v in here:
                        acc = f32(acc + v)
                assert got_bits[t, h] == to_bits(acc, world.kind)
            if got_weights is None:
                continue
            for k, e in enumerate(world.idx[s][t].tolist()):
                rank = world.owner(e)
                n = None if rank is None else place[rank].get((s, t, None))
                expected = 0 if n is None else given_weights[rank].view(np.uint32)[n, k]
                assert got_weights.view(np.uint32)[t, k] == expected
        assert (got_weights is None) == (not (by_rank and weighted))


@settings(max_examples=200, deadline=None)
@given(worlds(), st.sampled_from(["rank", "source"]), st.booleans())
def test_low_latency(world, reduction, weighted):
    M = max(world.T) + 1
    xs = [world.floats((t, world.H)) for t in world.T]
    received, routing = reference.low_latency_dispatch(
        [world.array(x) for x in xs], world.idx, num_experts=world.E, num_max_tokens_per_rank=M, use_fp8=False
    )
    place = {}
    for e in range(world.E):
        rank, local = divmod(e, world.L)
        rows = [(s, t) for s in range(world.R) for t in range(world.T[s]) if e in world.idx[s][t].tolist()]
        assert received[rank].recv_count[local] == len(rows)
        for n, (s, t) in enumerate(rows):
            got = received[rank].recv_x[local, n].view(DTYPES[world.kind][1])
            assert got.tolist() == xs[s][t].tolist()
            place[s, t, e] = (rank, local, n)
    ys = [world.floats((world.L, world.R * M, world.H)) for _ in range(world.R)]
    combined = reference.low_latency_combine(
        [world.array(y) for y in ys], routing, world.w if weighted else None, reduction=reduction
    )
    for s in range(world.R):
        for t in range(world.T[s]):
            ids = world.idx[s][t].tolist()
            for h in range(world.H):
                acc, partial = 0.0, {}
                for k, e in enumerate(ids):
                    if world.owner(e) is None:
                        continue
                    rank, local, n = place[s, t, e]
                    w = float(world.w[s][t, k]) if weighted else 1.0
                    product = f32(w * from_bits(int(ys[rank][local, n, h]), world.kind))
                    acc = f32(acc + product)
                    partial[rank] = f32(partial.get(rank, 0.0) + product)
                if reduction == "rank":
                    acc = 0.0
                    for rank in sorted(partial):
                        acc = f32(acc + from_bits(to_bits(partial[rank], world.kind), world.kind))
                assert combined[s].view(DTYPES[world.kind][1])[t, h] == to_bits(acc, world.kind)


@pytest.mark.parametrize("kind", sorted(DTYPES))
def test_the_oracle_reads_and_writes_every_special(kind):
    """Guard the guard: what from_bits reads, to_bits writes back, NaNs apart."""
    for bits in SPECIAL[kind]:
        value = from_bits(bits, kind)
        assert math.isnan(value) or to_bits(value, kind) == bits
