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

// The lanes of a token, a lane each; a whole warp.
struct Lanes {
  int row;         // here, or -1
  float weight;    // of the row; on the way home with reduction="source" of the lane, wherever its row is
  uint32_t others; // on the way home: ranks that hold rows of the token; with reduction="source" as in the handle's lanes
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
  template <bool BySource>
  EPCY_DEVICE void load_own(const epcy_low_latency_call &c, const float *weights, int t) {
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

// A whole warp: wait until lines that were looked at are of this call: those of `wire`, a bit each, that the thread has at
// at[j]. False: gave up.
template <int N, typename Rows>
EPCY_DEVICE bool wait_for_lines(const LowLatency &s, const Rows &rows, const uint4 *const *at, uint4 *v, unsigned wire,
                                int peer) {
  Patience patience;
  for (;;) {
    unsigned mine = 0;
#pragma unroll
    for (int j = 0; j < N; j++)
      if (wire >> j & 1 && rows.late(s, v[j])) mine |= 1u << j;
    const unsigned any = __reduce_or_sync(~0u, mine);
    if (!EPCY_RARELY(any)) return true;
    if (patience.over(s, mine, EPCY_CUDA_LINES, peer, 0)) return false;
#pragma unroll
    for (int j = 0; j < N; j++)
      if (any >> j & 1) rows.look(at[j], &v[j]);
  }
}

EPCY_DEVICE unsigned without_first(unsigned bits, int n) {
#pragma unroll
  for (int i = 0; i < n; i++) bits &= bits - 1;
  return bits;
}

// What both reductions do on the way home: lines are looked at kLooks at a time, in the order of the sum. `which` are bits
// of the parties, ranks or lanes; of `wire` those whose lines come; where(k) is k's slot, held(k) is what is here of the
// others, add(k, x) takes a party's values. False: gave up.
template <typename Rows, typename Where, typename Held, typename Add>
EPCY_DEVICE bool gather_lines(const LowLatency &s, const Rows &rows, unsigned which, unsigned wire, Where where,
                              Held held, Add add) {
#pragma unroll 1
  for (unsigned left = which; left; left = without_first(left, kLooks)) {
    uint4 v[kLooks];
    const uint4 *at[kLooks];
    unsigned waits = 0;
    auto party = [&](int j) { return __ffs(without_first(left, j)) - 1; }; // the j-th of those that are left
#pragma unroll
    for (int j = 0; j < kLooks; j++) {
      const int k = party(j);
      v[j] = nothing(), at[j] = nullptr;
      if (k < 0) continue;
      if (wire >> k & 1) at[j] = where(k), rows.look(at[j], &v[j]), waits |= 1u << j;
      else v[j] = held(k);
    }
    if (!wait_for_lines<kLooks>(s, rows, at, v, waits, party(waits & 1 ? 0 : 1))) return false;
#pragma unroll
    for (int j = 0; j < kLooks; j++) {
      const int k = party(j);
      if (k < 0) break;
      float x[Rows::N];
      if (!(waits >> j & 1)) rows.own_values(v[j], x);
      else if (!rows.values(s, at[j], v[j], k, x)) return false;
      add(k, x);
    }
  }
  return true;
}

// ---- reduction="rank": a sum for each rank that holds rows of a token. `Pair`: of two ranks, by a call that sends and
// receives, without weights.
template <int Dtype, typename Rows, bool Pair> struct ByRank {
  static constexpr uint32_t kHeader = 0;
  uint4 theirs;
  const uint4 *at;
  unsigned ranks; // that hold rows of the token

  // Weights that are given to the combine go to their experts' ranks first: each warp's own tokens.
  EPCY_DEVICE static void send_weights(const LowLatency &s, const epcy_low_latency_combine &a) {
    const int K = s.c.num_topk, warp = threadIdx.x >> 5;
#pragma unroll 1
    for (int t = blockIdx.x * kWarps + warp; t < s.c.num_tokens; t += gridDim.x * kWarps) {
      if (s.lane >= K) continue;
      const uint32_t lane = s.c.handle.lanes[t * K + s.lane], owner = lane & 255;
      if (lane != kNowhere && (int)owner < s.c.num_ranks)
        store_word(s.weights(owner, s.c.rank, t) + s.lane, s.word(__float_as_uint(a.topk_weights[t * K + s.lane])));
    }
  }
  // Wait for them. False: gave up.
  EPCY_DEVICE static bool receive_weights(const LowLatency &s, int source, int t, Lanes &l) {
    const uint64_t *word = s.weights(s.c.rank, source, t) + s.lane;
    uint64_t v = s.word(0);
    Patience patience;
    for (;;) {
      if (l.here >> s.lane & 1) v = load_word(word);
      if (__all_sync(~0u, s.is_now(v))) break;
      if (patience.over(s, !s.is_now(v), EPCY_CUDA_COUNTS, source, v)) return false;
    }
    l.weight = __uint_as_float((uint32_t)v);
    return true;
  }
  EPCY_DEVICE static uint32_t slot(const LowLatency &s, int from, int t) { return from * s.c.max_tokens + t; }

  // On the way home, of a token whose lanes are `l`; and a first look at what comes.
  EPCY_DEVICE void split(const LowLatency &s, const Lanes &l) {
    ranks = l.others & (0xFFFFFFFFu >> (32 - s.c.num_ranks));
  }
  EPCY_DEVICE void look(const LowLatency &s, const Rows &rows, int t) {
    if constexpr (Pair)
      if (ranks >> (s.c.rank ^ 1) & 1) at = s.sum(s.c.rank, slot(s, s.c.rank ^ 1, t)), rows.look(at, &theirs);
  }
  // A whole warp: send its part of a token of `source`; then, or before, call `next`. False: gave up.
  template <typename Next>
  EPCY_DEVICE static bool send(const LowLatency &s, const epcy_low_latency_combine &a, Lanes &l, List &list, int source,
                               int t, const Rows &rows, Next next) {
    if (!Pair && gives_weights(a) && !receive_weights(s, source, t, l)) return false;
    const uint4 sum = sum_rows<Dtype>(a, l, list, rows, next);
    rows.send(s, s.sum(source, slot(s, s.c.rank, t)), sum);
    return true;
  }
  // A whole warp: its part of a token of this rank; `own` is this rank's sum if `keeps`. False: gave up.
  EPCY_DEVICE bool receive(const LowLatency &s, const epcy_low_latency_combine &, const Lanes &, int t, const Rows &rows,
                           bool keeps, const uint4 &own, uint4 *out) {
    Sum<Dtype> sum;
    const unsigned wire = keeps ? ranks & ~(1u << s.c.rank) : ranks;
    if constexpr (Pair) { // 0 + a + b = 0 + b + a
      float x[Rows::N];
      if (ranks >> s.c.rank & 1) rows.own_values(own, x), sum.add(x);
      if (wire) {
        if (!wait_for_lines<1>(s, rows, &at, &theirs, 1, s.c.rank ^ 1)) return false;
        rows.values(s, at, theirs, s.c.rank ^ 1, x), sum.add(x);
      }
    } else {
      auto where = [&](int r) { return s.sum(s.c.rank, slot(s, r, t)); };
      auto held = [&](int) { return own; };
      auto add = [&](int, const float *x) { sum.add(x); };
      if (!gather_lines(s, rows, ranks, wire, where, held, add)) return false;
    }
    *out = sum.round();
    return true;
  }
};

// ---- reduction="source": every row travels
template <int Dtype, typename Rows, bool> struct BySource {
  static constexpr uint32_t kHeader = EPCY_LOW_LATENCY_SOURCE;
  EPCY_DEVICE void split(const LowLatency &, const Lanes &) {}
  EPCY_DEVICE void look(const LowLatency &, const Rows &, int) {}
  template <typename Next>
  EPCY_DEVICE static bool send(const LowLatency &s, const epcy_low_latency_combine &a, Lanes &l, List &list, int source,
                               int t, const Rows &rows, Next next) {
    list.fill(l.brings, l.row, s.lane);
    const char *y = payload_of(a, rows);
    const List *left = &list;
    int n = __popc(l.brings);
    next();
#pragma unroll 1
    for (; n > 0; n -= kRows, left = left->after(kRows)) {
      uint4 v[kRows];
      load_rows(a, left->row, n, y, v);
#pragma unroll
      for (int j = 0; j < kRows; j++) {
        if (j >= n) break;
        rows.send(s, s.sum(source, (uint32_t)t * s.c.num_topk + left->with[j]), v[j]);
      }
    }
    return true;
  }
  EPCY_DEVICE bool receive(const LowLatency &s, const epcy_low_latency_combine &a, const Lanes &l, int t,
                           const Rows &rows, bool keeps, const uint4 &, uint4 *out) {
    const int K = s.c.num_topk;
    const bool used = l.others != kNowhere && (int)(l.others >> 8) < K;
    const unsigned mine = __ballot_sync(~0u, used && keeps && (int)(l.others & 255) == s.c.rank);
    const unsigned which = __ballot_sync(~0u, used);
    Sum<Dtype> sum;
    auto where = [&](int k) {
      return s.sum(s.c.rank, (uint32_t)t * K + (__shfl_sync(~0u, l.others, k) >> 8));
    };
    const char *y = payload_of(a, rows);
    auto held = [&](int k) {
      const int row = __shfl_sync(~0u, l.row, k);
      return l.here >> k & 1 ? load_early(in_row(a, y, row)) : nothing();
    };
    auto add = [&](int k, const float *x) { sum.add(__shfl_sync(~0u, l.weight, k), x); };
    if (!gather_lines(s, rows, which, which & ~mine, where, held, add)) return false;
    *out = sum.round();
    return true;
  }
};
