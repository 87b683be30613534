// Low-latency dispatch: a sender counts its own tokens, so that places need no exchange before the data.
#pragma once
#include "low_latency.cuh"

EPCY_DEVICE int64_t raw_id(const epcy_low_latency_dispatch &a, int at) {
  return a.is_int64 ? load_early((const int64_t *)a.topk_idx + at) : (int64_t)load_early((const int32_t *)a.topk_idx + at);
}
EPCY_DEVICE int checked_id(int64_t id, int num_experts) { return (uint64_t)id < (uint64_t)num_experts ? (int)id : -1; }

// The ids of tokens `begin`, `begin` + 1, ... as a block reads them: a thread an id, whole tokens a warp; the first
// kAhead of a thread at once, so that those of an ordinary call are there together with everything else.
struct Ids {
  static constexpr int kAhead = 2;
  int first, token, step; // the thread's first id; the token it is of; tokens that a block reads at a time
  int in_warp;            // which of its warp's tokens that is
  bool used;
  int64_t ahead[kAhead];

  EPCY_DEVICE void load(const epcy_low_latency_dispatch &a, int begin, int end) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, K = a.call.num_topk, tokens = quotient(32, a.call.topk);
    in_warp = quotient(lane, a.call.topk);
    used = in_warp < tokens;
    token = begin + warp * tokens + in_warp, step = kWarps * tokens;
    first = (begin + warp * tokens) * K + lane;
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      ahead[i] = -1;
      if (used && token + i * step < end) ahead[i] = raw_id(a, first + i * step * K);
    }
  }
  // All threads: count the tokens for each expert, those before `mid` in hist[0..E-1], the others in hist[E..2E-1]. A
  // token that names an expert twice counts once. In *bad the first id, by its place, that is none.
  EPCY_DEVICE void count(const epcy_low_latency_dispatch &a, int end, int mid, int *hist, unsigned *bad) const {
    const int lane = threadIdx.x & 31, K = a.call.num_topk, E = a.call.num_experts;
    auto add = [&](int64_t raw, int t, int at) {
      const int id = checked_id(raw, E);
      const unsigned same = __match_any_sync(~0u, id < 0 ? -1 : id | in_warp << 20);
      if (id >= 0 && __ffs(same) - 1 == lane) atomicAdd(hist + (t < mid ? id : E + id), 1);
      if (id < 0 && raw != -1 && bad) atomicMin(bad, (unsigned)at);
    };
    static_assert(EPCY_LOW_LATENCY_MAX_EXPERTS <= 1 << 20, "an id and a token of a warp in one word");
    const int warps_first = token - in_warp; // the same for a whole warp
#pragma unroll
    for (int i = 0; i < kAhead; i++)
      if (warps_first + i * step < end) add(ahead[i], token + i * step, first + i * step * K);
#pragma unroll 1
    for (int i = kAhead; warps_first + i * step < end; i++) {
      const int t = token + i * step, at = first + i * step * K;
      add(used && t < end ? raw_id(a, at) : -1, t, at);
    }
  }
};
