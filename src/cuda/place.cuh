// Where lanes go in the expert layout: ordinals at the source, starts from the experts' rank, rows from both.
#pragma once
#include "count.cuh"

constexpr int kWarps = kThreads / 32;

template <typename Id> EPCY_DEVICE int local_id(const Step &s, const epcy_cuda_dispatch &a, int64_t lane, int d) {
  const int64_t L = epcy_num_local_experts(&a.peers.shape), id = read_id<Id>(a, lane), local = id - d * L;
  return id >= 0 && local >= 0 && local < L ? (int)local : -1;
}

// All threads of a block: give each lane of chunk c that goes to rank d its ordinal among those for the same expert, in
// the order of tokens and lanes. Warps take a segment of the lanes each: counted first, then numbered.
template <typename Id>
EPCY_DEVICE void order_lanes(const Step &s, const epcy_cuda_dispatch &a, int c, int d, int *table, int segments) {
  const int64_t K = a.peers.shape.num_topk, begin = first_token(a, c) * K, end = first_token(a, c + 1) * K;
  const int L = (int)epcy_num_local_experts(&a.peers.shape), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int64_t each = (end - begin + segments * 32 - 1) / (segments * 32) * 32;
  const int64_t from = begin + warp * each, most = from + each, to = warp >= segments ? from : most < end ? most : end;
  int *mine = table + warp * L;
  for (int i = threadIdx.x; i < segments * L; i += kThreads) table[i] = 0;
  __syncthreads();
  for (int64_t q = from + lane; q < to; q += 32) {
    const int local = local_id<Id>(s, a, q, d);
    if (local >= 0) atomicAdd(mine + local, 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < L; e += kThreads)
    for (int w = 0, run = 0; w < segments; w++) {
      const int n = table[w * L + e];
      table[w * L + e] = run;
      run += n;
    }
  __syncthreads();
  for (int64_t first = from; first < to; first += 32) {
    const int64_t q = first + lane;
    const int local = q < to ? local_id<Id>(s, a, q, d) : -1;
    const unsigned same = __match_any_sync(~0u, local);
    const int base = local >= 0 ? mine[local] : 0;
    __syncwarp();
    if (local >= 0) {
      a.routing.lane_row[q] = base + __popc(same & ((1u << lane) - 1));
      if (lane == __ffs(same) - 1) mine[local] = base + __popc(same);
    } else if (q < to && d == s.me && a.lane_ids_out[q] < 0) {
      a.routing.lane_row[q] = -1;
    }
    __syncwarp();
  }
  __syncthreads();
}

constexpr int kTogether = 4; // experts whose counts a warp loads at once

// A whole warp: the counts of chunk `lane` of a source for kTogether local experts from e0.
EPCY_DEVICE void load_counts(const Step &s, int source, int e0, int L, int *verdict, uint32_t *n) {
  const uint64_t *at = s.experts(s.me, source, threadIdx.x & 31) + e0;
  uint64_t v[kTogether];
#pragma unroll
  for (int i = 0; i < kTogether; i++) v[i] = e0 + i < L ? load_word(at + i) : s.word(0);
#pragma unroll
  for (int i = 0; i < kTogether; i++) {
    bool ok = true;
    n[i] = (uint32_t)(v[i] >> 32) == s.epoch ? (uint32_t)v[i] : s.wait(at + i, EPCY_CUDA_COUNTS, source, &ok);
    if (!ok) atomicMax(verdict, (int)EPCY_VERDICT_BROKEN);
  }
}
static_assert(C == 32, "a lane a chunk");

// All threads of one block: from everybody's counts to this rank's groups, and to where each source's chunks go in them.
EPCY_DEVICE void place_experts(const Step &s, const epcy_cuda_dispatch &a, int *count, int *verdict) {
  const int L = (int)epcy_num_local_experts(&a.peers.shape), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint64_t *reported = (uint64_t *)(a.peers.report + 1);
  uint32_t n[kTogether];
  for (int e0 = warp * kTogether; e0 < L; e0 += kWarps * kTogether) {
    uint32_t sum[kTogether] = {};
    for (int source = 0; source < s.num_ranks; source++) {
      load_counts(s, source, e0, L, verdict, n);
      for (int i = 0; i < kTogether; i++) sum[i] += n[i];
    }
    for (int i = 0; i < kTogether; i++) {
      const uint32_t all = __reduce_add_sync(~0u, sum[i]);
      if (lane == 0 && e0 + i < L) count[e0 + i] = (int)all;
    }
  }
  __syncthreads();
  if (warp == 0) {
    int64_t run = 0;
    for (int first = 0; first < L; first += 32) {
      const int e = first + lane, mine = e < L ? count[e] : 0;
      const int64_t rows = epcy_padded(mine, a.alignment);
      int64_t upto = rows;
      for (int step = 1; step < 32; step *= 2) {
        const int64_t other = __shfl_up_sync(~0u, upto, step);
        if (lane >= step) upto += other;
      }
      if (e < L) {
        a.routing.offsets[e] = run + upto - rows, a.routing.experts[e] = mine;
        if (a.peers.ticket) s.tell(&reported[e], mine);
      }
      run += __shfl_sync(~0u, upto, 31);
    }
    if (lane == 0) a.routing.offsets[L] = *a.routing.num_recv = run;
    if (lane < s.num_ranks) store_word(s.mark(lane, s.me, EPCY_MARK_ROWS), s.word((uint32_t)run));
    if (lane == 0 && a.peers.ticket) s.tell(&a.peers.report->num_rows, (uint32_t)run);
    if (lane == 0 && !a.peers.ticket && run > a.limit)
      a.peers.report->late_rows = run, a.peers.report->late_limit = a.limit;
  }
  __syncthreads();
  for (int e0 = warp * kTogether; e0 < L; e0 += kWarps * kTogether) {
    uint32_t start[kTogether];
    for (int i = 0; i < kTogether; i++) start[i] = e0 + i < L ? (uint32_t)a.routing.offsets[e0 + i] : 0;
    for (int source = 0; source < s.num_ranks; source++) {
      load_counts(s, source, e0, L, verdict, n);
      uint64_t *to = s.starts(source, lane) + (int64_t)s.me * L + e0;
      for (int i = 0; i < kTogether; i++) {
        uint32_t upto = n[i];
        for (int step = 1; step < 32; step *= 2) {
          const uint32_t other = __shfl_up_sync(~0u, upto, step);
          if (lane >= step) upto += other;
        }
        if (e0 + i < L) store_word(to + i, s.word(start[i] + upto - n[i]));
        start[i] += __shfl_sync(~0u, upto, 31);
      }
    }
  }
}

// All threads of a block: turn the ordinals of chunk c's lanes at rank d into rows; -1 where the rank has no room.
template <typename Id>
EPCY_DEVICE void place_chunk(const Step &s, const epcy_cuda_dispatch &a, int c, int d, uint32_t limit, int *start,
                             int *verdict) {
  const int K = (int)a.peers.shape.num_topk, L = (int)epcy_num_local_experts(&a.peers.shape),
            n = a.routing.chunk_count[d * C + c];
  const int32_t *list = a.routing.list + (int64_t)d * a.num_tokens + first_token(a, c);
  __syncthreads();
  if (*verdict != EPCY_VERDICT_OK) limit = 0;
  for (int e = threadIdx.x; limit && n && e < L; e += kThreads) {
    bool ok = true;
    start[e] = (int)s.wait(s.starts(s.me, c) + (int64_t)d * L + e, EPCY_CUDA_STARTS, d, &ok);
    if (!ok) atomicMax(verdict, (int)EPCY_VERDICT_BROKEN);
  }
  __syncthreads();
  if (*verdict != EPCY_VERDICT_OK) limit = 0;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    int first = -1;
    for (int k = 0; k < K; k++) {
      const int64_t at = (int64_t)list[i] * K + k;
      const int local = local_id<Id>(s, a, at, d);
      if (local < 0) continue;
      const uint32_t row = limit ? (uint32_t)(start[local] + a.routing.lane_row[at]) : 0;
      a.routing.lane_row[at] = row < limit ? (int)row : -1;
      if (first < 0 && row < limit) first = (int)row;
    }
    a.routing.pos[(int64_t)list[i] * s.num_ranks + d] = first;
  }
}
