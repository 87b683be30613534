// Low-latency combine: what a warp sends of a token, and how it makes a token's sum of what comes: by rank or at the source.
#pragma once
#include "row_format.cuh"

constexpr int kRows = 8;  // rows whose loads are in flight together
constexpr int kLooks = 4; // lines of a thread that are waited for together

// Whether ranks give weights to this call: not whether this one has an array, which without tokens may be at no address.
EPCY_DEVICE bool gives_weights(const epcy_low_latency_combine &a) { return a.call.header & EPCY_LOW_LATENCY_WEIGHTS; }
EPCY_DEVICE uint4 nothing() { return make_uint4(0, 0, 0, 0); }

template <int Dtype> struct Sum {
  static constexpr int kElements = Vector<Dtype>::kElements;
  float acc[kElements];
  EPCY_DEVICE Sum() {
#pragma unroll
    for (int i = 0; i < kElements; i++) acc[i] = 0.0f;
  }
  EPCY_DEVICE void add(const float *x) {
#pragma unroll
    for (int i = 0; i < kElements; i++) acc[i] = __fadd_rn(acc[i], x[i]);
  }
  EPCY_DEVICE void add(float weight, const float *x) {
#pragma unroll
    for (int i = 0; i < kElements; i++) acc[i] = __fadd_rn(acc[i], __fmul_rn(weight, x[i]));
  }
  EPCY_DEVICE uint4 round() const { return Vector<Dtype>::round(acc); }
};

// The lanes of a token whose rows are here; a whole warp, a lane each.
struct Lanes {
  int row;
  float weight;
  unsigned here, brings; // lanes with a row; those that name an expert first
  EPCY_DEVICE Lanes(const epcy_low_latency_combine &a, int source, int t) { load(a, source, t); }
  EPCY_DEVICE void load(const epcy_low_latency_combine &a, int source, int t) {
    const int lane = threadIdx.x & 31, K = (int)a.call.peers.shape.num_topk;
    const int64_t at = ((int64_t)source * a.call.peers.shape.num_low_latency_tokens + t) * K + lane;
    row = -1, weight = 1.0f;
    if (lane < K) row = a.call.handle.rows[at], weight = a.call.handle.weights[at];
  }
  EPCY_DEVICE void split(const epcy_low_latency_call &c) { // a handle whose dispatch failed may hold anything
    const bool valid = row >= 0 && (row & ~kRepeatedRow) < (int)epcy_num_low_latency_rows(&c.peers.shape);
    here = __ballot_sync(~0u, valid);
    brings = __ballot_sync(~0u, valid && !(row & kRepeatedRow));
    row &= ~kRepeatedRow;
  }
};

template <typename Rows> EPCY_DEVICE uint4 load_row(const epcy_low_latency_combine &a, int row, const Rows &rows) {
  return rows.has_data() ? __ldg((const uint4 *)(a.x + row * a.call.row_bytes + rows.offset())) : nothing();
}

// A whole warp: this rank's rows of a token, weighted, summed in the order of the lanes, and rounded.
template <int Dtype, typename Rows>
EPCY_DEVICE uint4 sum_rows(const epcy_low_latency_combine &a, const Lanes &l, const Rows &rows) {
  Sum<Dtype> sum;
  for (unsigned left = l.here; left;) {
    uint4 v[kRows];
    unsigned next = left;
#pragma unroll
    for (int j = 0; j < kRows; j++) {
      const int row = __shfl_sync(~0u, l.row, next ? __ffs(next) - 1 : 0);
      v[j] = next ? load_row(a, row, rows) : nothing();
      next &= next - 1;
    }
#pragma unroll
    for (int j = 0; j < kRows; j++)
      if (left) {
        float x[Sum<Dtype>::kElements];
        Vector<Dtype>::load(v[j], x);
        sum.add(__shfl_sync(~0u, l.weight, __ffs(left) - 1), x);
        left &= left - 1;
      }
  }
  return sum.round();
}

