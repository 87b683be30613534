// Where lanes go in the expert layout: ordinals at the source, starts from the experts' rank, rows from both.
#pragma once
#include "count.cuh"
#include "fan.cuh"

// All threads of a block: give each lane of its chunk that goes to its destination its ordinal among those for the same
// expert, in the order of tokens and lanes, and tell the destination how many there are. Warps take a segment of the
// lanes each: counted first, then numbered. `table`: [segments][L].
template <typename Id>
EPCY_DEVICE void order_lanes(const Step &s, const epcy_cuda_dispatch &a, const Role &role, int *table, int segments) {
  const int64_t K = s.p.shape.num_topk, begin = first_token(a, role.j, role.g) * K,
                end = first_token(a, role.j + 1, role.g) * K;
  const int L = s.p.num_local, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, d = role.d;
  const int64_t each = (end - begin + segments * 32 - 1) / (segments * 32) * 32;
  const int64_t from = begin + warp * each, most = from + each, to = warp >= segments ? from : most < end ? most : end;
  int *mine = table + warp * L;
#pragma unroll 1
  for (int i = threadIdx.x; i < segments * L; i += kThreads) table[i] = 0;
  __syncthreads();
#pragma unroll 4
  for (int64_t q = from + lane; q < to; q += 32) {
    const int local = local_id<Id>(s, a, q, d);
    if (local >= 0) atomicAdd(mine + local, 1);
  }
  __syncthreads();
#pragma unroll 1
  for (int e = threadIdx.x; e < L; e += kThreads) {
    int run = 0;
#pragma unroll 1
    for (int w = 0; w < segments; w++) {
      const int n = table[w * L + e];
      table[w * L + e] = run;
      run += n;
    }
    store_word(s.experts(d, s.me, role.j) + e, s.word(run));
  }
  __syncthreads();
  int ahead = from + lane < to ? local_id<Id>(s, a, from + lane, d) : -1;
#pragma unroll 1
  for (int64_t first = from; first < to; first += 32) {
    const int64_t q = first + lane;
    const int local = ahead;
    ahead = q + 32 < to ? local_id<Id>(s, a, q + 32, d) : -1;
    const unsigned same = __match_any_sync(~0u, local);
    const int base = local >= 0 ? mine[local] : 0;
    __syncwarp();
    if (local >= 0) {
      a.routing.lane_row[q] = base + __popc(same & ((1u << lane) - 1));
      if (lane == __ffs(same) - 1) mine[local] = base + __popc(same);
    }
    __syncwarp();
  }
}

// All threads of this rank's first own block: from everybody's counts to this rank's groups, and to where each source's
// chunks begin in them. `count`: [L], shared.
EPCY_DEVICE void place_experts(const Step &s, const epcy_cuda_dispatch &a, int num_tokens, int *count, int *verdict) {
  constexpr int kAtOnce = 8;
  const int L = s.p.num_local, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint64_t *reported = (uint64_t *)(s.p.report + 1);
  // A thread an expert; f(source, chunk, lanes) for each chunk in order.
  auto each_chunk = [&](int e, auto f) {
#pragma unroll 1
    for (int source = 0; source < s.num_ranks; source++) {
      const int chunks = s.num_chunks(source, s.me);
      const uint64_t *at = s.experts(s.me, source, 0) + e;
#pragma unroll 1
      for (int c0 = 0; c0 < chunks; c0 += kAtOnce) {
        uint64_t v[kAtOnce];
#pragma unroll
        for (int c = 0; c < kAtOnce; c++) v[c] = c0 + c < chunks ? load_word(at + (int64_t)(c0 + c) * L) : s.word(0);
#pragma unroll
        for (int c = 0; c < kAtOnce; c++) {
          bool ok = true;
          if ((uint32_t)(v[c] >> 32) != s.epoch)
            v[c] = s.wait(at + (int64_t)(c0 + c) * L, EPCY_CUDA_COUNTS, source, &ok);
          if (!ok) atomicMax(verdict, (int)EPCY_VERDICT_BROKEN);
          if (c0 + c < chunks) f(source, c0 + c, (uint32_t)v[c]);
        }
      }
    }
  };
#pragma unroll 1
  for (int e = threadIdx.x; e < L; e += kThreads) {
    uint32_t sum = 0;
    each_chunk(e, [&](int, int, uint32_t n) { sum += n; });
    count[e] = (int)sum;
  }
  __syncthreads();
  if (warp == 0) {
    int64_t run = 0;
#pragma unroll 1
    for (int first = 0; first < L; first += 32) {
      const int e = first + lane, mine = e < L ? count[e] : 0;
      const int64_t rows = epcy_padded(mine, a.alignment);
      const int64_t upto = sum_up_to(rows);
      if (e < L) {
        a.routing.offsets[e] = run + upto - rows, a.routing.experts[e] = mine, count[e] = (int)(run + upto - rows);
        if (s.p.ticket) s.tell(&reported[e], mine);
      }
      run += __shfl_sync(~0u, upto, 31);
    }
    if (lane == 0) a.routing.offsets[L] = a.routing.num_recv[0] = run, a.routing.num_recv[1] = num_tokens;
    if (lane == 0 && s.p.ticket) s.tell(&s.p.report->num_rows, (uint32_t)run);
    if (lane == 0 && !s.p.ticket && run > a.limit) s.p.report->late_rows = run, s.p.report->late_limit = a.limit;
    __syncwarp();
    if (lane < s.num_ranks) store_word_release(s.mark(lane, s.me, EPCY_MARK_ROWS), s.word((uint32_t)run));
  }
  __syncthreads();
#pragma unroll 1
  for (int e = threadIdx.x; e < L; e += kThreads) {
    uint32_t start = (uint32_t)count[e];
    each_chunk(e, [&](int source, int c, uint32_t n) {
      store_word(s.starts(source, c) + (int64_t)s.me * L + e, s.word(start));
      start += n;
    });
  }
  __syncthreads();
}

