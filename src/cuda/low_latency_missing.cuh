// Low-latency combine without some ranks: which lanes of this rank's tokens are missing, and weights that make up for them.
#pragma once
#include "low_latency_rows.cuh"

// A whole warp: the weights of the lanes of a token of this rank, a lane each; where some are missing, those that are left
// are multiplied by (sum of all) / (sum of those left): float32, lanes in order.
static __device__ __noinline__ float made_up_for(const epcy_low_latency_combine &a, uint32_t peers, int t) {
  const epcy_low_latency_call &c = a.call; // and no LowLatency, which would lie in memory for it
  const uint32_t here = peers | 1u << c.rank;
  const int K = c.num_topk, lane = threadIdx.x & 31, at = t * K + lane;
  const float *weights = a.topk_weights ? a.topk_weights : c.handle.lane_weights;
  const uint32_t word = lane < K ? c.handle.lanes[at] : kNowhere;
  const bool is_left = word < kLost && here >> (word & 31) & 1;
  const unsigned used = __ballot_sync(~0u, word != kNowhere), left = __ballot_sync(~0u, is_left);
  const float weight = lane < K ? weights[at] : 0.0f;
  float all = 0.0f, kept = 0.0f;
#pragma unroll 1
  for (int k = 0; k < K; k++) {
    const float w = __shfl_sync(~0u, weight, k);
    if (used >> k & 1) all = __fadd_rn(all, w);
    if (left >> k & 1) kept = __fadd_rn(kept, w);
  }
  if (used == left || kept == 0.0f || !is_left) return weight;
  return __fmul_rn(weight, __fdiv_rn(all, kept));
}

// A whole warp: count, by rank, the lanes of this rank's tokens that were sent and do not come back.
static __device__ __noinline__ void count_not_returned(const epcy_low_latency_call &c, uint32_t peers) {
  const epcy_low_latency_handle &h = c.handle;
  const uint32_t here = peers | 1u << c.rank;
  const int lane = threadIdx.x & 31;
  int32_t *dropped = h.dropped + c.num_ranks;
  if (lane < c.num_ranks) dropped[lane] = 0;
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < c.num_tokens * c.num_topk; i += 32) {
    const uint32_t word = h.lanes[i], owner = word & 255;
    if (word == kNowhere || word & kNotSent || (int)owner >= c.num_ranks) continue;
    if (word & kLost || !(here >> owner & 1)) atomicAdd(dropped + owner, 1);
  }
  __threadfence();
  __syncwarp();
  if (lane >= c.num_ranks) return;
  const int lost = (int)load_local((const uint32_t *)dropped + lane);
  if (lost) add_to(&c.counters->lanes_lost[1][lane], lost);
}

// A whole warp whose wait for lines was over: leave out ranks that went on without this one, which send none. False: it was
// something else.
EPCY_DEVICE bool may_go_on(LowLatency &s) {
  if (__any_sync(~0u, s.is_broken() || s.sees_another_call())) return false;
  s.peers = other_ranks(s.c); // found anew: so it needs no register during the wait
  s.excuse(true);
  return true;
}

// The warp that speaks for this rank, when it knows who takes part in the combine.
EPCY_DEVICE void tell_missing(const LowLatency &s) {
  epcy_low_latency_found *found = s.c.handle.found;
  const uint32_t lost = load_local(&found->missing) | s.missing();
  if (EPCY_RARELY(lost)) {
    count_not_returned(s.c, s.peers);
    if (s.lane == 0 && s.missing()) report_left(s.c, s.epoch, s.missing());
  }
  if (s.lane == 0) found->not_returning = lost;
}
