"""What epcy costs beside the libraries it needs: time to import, and resident memory after 100 rounds.

    python benchmarks/footprint.py                              import times, medians of 10 fresh processes
    mpiexec -n 2 python -m mpi4py benchmarks/footprint.py       memory, each rank's and the largest

Memory is VmRSS after 100 rounds of dispatch and combine less VmRSS after importing numpy, ml_dtypes and mpi4py.MPI,
beside the heap of a rank that `Buffer.size_hint` names. Shared pages count for every rank that has touched them, so a
rank's figure holds pages of its peers' heaps too.
"""

import json
import statistics
import subprocess
import sys
import time

SHAPE = {"num_max_tokens_per_rank": 1024, "hidden": 2048, "num_experts": 64, "num_topk": 8}


def import_seconds(modules):
    """Median over 10 fresh processes of the time that importing takes inside them."""
    code = f"import time; start = time.perf_counter(); import {modules}; print(time.perf_counter() - start)"
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(11)
    ]
    return statistics.median(float(run.stdout) for run in runs[1:])  # the first one warms the disk's cache


def resident_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


def memory(comm):
    before = resident_bytes()  # numpy, ml_dtypes and mpi4py.MPI are here
    import epcy

    rng = np.random.default_rng(comm.rank)
    x = rng.standard_normal((1024, 2048)).astype(ml_dtypes.bfloat16)
    idx = np.argsort(rng.random((1024, 64)), 1)[:, :8]
    weights = rng.random((1024, 8), np.float32)
    inputs = x.nbytes + idx.nbytes + weights.nbytes
    with epcy.Buffer(comm, **SHAPE) as buf:
        for _ in range(100):
            r = buf.dispatch(x, idx, weights)
            z = buf.combine(r.recv_x, r.handle)
        after = resident_bytes()
    grown = comm.allgather(after - before - inputs - z.combined_x.nbytes)
    heap = epcy.Buffer.size_hint(comm.size, **SHAPE)["total"]
    if comm.rank == 0:
        print(json.dumps({"ranks": comm.size, **SHAPE, "heap_bytes": heap, "resident_bytes": grown,
                          "over_heap_mb": max(0.0, max(grown) / 1e6 - heap / 1e6)}))  # fmt: skip


if __name__ == "__main__":
    import ml_dtypes
    import numpy as np
    from mpi4py import MPI

    if MPI.COMM_WORLD.size > 1:
        memory(MPI.COMM_WORLD)
    else:
        base, with_epcy = import_seconds("numpy, mpi4py"), import_seconds("numpy, mpi4py, epcy")
        buffer = import_seconds("numpy, mpi4py, epcy; epcy.Buffer")
        print(json.dumps({"date": time.strftime("%Y-%m-%d"), "numpy_mpi4py_s": round(base, 4),
                          "with_epcy_s": round(with_epcy, 4), "with_epcy_buffer_s": round(buffer, 4)}))  # fmt: skip
