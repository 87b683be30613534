"""What the link between two GPUs does in the same run: the copy engine, and TMA stores and loads by some SMs.

`one way`: rank 0 to or from rank 1, all else idle. `all ranks`: every rank to or from the next at once, and the
slowest counts. Rates are GB/s of a rank, medians.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

import epcy
from epcy.bench.clocks import SPIN, SPIN_US
from epcy.bench.draws import BFLOAT16, address_of

NUM_ROWS, ROW_BYTES, STAGES, SMS, RUNS = 4096, 16384, 8, 24, 20
PUT_BLOCKS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 132)

# One thread of a block keeps STAGES rows in flight. push: shared memory to `far`; pull: `far` to shared memory.
PROBE = """
typedef unsigned long long u64;
__device__ __forceinline__ unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u64 global_address(const void *p) { return (u64)__cvta_generic_to_global(p); }

extern "C" __global__ void push(char *far, int num_rows) {
  extern __shared__ __align__(128) char rows[];
  if (threadIdx.x != 0) return;
  int stage = 0;
  for (int row = blockIdx.x; row < num_rows; row += gridDim.x, stage = (stage + 1) % STAGES) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::
                 "l"(global_address(far + (u64)row * ROW_BYTES)), "r"(shared_address(rows + stage * ROW_BYTES)),
                 "r"(ROW_BYTES) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(STAGES - 1) : "memory");
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {
  unsigned done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
}

extern "C" __global__ void pull(char *far, int num_rows) {
  extern __shared__ __align__(128) char rows[];
  __shared__ u64 barriers[STAGES];
  if (threadIdx.x != 0) return;
  for (int i = 0; i < STAGES; i++)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(&barriers[i])) : "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
  int turn = 0;
  for (int row = blockIdx.x; row < num_rows; row += gridDim.x, turn++) {
    const int stage = turn % STAGES;
    const unsigned barrier = shared_address(&barriers[stage]);
    if (turn >= STAGES) wait(barrier, (turn / STAGES - 1) & 1);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(ROW_BYTES) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
                 "r"(shared_address(rows + stage * ROW_BYTES)), "l"(global_address(far + (u64)row * ROW_BYTES)),
                 "r"(ROW_BYTES), "r"(barrier) : "memory");
  }
  for (int last = turn > STAGES ? turn - STAGES : 0; last < turn; last++)
    wait(shared_address(&barriers[last % STAGES]), (last / STAGES) & 1);
}
""".replace("STAGES", str(STAGES)).replace("ROW_BYTES", str(ROW_BYTES))


def measure(comm: MPI.Intracomm) -> dict[str, float] | None:
    """Return the rates by name, or None on one rank. Collective, blocking; on the nvshmem backend."""
    if comm.size == 1:
        return None
    with epcy.Buffer(
        comm,
        num_max_tokens_per_rank=NUM_ROWS,
        num_max_recv_tokens=NUM_ROWS,
        hidden=ROW_BYTES // 2,
        num_experts=comm.size,
        num_topk=1,
        backend="nvshmem",
        preinitialize=True,
    ) as buf:
        cupy = buf.xp
        with cupy.cuda.Device(buf.options["device"]), cupy.cuda.Stream(non_blocking=True):
            return _measure(comm, buf, cupy)


def _measure(comm: MPI.Intracomm, buf: epcy.Buffer, cupy: Any) -> dict[str, float]:
    # A dispatch whose rows fill a receive area tells where such an area lies; it lies there on every rank.
    peer = (comm.rank + 1) % comm.size
    rows = cupy.zeros((NUM_ROWS, ROW_BYTES // 2), BFLOAT16)
    area = buf.dispatch(rows, cupy.full((NUM_ROWS, 1), peer, np.int64)).recv_x
    far = buf._peer_address(peer) + address_of(area) - buf._peer_address(buf.rank)
    stream = cupy.cuda.get_current_stream()
    runtime = cupy.cuda.runtime

    def copy() -> None:
        runtime.memcpyAsync(far, address_of(rows), rows.nbytes, runtime.memcpyDefault, stream.ptr)

    names = {"copy": copy}
    if int(cupy.cuda.Device().compute_capability) >= 90:
        for name in ("push", "pull"):
            kernel = cupy.RawKernel(PROBE, name)
            kernel.max_dynamic_shared_size_bytes = STAGES * ROW_BYTES

            def probe(kernel: Any = kernel) -> None:
                kernel((SMS,), (32,), (np.uint64(far), np.int32(NUM_ROWS)), shared_mem=STAGES * ROW_BYTES)

            names[name] = probe
    rates = {}
    for name, work in names.items():
        rates[f"{name}_one_way_gbps"] = _rate(comm, buf, cupy, work if comm.rank == 0 else None)
        rates[f"{name}_all_ranks_gbps"] = _rate(comm, buf, cupy, work)
    return rates


def measure_puts(comm: MPI.Intracomm, hidden: int) -> dict[str, float]:
    """Return the rates of NVSHMEM's own block put of rows of `hidden` bfloat16, and with how many blocks it is best.

    Collective, blocking; empty where all ranks are of one node.
    """
    with epcy.Buffer(
        comm,
        num_max_tokens_per_rank=NUM_ROWS,
        num_max_recv_tokens=NUM_ROWS,
        hidden=hidden,
        num_experts=comm.size,
        num_topk=1,
        backend="nvshmem",
    ) as buf:
        if buf.topology.num_nodes == 1:
            return {}
        cupy, nodes = buf.xp, buf.topology.node_of_rank
        steps = range(1, comm.size)
        peer = next(  # of another node
            other
            for other in ((comm.rank + i) % comm.size for i in steps)
            if nodes[other] != nodes[comm.rank]
        )
        rates: dict[str, float] = {}
        with cupy.cuda.Device(buf.options["device"]), cupy.cuda.Stream(non_blocking=True) as stream:
            for name, ranks in (("one_way", [0]), ("all_ranks", list(range(comm.size)))):
                found = {}
                for blocks in PUT_BLOCKS:

                    def work(blocks: int = blocks) -> None:
                        buf._put_rows(peer, NUM_ROWS, blocks, stream)

                    found[blocks] = _rate(comm, buf, cupy, work if comm.rank in ranks else None, hidden * 2)
                best = max(found, key=lambda blocks: found[blocks])
                rates[f"put_{name}_gbps"], rates[f"put_{name}_blocks"] = found[best], best
        return rates


def _rate(comm: MPI.Intracomm, buf: epcy.Buffer, cupy: Any, work: Any, row_bytes: int = ROW_BYTES) -> float:
    stream, start, stop = cupy.cuda.get_current_stream(), cupy.cuda.Event(), cupy.cuda.Event()
    spin = cupy.RawKernel(SPIN, "spin")
    us = np.zeros(RUNS)
    for index in range(-3, RUNS):
        buf._align(stream)
        spin((1,), (1,), (np.uint64(SPIN_US * 1000),))
        start.record(stream)
        if work is not None:
            work()
        stop.record(stream)
        stream.synchronize()
        if index >= 0 and work is not None:
            us[index] = cupy.cuda.get_elapsed_time(start, stop) * 1e3
    slowest = np.array(comm.allgather(us)).max(axis=0)
    return float(NUM_ROWS * row_bytes / np.median(slowest) / 1e3)
