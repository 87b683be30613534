// Low-latency dispatch: a sender counts its own tokens, so that places need no exchange before the data.
#pragma once
#include "low_latency.cuh"

EPCY_DEVICE int64_t raw_id(const epcy_low_latency_dispatch &a, int64_t at) {
  return a.is_int64 ? __ldg((const long long *)a.topk_idx + at) : (int64_t)__ldg((const int *)a.topk_idx + at);
}
EPCY_DEVICE int checked_id(int64_t id, int num_experts) { return id >= 0 && id < num_experts ? (int)id : -1; }

// Where a block's counters are: tokens before token `before` that go to the same experts as this warp's lanes `mine`, and
// all tokens for experts `first`, `first` + 1, ...
struct Counters {
  int *ordinal, *of_expert;
  int before, first, num_experts;
  unsigned *bad;
};

// All warps of a block: each takes 32 tokens and some of the lanes. A token that names an expert twice counts once.
// `Most`: a token's ids are held in registers; 0: they are read again and again, from the cache.
template <int Most> EPCY_DEVICE void count_tokens(const epcy_low_latency_dispatch &a, int mine, const Counters &to) {
  const int T = a.call.num_tokens, K = (int)a.call.peers.shape.num_topk, E = (int)a.call.peers.shape.num_experts;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int groups = (T + 31) / 32, share = groups < kWarps ? kWarps / (groups ? groups : 1) : 1;
  int sum = 0;
  for (int g = warp / share; g < groups; g += kWarps / share) {
    const int t = g * 32 + lane;
    int id[Most ? Most : 1];
    auto read = [&](int k) {
      const int64_t raw = t < T && k < K ? raw_id(a, (int64_t)t * K + k) : -1;
      const int checked = checked_id(raw, E);
      if (to.bad && checked < 0 && raw != -1) atomicMin(to.bad, (unsigned)(t * K + k));
      return checked;
    };
#pragma unroll
    for (int k = 0; k < Most; k++) id[k] = read(k);
    for (int m = warp % share; m < K; m += share) {
      const int expert = __shfl_sync(~0u, mine, m);
      if (expert < 0) continue;
      bool goes = false;
#pragma unroll
      for (int k = 0; k < Most; k++) goes |= id[k] == expert;
      for (int k = 0; !Most && k < K; k++) goes |= read(k) == expert;
      const int n = __popc(__ballot_sync(~0u, goes && t < to.before));
      if (lane == m) sum += n;
    }
    if (!to.of_expert || warp % share) continue;
    auto wanted = [&](int expert) { return (unsigned)(expert - to.first) < (unsigned)to.num_experts; };
#pragma unroll
    for (int k = 0; k < Most; k++) {
      bool counts = wanted(id[k]);
#pragma unroll
      for (int j = 0; j < k; j++) counts &= id[j] != id[k];
      if (counts) atomicAdd(to.of_expert + id[k] - to.first, 1);
    }
    for (int k = 0; !Most && k < K; k++) {
      const int expert = read(k);
      bool counts = wanted(expert);
      for (int j = 0; counts && j < k; j++) counts = read(j) != expert;
      if (counts) atomicAdd(to.of_expert + expert - to.first, 1);
    }
  }
  if (sum) atomicAdd(to.ordinal + lane, sum);
}
