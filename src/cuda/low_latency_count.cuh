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

// The ids of tokens `begin`, `begin` + 1, ... as a block reads them: a thread an id, whole tokens a warp; the first
// two of a thread at once, so that those of an ordinary call are there together with everything else.
struct Ids {
  int first, token, step; // the thread's first id; the token it is of; tokens that a block reads at a time
  int in_warp;            // which of its warp's tokens that is
  bool used;
  Id ahead[2];

  EPCY_DEVICE void load(const epcy_low_latency_dispatch &a, int begin, int end) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, K = a.call.num_topk, tokens = quotient(32, a.call.topk);
    in_warp = quotient(lane, a.call.topk);
    used = in_warp < tokens;
    token = begin + warp * tokens + in_warp, step = kWarps * tokens;
    first = (begin + warp * tokens) * K + lane;
#pragma unroll
    for (int i = 0; i < 2; i++) look(a, i, end, &ahead[i]);
  }
  EPCY_DEVICE void look(const epcy_low_latency_dispatch &a, int i, int end, Id *id) const {
    id->low = id->high = -1;
    if (used && token + i * step < end) id->load(a, first + i * step * a.call.num_topk);
  }
  // All threads: count the tokens for each expert, those before `mid` in hist[0..E-1], the others in hist[E..2E-1]. A
  // token that names an expert twice counts once. In *bad the first id, by its place, that is none.
  EPCY_DEVICE void count(const epcy_low_latency_dispatch &a, int end, int mid, int *hist, unsigned *bad) {
    const int lane = threadIdx.x & 31, K = a.call.num_topk, E = a.call.num_experts;
    static_assert(EPCY_LOW_LATENCY_MAX_EXPERTS <= 1 << 20, "an id and a token of a warp in one word");
#pragma unroll 1
    for (int i = 0; token - in_warp + i * step < end; i++) { // the same for a whole warp
      const Id given = ahead[0];
      ahead[0] = ahead[1], look(a, i + 2, end, &ahead[1]);
      const int id = given.checked(a);
      const unsigned same = __match_any_sync(~0u, id < 0 ? -1 : id | in_warp << 20);
      if (id >= 0 && __ffs(same) - 1 == lane) atomicAdd(hist + (token + i * step < mid ? id : E + id), 1);
      if (EPCY_RARELY(id < 0 && !given.is_unused(a) && bad)) atomicMin(bad, (unsigned)(first + i * step * K));
    }
  }
};
