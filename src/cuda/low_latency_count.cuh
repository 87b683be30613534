// Low-latency dispatch: a sender counts its own tokens, so that places need no exchange before the data.
#pragma once
#include "low_latency.cuh"

// An id as it was given, of 32 bits or 64.
struct Id {
  int32_t low, high;
  EPCY_DEVICE void load(const epcy_low_latency_dispatch &a, int at) {
    load_early(a.is_int64, (const char *)a.topk_idx + (int64_t)at * (a.is_int64 ? 8 : 4), &low, &high);
  }
  EPCY_DEVICE int checked(const epcy_low_latency_dispatch &a) const { // or -1
    return (uint32_t)low < (uint32_t)a.call.num_experts && (!a.is_int64 || high == 0) ? low : -1;
  }
  EPCY_DEVICE bool is_unused(const epcy_low_latency_dispatch &a) const {
    return low == -1 && (!a.is_int64 || high == -1);
  }
};

// The lane of the same token that names the same expert first; `at`: which lane of its token the thread's is.
template <typename N> EPCY_DEVICE int first_lane(const epcy_low_latency_call &c, int id, int at) {
  int first = at;
#pragma unroll
  for (int d = 1; d < N::topk(c); d++) { // a vote on equal ids would take a turn for each of them
    const int other = __shfl_up_sync(~0u, id, d);
    if (at >= d && other == id) first = at - d;
  }
  return first;
}

// The ids of tokens `begin`, `begin` + 1, ... as a block reads them: a thread an id, whole tokens a warp; the first
// two of a thread at once, so that those of an ordinary call are there together with everything else.
template <typename N> struct Ids {
  int first, token, step; // the thread's first id; the token it is of; tokens that a block reads at a time
  int in_warp, at;        // which of its warp's tokens that is, and which lane of it
  bool used;
  Id ahead[2];

  EPCY_DEVICE void load(const epcy_low_latency_dispatch &a, int begin, int end) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, K = N::topk(a.call), tokens = N::by_topk(a.call, 32);
    in_warp = N::by_topk(a.call, lane), at = lane - in_warp * K;
    used = in_warp < tokens;
    token = begin + warp * tokens + in_warp, step = kWarps * tokens;
    first = (begin + warp * tokens) * K + lane;
#pragma unroll
    for (int i = 0; i < 2; i++) look(a, i, end, &ahead[i]);
  }
  EPCY_DEVICE void look(const epcy_low_latency_dispatch &a, int i, int end, Id *id) const {
    id->low = id->high = -1;
    if (used && token + i * step < end) id->load(a, first + i * step * N::topk(a.call));
  }
  // All threads: count the tokens for each expert in hist[E]. A token that names an expert twice counts once. In *bad the
  // first id, by its place, that is none.
  EPCY_DEVICE void count(const epcy_low_latency_dispatch &a, int end, int *hist, unsigned *bad) {
    const int K = N::topk(a.call);
#pragma unroll 1
    for (int i = 0; token - in_warp + i * step < end; i++) { // the same for a whole warp
      const Id given = ahead[0];
      ahead[0] = ahead[1], look(a, i + 2, end, &ahead[1]);
      const int id = given.checked(a);
      if (first_lane<N>(a.call, id, at) == at && id >= 0) atomicAdd(hist + id, 1);
      if (EPCY_RARELY(id < 0 && !given.is_unused(a) && bad)) atomicMin(bad, (unsigned)(first + i * step * K));
    }
  }
};
