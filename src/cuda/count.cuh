// What dispatch does alike in both layouts: count a rank's tokens in chunks, and exchange the counts.
//
// Each block serves one destination (a block that also stores to its own rank is several times slower). A rank's tokens
// are counted in EPCY_NUM_CHUNKS chunks whatever T and the grid are, so ranks may differ in both. Block j of the g blocks
// of a destination takes chunks j, j + g, ...
#pragma once
#include "launch.cuh"
#include "mover.cuh"
#include "step.cuh"

constexpr int kThreads = 256, kMoverWarps = 2, kOthers = kThreads - 32 * kMoverWarps, C = EPCY_NUM_CHUNKS;

struct Place {
  int d, j, g;       // destination, which of its blocks, how many
  int n[C], base[C]; // by own chunk (index c / g): rows to send, first row there
};

EPCY_DEVICE int first_token(const epcy_cuda_dispatch &a, int chunk) { return (int)((int64_t)a.num_tokens * chunk / C); }

template <typename Id> EPCY_DEVICE int64_t read_id(const epcy_cuda_dispatch &a, int64_t i) {
  return a.cached ? a.lane_ids[i] : (int64_t)((const Id *)a.topk_idx)[i];
}

// Where this rank keeps and reports what was wrong with its ids: the lowest token of the call, found by one block.
EPCY_DEVICE void keep_bad(const Step &s, int64_t token, int64_t lane, int64_t value) {
  epcy_report *r = s.p.report;
  if (atomicCAS_system(&r->bad_epoch, 0u, s.epoch) == 0) r->bad_token = token, r->bad_lane = lane, r->bad_value = value;
}

// All threads of a block: list chunk c's tokens for destination d, count the lanes for its experts, publish both.
template <typename Id>
EPCY_DEVICE int count_chunk(const Step &s, const epcy_cuda_dispatch &a, int c, int d, int *hist, int *warp_total,
                            unsigned long long *first_bad) {
  const int R = s.num_ranks, K = (int)a.peers.shape.num_topk, t0 = first_token(a, c), t1 = first_token(a, c + 1);
  const int64_t E = a.peers.shape.num_experts, L = epcy_num_local_experts(&a.peers.shape);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int e = threadIdx.x; e < L; e += kThreads) hist[e] = 0;
  if (threadIdx.x == 0) *first_bad = ~0ull;
  __syncthreads();
  int run = 0;
  int32_t *list = a.routing.list + (int64_t)d * a.num_tokens + t0;
  for (int begin = t0; begin < t1; begin += kThreads) {
    const int t = begin + threadIdx.x;
    bool goes = false;
    for (int k = 0; t < t1 && k < K; k++) {
      int64_t id = read_id<Id>(a, (int64_t)t * K + k);
      if (id < -1 || id >= E) {
        atomicMin(first_bad, (unsigned long long)t * K + k);
        id = -1;
      }
      if (d == s.me) a.lane_ids_out[(int64_t)t * K + k] = id;
      const int64_t local = id - d * L;
      if (id >= 0 && local >= 0 && local < L) {
        goes = true;
        atomicAdd(&hist[local], 1);
      }
    }
    const unsigned votes = __ballot_sync(~0u, goes);
    if (lane == 0) warp_total[warp] = __popc(votes);
    __syncthreads();
    int before = run, all = 0;
    for (int w = 0; w < kThreads / 32; w++) before += w < warp ? warp_total[w] : 0, all += warp_total[w];
    if (goes) list[before + __popc(votes & ((1u << lane) - 1))] = t;
    else if (t < t1) a.routing.pos[(int64_t)t * R + d] = -1;
    run += all;
    __syncthreads();
  }
  const bool bad = *first_bad != ~0ull;
  const bool refuse = bad && (a.header & EPCY_HEADER_WAITS);
  for (int e = threadIdx.x; e < L; e += kThreads) store_word(s.experts(d, s.me, c) + e, s.word(hist[e]));
  if ((int)threadIdx.x < R) {
    if (bad) {
      const int64_t at = (int64_t)*first_bad, value = (int64_t)((const Id *)a.topk_idx)[at];
      int64_t *slot = s.bad(threadIdx.x, s.me, c);
      slot[0] = at / K, slot[1] = at % K, slot[2] = value;
      if (!refuse && threadIdx.x == 0 && d == s.me) keep_bad(s, at / K, at % K, value);
    }
    store_word_release(s.counts(threadIdx.x, s.me, c) + d, s.word((uint32_t)run | (refuse ? EPCY_COUNT_BAD : 0u)));
  }
  __syncthreads();
  return run;
}

// All threads of a block: from everybody's counts for destination d to the bases of this rank's chunks there.
EPCY_DEVICE void find_bases(const Step &s, int d, int *verdict, int *lower, int *total, int *own) {
  for (int q = threadIdx.x; q < s.num_ranks * C; q += kThreads) {
    bool ok = true;
    const int source = q / C, c = q % C;
    const uint32_t v = s.wait(s.counts(s.me, source, c) + d, EPCY_CUDA_COUNTS, source, &ok);
    const int n = (int)(v & ~EPCY_COUNT_BAD);
    if (!ok) atomicMax(verdict, (int)EPCY_VERDICT_BROKEN);
    if (v & EPCY_COUNT_BAD) atomicMax(verdict, (int)EPCY_VERDICT_BAD_ID);
    if (source == s.me) own[c] = n;
    if (n) {
      atomicAdd(total, n);
      if (source < s.me) atomicAdd(lower, n);
    }
  }
  __syncthreads();
}
