// Low-latency combine: the experts' rows of a token at their rank: which they are, loading and summing them.
#pragma once
#include "row_format.cuh"

constexpr int kRows = 8; // rows whose loads are in flight together

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

// The lanes of a token, a lane each; a whole warp.
struct Lanes {
  int row;               // here, or -1
  float weight;          // of the row; on the way home with reduction="source" of the lane, wherever its row is
  uint32_t others;       // on the way home: ranks that hold rows of the token; by source as in the handle's lanes
  unsigned here, brings; // lanes with a row; those that name an expert first

  EPCY_DEVICE static int place(const epcy_low_latency_call &c, int source, int t) { // of the lane in the handle
    return (source * c.max_tokens + t) * c.num_topk + (int)(threadIdx.x & 31);
  }
  // Those of a token of `source`.
  EPCY_DEVICE void load(const epcy_low_latency_call &c, int source, int t) {
    row = -1, weight = 1.0f;
    if ((int)(threadIdx.x & 31) >= c.num_topk) return;
    const int at = place(c, source, t);
    row = load_early(c.handle.rows + at), weight = load_early(c.handle.weights + at);
  }
  // Those of a token of this rank.
  template <bool BySource> EPCY_DEVICE void load_own(const epcy_low_latency_call &c, const float *weights, int t) {
    const int lane = threadIdx.x & 31, K = c.num_topk, at = t * K + lane;
    row = -1, weight = 1.0f, others = kNowhere;
    if (!BySource) others = load_early(c.handle.ranks + t);
    if (lane >= K) return;
    const int mine = place(c, c.rank, t);
    row = load_early(c.handle.rows + mine);
    if (BySource) others = load_early(c.handle.lanes + at);
    if (weights) weight = load_early(weights + at);
    else weight = load_early(BySource ? c.handle.lane_weights + at : c.handle.weights + mine);
  }
  EPCY_DEVICE void split(const epcy_low_latency_call &c) { // a handle whose dispatch failed may hold anything
    const bool valid = row >= 0 && (row & ~kRepeatedRow) < c.num_rows;
    here = __ballot_sync(~0u, valid);
    brings = __ballot_sync(~0u, valid && !(row & kRepeatedRow));
    row &= ~kRepeatedRow;
  }
};

// Of each warp: rows one after the other, from where all threads read them.
struct alignas(16) List {
  int row[32];
  uint32_t with[32]; // weights, or lanes
  EPCY_DEVICE void fill(unsigned which, int of_row, uint32_t of_with) {
    const int lane = threadIdx.x & 31;
    __syncwarp(); // the list before this one has been read
    if (which >> lane & 1) {
      const int at = __popc(which & ((1u << lane) - 1));
      row[at] = of_row, with[at] = of_with;
    }
    __syncwarp();
  }
  EPCY_DEVICE const List *after(int n) const { return (const List *)(row + n); } // the list without its first n
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
// The first `n` rows of a list, or the first kRows.
EPCY_DEVICE void load_rows(const epcy_low_latency_combine &a, const int *rows, int n, const char *y, uint4 *v) {
#pragma unroll
  for (int j = 0; j < kRows; j += 4) {
    const int4 r = *(const int4 *)(rows + j);
    v[j] = load_early_if(j < n, in_row(a, y, r.x));
    v[j + 1] = load_early_if(j + 1 < n, in_row(a, y, r.y));
    v[j + 2] = load_early_if(j + 2 < n, in_row(a, y, r.z));
    v[j + 3] = load_early_if(j + 3 < n, in_row(a, y, r.w));
  }
}

// A whole warp: this rank's rows of a token, weighted, summed in the order of the lanes, and rounded. `next` is called when
// the lanes are no longer needed.
template <int Dtype, typename Rows, typename Next>
EPCY_DEVICE uint4 sum_rows(const epcy_low_latency_combine &a, const Lanes &l, List &list, const Rows &rows, Next next) {
  list.fill(l.here, l.row, __float_as_uint(l.weight));
  const char *y = payload_of(a, rows);
  Sum<Dtype> sum;
  const List *left = &list;
  int n = __popc(l.here);
  next();
#pragma unroll 1
  for (; n > 0; n -= kRows, left = left->after(kRows)) {
    uint4 v[kRows];
    load_rows(a, left->row, n, y, v);
#pragma unroll
    for (int j = 0; j < kRows; j++) {
      if (j >= n) break;
      float x[Sum<Dtype>::kElements];
      Vector<Dtype>::load(v[j], x);
      sum.add(__uint_as_float(left->with[j]), x);
    }
  }
  return sum.round();
}
