// How the work of a low-latency call is shared out to blocks, and how many there are.
#pragma once
#include "low_latency.cuh"

// The tokens of each rank that a block carries, and the part of their rows that it carries.
struct Tour {
  int token, step, part;
  EPCY_DEVICE explicit Tour(const epcy_low_latency_call &c) {
    const int b = (int)blockIdx.x - 1;
    token = quotient(b, c.num_parts), part = b - token * (int)c.num_parts.by;
    step = quotient(gridDim.x - 1, c.num_parts);
    if (b < 0) token = 1 << 30, part = 0; // the clerk
  }
};

// Blocks with tokens, as many for each part of a row; and the clerk.
inline int low_latency_grid(const epcy_low_latency_call &c) {
  const int P = (int)c.num_parts.by, most = (c.max_blocks - 1) / P, least = EPCY_LOW_LATENCY_MIN_BLOCKS / P;
  int tokens = c.num_tokens > least ? c.num_tokens : least;
  if (tokens > most) tokens = most;
  return (tokens > 0 ? tokens : 1) * P + 1;
}

inline bool is_usual(const epcy_low_latency_call &c) {
  return c.num_ranks == UsualSizes::kRanks && c.num_topk == UsualSizes::kTopk && !c.peers.goes_on;
}

template <typename Kernel> int resident_blocks(Kernel kernel, int threads, size_t shared, int *blocks) {
  int device = 0, sms = 0, each = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess) e = (cudaError_t)allow_shared(kernel);
  if (e == cudaSuccess) e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared);
  const int all = sms * each < EPCY_LOW_LATENCY_MAX_BLOCKS ? sms * each : EPCY_LOW_LATENCY_MAX_BLOCKS;
  if (e == cudaSuccess && all < *blocks) *blocks = all;
  return e;
}
