// Low-latency combine: the experts' rows of a token at their rank: which they are, loading and summing them.
#pragma once
#include "low_latency_grid.cuh"
#include "row_format.cuh"

constexpr int kRows = 8; // rows of a thread whose loads are in flight together

// Whether ranks give weights to this call: not whether this one has an array, which without tokens may be at no address.
EPCY_DEVICE bool gives_weights(const epcy_low_latency_combine &a) { return a.call.header & EPCY_LOW_LATENCY_WEIGHTS; }
EPCY_DEVICE bool renormalizes(const epcy_low_latency_combine &a) {
  return a.call.header & EPCY_LOW_LATENCY_RENORMALIZE;
}
EPCY_DEVICE const float *weights_given(const epcy_low_latency_combine &a) {
  return gives_weights(a) ? a.topk_weights : nullptr;
}
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

// The lanes of a token, a lane each; a whole warp.
struct Lanes {
  int row;      // here, or -1
  float weight; // of the row; on the way home with reduction="source" of the lane, wherever its row is

  // Those of a token of `source`.
  template <typename N> EPCY_DEVICE void load(const epcy_low_latency_call &c, int source, int t) {
    const int lane = threadIdx.x & 31, K = N::topk(c), at = (source * c.max_tokens + t) * K + lane;
    row = -1, weight = 1.0f;
    if (lane < K) row = load_early(c.handle.rows + at), weight = load_early(c.handle.weights + at);
  }
  // Those of a token of this rank.
  template <typename N, bool BySource>
  EPCY_DEVICE void load_own(const epcy_low_latency_call &c, const float *weights, int t) {
    const int lane = threadIdx.x & 31, K = N::topk(c), at = t * K + lane, mine = c.rank * c.max_tokens * K + at;
    row = -1, weight = 1.0f;
    if (lane >= K) return;
    row = load_early(c.handle.rows + mine);
    if (weights) weight = load_early(weights + at);
    else weight = load_early(BySource ? c.handle.lane_weights + at : c.handle.weights + mine);
  }
  // Where parts of a token of this rank come from: the ranks that hold rows of it, as bits; by source a lane's own word.
  template <typename N, bool BySource> EPCY_DEVICE static uint32_t load_others(const epcy_low_latency_call &c, int t) {
    const int lane = threadIdx.x & 31, K = N::topk(c);
    if (!BySource) return load_early(c.handle.ranks + t);
    return lane < K ? load_early(c.handle.lanes + t * K + lane) : kNowhere;
  }
  // What is left of that without ranks that take no part.
  template <bool BySource> EPCY_DEVICE static uint32_t of_those(const LowLatency &s, uint32_t others) {
    if (!BySource) return others & (s.peers | 1u << s.c.rank);
    return s.takes_part(others & 31) ? others : kNowhere;
  }
  // A handle whose dispatch failed may hold anything.
  EPCY_DEVICE bool is_here(const epcy_low_latency_call &c) const {
    return row >= 0 && (row & ~kRepeatedRow) < c.num_rows;
  }
  EPCY_DEVICE bool brings(const epcy_low_latency_call &c) const { return (uint32_t)row < (uint32_t)c.num_rows; }
};

// Of each warp: its lanes' rows, or -1, and weights, from where all threads read them.
struct alignas(16) List {
  int row[32];
  float weight[32];
  EPCY_DEVICE void fill(int of_row, float of_weight) {
    const int lane = threadIdx.x & 31;
    __syncwarp(); // the list before this one has been read
    row[lane] = of_row, weight[lane] = of_weight;
    __syncwarp();
  }
};

// Where a thread's payload is in row 0. Threads without one read what their neighbours do.
template <typename Rows> EPCY_DEVICE const char *payload_of(const epcy_low_latency_combine &a, const Rows &rows) {
  const char *y = a.x + (rows.has_data() ? rows.offset() : 0);
  keep(y);
  return y;
}
EPCY_DEVICE const uint4 *in_row(const epcy_low_latency_combine &a, const char *y, int row) {
  return (const uint4 *)(y + (uint64_t)(uint32_t)row * (uint32_t)a.call.row_bytes);
}
// The rows of lanes k, ..., k + Count - 1 that a list has; which, as bits. `InLoop`: see load_early_if.
template <int Count, bool InLoop>
EPCY_DEVICE unsigned load_rows(const epcy_low_latency_combine &a, const List &list, int k, const char *y, uint4 *v) {
  unsigned here = 0;
#pragma unroll
  for (int j = 0; j < Count; j += 4) {
    const int4 r = *(const int4 *)(list.row + k + j);
    const int row[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (InLoop) v[j + i] = clear();
      load_early_if(row[i] >= 0, in_row(a, y, row[i]), &v[j + i]);
      here |= row[i] >= 0 ? 1u << (j + i) : 0u;
    }
  }
  return here;
}

// A whole warp: this rank's rows of a token, weighted, summed in the order of the lanes, and rounded. The first `Count`
// rows are on their way from begin() to end().
template <int Dtype, typename N, int Count, bool InLoop> struct RowSum {
  const char *y;
  const List *list;
  uint4 v[Count];
  unsigned which;
  bool any;

  template <typename Rows>
  EPCY_DEVICE void begin(const epcy_low_latency_combine &a, const Lanes &l, List &of_warp, const Rows &rows) {
    const bool here = l.is_here(a.call);
    any = __any_sync(~0u, here), list = &of_warp, y = payload_of(a, rows);
    of_warp.fill(here ? l.row & ~kRepeatedRow : -1, l.weight);
    which = load_rows<Count, InLoop>(a, of_warp, 0, y, v);
  }
  // False: there are no rows.
  EPCY_DEVICE bool end(const epcy_low_latency_combine &a, uint4 *out) {
    if (!any) return false;
    Sum<Dtype> sum;
#pragma unroll
    for (int k = 0; k < N::topk(a.call); k += Count) {
      if (k) which = load_rows<Count, InLoop>(a, *list, k, y, v);
#pragma unroll
      for (int j = 0; j < Count; j += 4) {
        const float4 w = *(const float4 *)(list->weight + k + j);
        const float weight[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (!(which >> (j + i) & 1)) continue;
          float x[Sum<Dtype>::kElements];
          Vector<Dtype>::load(v[j + i], x);
          sum.add(weight[i], x);
        }
      }
    }
    *out = sum.round();
    return true;
  }
};
