"""Run on any number of ranks: every token goes to all ranks and comes back once from each."""

import numpy as np
import router
from mpi4py import MPI

import epcy

comm = MPI.COMM_WORLD
size, num_tokens = comm.size, 5
with epcy.Buffer(
    comm, num_max_tokens_per_rank=8, hidden=64, num_experts=2 * size, num_topk=size, dtype="float32"
) as buffer:
    x = np.full((num_tokens, 64), comm.rank + 1, np.float32)
    topk_idx = np.tile(2 * np.arange(size, dtype=np.int64), (num_tokens, 1))
    assert router.owners(buffer, topk_idx) == [list(range(size))] * num_tokens
    combined, num_rows = router.roundtrip(buffer, x, topk_idx)
    assert num_rows == size * num_tokens, num_rows
    assert (combined == size * x).all()
if comm.rank == 0:
    print("thirdparty works on", size)
