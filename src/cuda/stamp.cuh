// What kernels tell of themselves: when a call began and its phases ended, how long block 0 waited for each rank, what came.
//
// One thread notes times in shared memory: thread 0 of block 0, where a kernel names no other. At the end its warp writes
// them down, a word a lane. Nothing here is waited for, and nothing else depends on it.
#pragma once
#include "epcy/cuda.h"
#include "ptx.cuh"

struct Stamps {
  uint64_t start_ns, end_ns[EPCY_NUM_SPANS];
};

EPCY_DEVICE Stamps &stamps() { // of this block
  __shared__ Stamps of_block;
  return of_block;
}

EPCY_DEVICE epcy_counters *counters_of(const epcy_peers &p) {
  return (epcy_counters *)(p.base[p.rank] + p.control.counters);
}
EPCY_DEVICE void add_to(uint64_t *at, uint64_t value) {
  atomicAdd((unsigned long long *)at, (unsigned long long)value);
}

EPCY_DEVICE bool is_first_thread() { return blockIdx.x == 0 && threadIdx.x == 0; }

// All threads may call these; the one that `notes` acts.
EPCY_DEVICE void stamp_begin(bool notes) {
  if (!notes) return;
  Stamps &s = stamps();
  for (int i = 0; i < EPCY_NUM_SPANS; i++) s.end_ns[i] = 0;
  s.start_ns = global_time_ns();
}
// A phase ends: what this thread did since the one before.
EPCY_DEVICE void stamp(int span, bool notes = is_first_thread()) {
  if (notes) stamps().end_ns[span] = global_time_ns();
}
// The whole warp of the thread that notes, at the end of a call. `last`: the phase that ends here.
EPCY_DEVICE void stamp_end(epcy_counters *counters, int kind, uint32_t epoch, uint32_t operation, int last,
                           bool notes) {
  Stamps &s = stamps();
  if (notes) s.end_ns[last] = s.end_ns[EPCY_SPAN_CALL] = global_time_ns();
  __syncwarp();
  const int i = threadIdx.x & 31;
  if (i >= EPCY_STAMP_WORDS) return;
  uint64_t *at = (uint64_t *)&counters->stamps[kind][epoch % EPCY_NUM_STAMPS];
  const uint64_t name = (uint64_t)epoch << 32 | operation;
  at[i] = i == 0 || i == EPCY_STAMP_WORDS - 1 ? name : i == 1 ? s.start_ns : s.end_ns[i - 2];
}

// One thread of block 0, after it has waited since `since` for a rank.
EPCY_DEVICE void stamp_wait(const epcy_peers &p, int rank, uint64_t since) {
  add_to(&counters_of(p)->wait_ns[rank], global_time_ns() - since);
}