// A whole warp: wait until units that were looked at are of this call: those of `wire`, a bit each. `again(j)` looks at
// unit j. False: gave up.
template <typename Rows, typename Again>
EPCY_DEVICE bool wait_for_lines(const LowLatency &s, const Rows &rows, const uint4 *v, unsigned wire, Again again,
                                int peer) {
  Patience patience;
  for (;;) {
    unsigned mine = 0;
#pragma unroll
    for (int j = 0; j < kLooks; j++) mine |= wire >> j & 1 && rows.late(s, v[j]) ? 1u << j : 0u;
    const unsigned any = __reduce_or_sync(~0u, mine);
    if (!any) return true;
    if (patience.over(s, mine, peer, 0)) return false;
#pragma unroll
    for (int j = 0; j < kLooks; j++)
      if (any >> j & 1) again(j);
  }
}

EPCY_DEVICE unsigned without_first(unsigned bits, int n) {
  for (int i = 0; i < n; i++) bits &= bits - 1;
  return bits;
}

// ---- reduction="rank": a sum for each rank that holds rows of a token
template <int Dtype, typename Rows> struct ByRank {
  static constexpr uint32_t kHeader = 0;
  // Weights that are given to the combine go to their experts' ranks first: each warp's own tokens.
  EPCY_DEVICE static void send_weights(const LowLatency &s, const epcy_low_latency_combine &a) {
    const int K = (int)a.call.peers.shape.num_topk, warp = threadIdx.x >> 5;
    for (int t = blockIdx.x * kWarps + warp; t < a.call.num_tokens; t += gridDim.x * kWarps) {
      if (s.lane >= K) continue;
      const uint32_t lane = a.call.handle.lanes[(int64_t)t * K + s.lane], owner = lane & 255;
      if (lane != kNowhere && (int)owner < s.num_ranks)
        store_word(s.weights(owner, s.me, t) + s.lane,
                   s.word(__float_as_uint(a.topk_weights[(int64_t)t * K + s.lane])));
    }
  }
  // A whole warp: send its part of a token of `source`. False: gave up.
  EPCY_DEVICE static bool send(const LowLatency &s, const epcy_low_latency_combine &a, Lanes &l, int source, int t,
                               const Rows &rows) {
    if (gives_weights(a)) {
      bool ok = true;
      if (l.here >> s.lane & 1)
        l.weight = __uint_as_float(s.wait(s.weights(s.me, source, t) + s.lane, EPCY_CUDA_COUNTS, source, &ok));
      if (!__all_sync(~0u, ok)) return false;
    }
    const uint4 v = sum_rows<Dtype>(a, l, rows);
    rows.send(s, s.sum(source, (int64_t)s.me * a.call.peers.shape.num_low_latency_tokens + t), v);
    return true;
  }
  // A whole warp: its part of a token of this rank; `own` is this rank's sum if `keeps`. False: gave up.
  EPCY_DEVICE static bool receive(const LowLatency &s, const epcy_low_latency_combine &a, unsigned ranks, int t,
                                  const Rows &rows, bool keeps, const uint4 &own, uint4 *out) {
    Sum<Dtype> sum;
    for (unsigned left = ranks; left; left = without_first(left, kLooks)) {
      uint4 v[kLooks];
      unsigned wire = 0;
      auto from = [&](int j) { return __ffs(without_first(left, j)) - 1; }; // the j-th rank of those that are left
      auto slot = [&](int j) { return s.sum(s.me, (int64_t)from(j) * a.call.peers.shape.num_low_latency_tokens + t); };
      auto look = [&](int j) { rows.look(slot(j), &v[j]); };
#pragma unroll
      for (int j = 0; j < kLooks; j++) {
        v[j] = own;
        if (from(j) >= 0 && !(keeps && from(j) == s.me)) look(j), wire |= 1u << j;
      }
      if (!wait_for_lines(s, rows, v, wire, look, from(wire & 1 ? 0 : 1))) return false;
#pragma unroll
      for (int j = 0; j < kLooks; j++) {
        if (from(j) < 0) continue;
        float x[Sum<Dtype>::kElements];
        if (!(wire >> j & 1)) rows.own_values(v[j], x);
        else if (!rows.values(s, slot(j), v[j], from(j), x)) return false;
        sum.add(x);
      }
    }
    *out = sum.round();
    return true;
  }
};

