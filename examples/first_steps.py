"""Send tokens to experts and bring them back: the smallest use of epcy.

    mpiexec -n 2 python -m mpi4py examples/first_steps.py

Every rank holds a few tokens; each token goes to two of eight experts, which live on one rank or on two;
expert e multiplies what it gets by e + 1. combine adds up what the ranks return.
"""

import numpy as np
from mpi4py import MPI

import epcy

NUM_TOKENS, HIDDEN, NUM_EXPERTS, NUM_TOPK = 4, 8, 8, 2

with epcy.Buffer(
    MPI.COMM_WORLD,
    num_max_tokens_per_rank=NUM_TOKENS,
    hidden=HIDDEN,
    num_experts=NUM_EXPERTS,
    num_topk=NUM_TOPK,
    dtype="float32",
    backend="host",
) as buf:
    rng = np.random.default_rng(buf.rank)
    x = np.ones((NUM_TOKENS, HIDDEN), np.float32) * (np.arange(NUM_TOKENS, dtype=np.float32)[:, None] + 1)
    topk_idx = np.argsort(rng.random((NUM_TOKENS, NUM_EXPERTS)), axis=1)[:, :NUM_TOPK]
    topk_weights = np.full((NUM_TOKENS, NUM_TOPK), 0.5, np.float32)

    # One row for each (token, rank); the lanes say which experts here.
    r = buf.dispatch(x, topk_idx, topk_weights)
    first_expert = buf.rank * buf.num_local_experts
    factor = np.where(r.recv_topk_idx >= 0, r.recv_topk_weights * (first_expert + r.recv_topk_idx + 1), 0)
    y = r.recv_x * factor.sum(axis=1, keepdims=True, dtype=np.float32)
    z = buf.combine(y, r.handle).combined_x  # (T, H): back where the tokens came from

    expected = x * (0.5 * (topk_idx + 1)).sum(axis=1, keepdims=True).astype(np.float32)
    if not np.array_equal(z, expected):
        raise SystemExit(f"rank {buf.rank}: wrong sums")
    if buf.rank == 0:
        for token in range(NUM_TOKENS):
            print(
                f"token {token}: {x[token, 0]:g} through experts {topk_idx[token].tolist()} is {z[token, 0]:g}"
            )