// All threads of a block: turn the ordinals of its chunk's lanes into rows, -1 where the rank has no room, and write down
// the rows of each token, which is the base-th and following at the destination. `start`: [L], shared.
template <typename Id>
EPCY_DEVICE void place_lanes(const Step &s, const epcy_cuda_dispatch &a, const Role &role, const Share &share, int base,
                             uint32_t limit, int *start, int *verdict) {
  const int K = (int)s.p.shape.num_topk, L = s.p.num_local, R = s.num_ranks, d = role.d;
  const int n = share.total, t0 = first_token(a, role.j, role.g), t1 = first_token(a, role.j + 1, role.g);
#pragma unroll 1
  for (int t = t0 + threadIdx.x; t < t1; t += kThreads) a.routing.pos[(int64_t)t * R + d] = -1;
  __syncthreads();
  if (*verdict != EPCY_VERDICT_OK) limit = 0;
#pragma unroll 1
  for (int e = threadIdx.x; limit && n && e < L; e += kThreads) {
    bool ok = true;
    start[e] = (int)s.wait(s.starts(s.me, role.j) + (int64_t)d * L + e, EPCY_CUDA_STARTS, d, &ok);
    if (!ok) atomicMax(verdict, (int)EPCY_VERDICT_BROKEN);
  }
  __syncthreads();
  if (*verdict != EPCY_VERDICT_OK) limit = 0;
  int32_t *fans = d == s.me ? a.routing.fans : s.fans(d);
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const int t = share.list[0][i];
    int32_t *fan = fans + (int64_t)(base + i) * K;
    int num = 0, first = -1;
#pragma unroll 1
    for (int k = 0; k < K; k++) {
      const int64_t at = (int64_t)t * K + k;
      const int local = local_id<Id>(s, a, at, d);
      if (local < 0) continue;
      const uint32_t row = limit ? (uint32_t)(start[local] + a.routing.lane_row[at]) : 0;
      const bool fits = row < limit;
      a.routing.lane_row[at] = fits ? (int)row : -1;
      if (!fits) continue;
      if (num == 0) first = (int)row;
      fan[num++] = (int)row;
    }
#pragma unroll 1
    for (; limit && num < K; num++) fan[num] = -1;
    a.routing.pos[(int64_t)t * R + d] = first;
  }
  // Lanes that go nowhere belong to no destination: the rank's own blocks see to them.
#pragma unroll 1
  for (int64_t q = (int64_t)t0 * K + threadIdx.x; d == s.me && q < (int64_t)t1 * K; q += kThreads) {
    const int64_t id = read_id<Id>(a, q);
    const bool bad = id < 0 || id >= s.p.shape.num_experts;
    a.lane_ids_out[q] = bad ? -1 : id;
    if (bad) a.routing.lane_row[q] = -1;
  }
}