// ---- reduction="source": every row travels
template <int Dtype, typename Rows> struct BySource {
  static constexpr uint32_t kHeader = EPCY_LOW_LATENCY_SOURCE;
  EPCY_DEVICE static void send_weights(const LowLatency &, const epcy_low_latency_combine &) {}
  EPCY_DEVICE static bool send(const LowLatency &s, const epcy_low_latency_combine &a, const Lanes &l, int source,
                               int t, const Rows &rows) {
    for (unsigned left = l.brings; left;) {
      uint4 v[kRows];
      unsigned next = left;
#pragma unroll
      for (int j = 0; j < kRows; j++) {
        const int row = __shfl_sync(~0u, l.row, next ? __ffs(next) - 1 : 0);
        v[j] = next ? load_row(a, row, rows) : nothing();
        next &= next - 1;
      }
#pragma unroll
      for (int j = 0; j < kRows; j++)
        if (left) {
          rows.send(s, s.sum(source, (int64_t)t * a.call.peers.shape.num_topk + (__ffs(left) - 1)), v[j]);
          left &= left - 1;
        }
    }
    return true;
  }
  EPCY_DEVICE static bool receive(const LowLatency &s, const epcy_low_latency_combine &a, int t, const Rows &rows,
                                  bool keeps, const Lanes &own, uint4 *out) {
    const int K = (int)a.call.peers.shape.num_topk;
    const int64_t at = (int64_t)t * K + s.lane;
    uint32_t lane = kNowhere;
    float weight = 0.0f;
    if (s.lane < K) {
      lane = a.call.handle.lanes[at];
      weight = gives_weights(a) ? a.topk_weights[at] : a.call.handle.lane_weights[at];
    }
    const bool used = lane != kNowhere && (int)(lane >> 8) < K;
    const unsigned mine = __ballot_sync(~0u, used && keeps && (int)(lane & 255) == s.me);
    Sum<Dtype> sum;
    for (unsigned left = __ballot_sync(~0u, used); left; left = without_first(left, kLooks)) {
      uint4 v[kLooks];
      unsigned wire = 0;
      auto which = [&](int j) { return __ffs(without_first(left, j)) - 1; }; // the j-th lane of those that are left
      auto slot = [&](int j) { return s.sum(s.me, (int64_t)t * K + (__shfl_sync(~0u, lane, which(j)) >> 8)); };
      auto look = [&](int j) { rows.look(slot(j), &v[j]); };
#pragma unroll
      for (int j = 0; j < kLooks; j++) {
        const int k = which(j);
        v[j] = nothing();
        if (k < 0) continue;
        const int row = __shfl_sync(~0u, own.row, k);
        if (!(mine >> k & 1)) look(j), wire |= 1u << j;
        else if (own.here >> k & 1) v[j] = load_row(a, row, rows);
      }
      if (!wait_for_lines(s, rows, v, wire, look, __shfl_sync(~0u, lane, which(0)) & 255)) return false;
#pragma unroll
      for (int j = 0; j < kLooks; j++) {
        const int k = which(j);
        if (k < 0) continue;
        float x[Sum<Dtype>::kElements];
        if (!(wire >> j & 1)) rows.own_values(v[j], x);
        else if (!rows.values(s, slot(j), v[j], __shfl_sync(~0u, lane, k) & 255, x)) return false;
        sum.add(__shfl_sync(~0u, weight, k), x);
      }
    }
    *out = sum.round();
    return true;
  }
};
