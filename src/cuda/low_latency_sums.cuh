// Low-latency combine: what a warp sends of a token, and how it makes a token's sum of what comes: by rank or at the source.
#pragma once
#include "low_latency_missing.cuh"
#include "low_latency_rows.cuh"

constexpr int kLooks = 4; // lines of a thread that are waited for together

// A whole warp: wait until lines that were looked at are of this call: those of `wire`, a bit each, that the thread has at
// at[j]; `peers`: whose they are, eight bits each. False: gave up.
template <int N, typename Rows>
EPCY_DEVICE bool wait_for_lines(const LowLatency &s, const Rows &rows, const uint4 *const *at, uint4 *v, unsigned wire,
                                uint32_t peers) {
  static_assert(N <= 4, "bits of a word");
  Patience patience;
  for (;;) {
    unsigned mine = 0, seen = 0;
#pragma unroll
    for (int j = 0; j < N; j++)
      if (wire >> j & 1 && rows.late(s, v[j])) mine |= 1u << j, seen = v[j].x;
    const unsigned any = __reduce_or_sync(~0u, mine);
    if (!EPCY_RARELY(any)) return true;
    if (patience.over<true>(s, mine, EPCY_CUDA_LINES, peers >> 8 * (__ffs(any) - 1) & 255, (uint64_t)seen << 32))
      return false;
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
// of the parties, ranks or lanes; of `wire` those whose lines come; rank_of(k) is whose party k is, where(k) its slot,
// held(k) what is here of the others, add(k, x) takes a party's values. False: gave up.
template <typename Rows, typename RankOf, typename Where, typename Held, typename Add>
EPCY_DEVICE bool gather_lines(const LowLatency &s, const Rows &rows, unsigned which, unsigned wire, RankOf rank_of,
                              Where where, Held held, Add add) {
#pragma unroll 1
  for (unsigned left = which; left; left = without_first(left, kLooks)) {
    uint4 v[kLooks];
    const uint4 *at[kLooks];
    unsigned waits = 0, peers = 0;
    auto party = [&](int j) { return __ffs(without_first(left, j)) - 1; }; // the j-th of those that are left
#pragma unroll
    for (int j = 0; j < kLooks; j++) {
      const int k = party(j);
      v[j] = nothing(), at[j] = nullptr;
      if (k < 0) continue;
      if (wire >> k & 1) at[j] = where(k), rows.look(at[j], &v[j]), waits |= 1u << j, peers |= rank_of(k) << 8 * j;
      else v[j] = held(k);
    }
    if (!wait_for_lines<kLooks>(s, rows, at, v, waits, peers)) return false;
#pragma unroll
    for (int j = 0; j < kLooks; j++) {
      const int k = party(j);
      if (k < 0) break;
      float x[Rows::N];
      if (!(waits >> j & 1)) rows.own_values(v[j], x);
      else if (!rows.values(s, at[j], v[j], peers >> 8 * j & 255, x)) return false;
      add(k, x);
    }
  }
  return true;
}

// What a kernel of a combine is made for. Fast: calls that send and receive, without weights. Few: so few tokens that each
// block has a multiprocessor for itself, whose registers take the rows of both sums at once. Special: calls that
// renormalize, or mask late ranks.
template <typename N, bool IsFast, bool IsFew, bool IsSpecial = false> struct Made : N {
  static constexpr bool kFast = IsFast, kFew = IsFew, kSpecial = IsSpecial;
  static constexpr int kThreadsOfBlock = IsFast && !IsFew ? 1024 : kThreads;
  static constexpr int kRowsAtOnce = IsFew ? kRows : kRows / 2;
};

// Rows that travel to another rank, for the statistics: the first warp of a row's first part counts them whole.
EPCY_DEVICE void count_row(const LowLatency &s, int to, int rows) {
  if (threadIdx.x == 0 && to != s.c.rank && Tour(s.c).part == 0)
    add_to(&s.c.counters->bytes_moved, (uint64_t)rows * s.c.row_bytes);
}

// ---- reduction="rank": a sum for each rank that holds rows of a token
template <int Dtype, typename Rows, typename N> struct ByRank {
  static constexpr uint32_t kHeader = 0;
  static constexpr bool kPair = N::kRanks == 2; // then one line comes, and is looked at early
  uint4 own = nothing();                        // this rank's own sum

  // Weights that are given to the combine go to their experts' ranks first: each warp's own tokens.
  EPCY_DEVICE static void send_weights(const LowLatency &s, const epcy_low_latency_combine &a) {
    const int K = s.c.num_topk, warps = blockDim.x >> 5;
#pragma unroll 1
    for (int t = blockIdx.x * warps + (threadIdx.x >> 5); t < s.c.num_tokens; t += gridDim.x * warps) {
      float weight = 0.0f;
      if (EPCY_RARELY(renormalizes(a))) weight = made_up_for(a, s.peers, t);
      else if (s.lane < K) weight = a.topk_weights[t * K + s.lane];
      if (s.lane >= K) continue;
      const uint32_t lane = s.c.handle.lanes[t * K + s.lane], owner = lane & 255;
      if (lane < kLost && (int)owner < s.c.num_ranks && s.takes_part(owner))
        store_word(s.weights(owner, s.c.rank, t) + s.lane, s.word(__float_as_uint(weight)));
    }
  }
  // Wait for them. False: gave up.
  EPCY_DEVICE static bool receive_weights(const LowLatency &s, int source, int t, Lanes &l) {
    const uint64_t *word = s.weights(s.c.rank, source, t) + s.lane;
    const bool here = l.is_here(s.c);
    uint64_t v = s.word(0);
    Patience patience;
    for (;;) {
      if (here) v = load_word(word);
      if (__all_sync(~0u, s.is_now(v))) break;
      if (patience.over(s, !s.is_now(v), EPCY_CUDA_COUNTS, source, v)) return false;
    }
    l.weight = __uint_as_float((uint32_t)v);
    return true;
  }
  EPCY_DEVICE static uint32_t slot(const LowLatency &s, int from, int t) { return from * s.c.max_tokens + t; }

  // A whole warp: send its part of the t-th token of each rank that has it, and sum this rank's own unless it travels
  // too. The lanes given are those of the first rank to send to, and of this rank. False: gave up.
  template <bool InLoop>
  EPCY_DEVICE bool send(const LowLatency &s, const epcy_low_latency_combine &a, Lanes &to_send, const Lanes &to_sum,
                        List *lists, int t, int tokens, int first_turn, const Rows &rows) {
    constexpr bool repeats = InLoop || N::kRanks != 2;
    const bool owns = first_turn && t < s.c.num_tokens;
    uint4 sum;
    RowSum<Dtype, N, N::kRowsAtOnce, InLoop> mine;
#pragma unroll
    for (int turn = first_turn; turn < N::ranks(s.c); turn++) {
      const int source = s.after(turn);
      const bool real = t < __shfl_sync(~0u, tokens, source);
      RowSum<Dtype, N, N::kRowsAtOnce, repeats> theirs;
      if (turn > first_turn) to_send.template load<N>(s.c, source, t);
      if (real) {
        if (N::kRanks == 0 && gives_weights(a) && !receive_weights(s, source, t, to_send)) return false;
        theirs.begin(a, to_send, lists[0], rows);
      }
      if (N::kFew && owns) mine.begin(a, to_sum, lists[1], rows);
      if (real && theirs.end(a, &sum)) rows.send(s, s.sum(source, slot(s, s.c.rank, t)), sum), count_row(s, source, 1);
    }
    if (!owns) return true;
    if (!N::kFew) mine.begin(a, to_sum, lists[0], rows);
    mine.end(a, &own);
    return true;
  }
  // Where this rank's own sum of a token waits for the others while the warp is at other tokens.
  EPCY_DEVICE static uint4 *place_of_own(const epcy_low_latency_combine &a, int t, const Rows &rows) {
    return (uint4 *)(a.out + (int64_t)t * a.call.row_bytes + rows.offset());
  }
  EPCY_DEVICE void leave_own(const epcy_low_latency_combine &a, int t, const Rows &rows) const {
    if (rows.has_data()) *place_of_own(a, t, rows) = own;
  }
  EPCY_DEVICE void take_own(const epcy_low_latency_combine &a, int t, const Rows &rows) {
    if (rows.has_data()) own = *place_of_own(a, t, rows);
  }

  // A whole warp: its part of a token of this rank, after send(). False: gave up.
  EPCY_DEVICE bool receive(const LowLatency &s, const epcy_low_latency_combine &a, const Lanes &, uint32_t others,
                           int t, const Rows &rows, bool keeps, uint4 *out) {
    const unsigned ranks = others & (0xFFFFFFFFu >> (32 - s.c.num_ranks)), me = 1u << s.c.rank;
    const unsigned wire = keeps ? ranks & ~me : ranks;
    const uint4 *at = s.sum(s.c.rank, slot(s, s.c.rank ^ 1, t));
    uint4 theirs = nothing();
    if (kPair && wire) rows.look(at, &theirs);
    Sum<Dtype> sum;
    if constexpr (kPair) { // 0 + a + b = 0 + b + a
      float x[Rows::N];
      if (ranks & me) rows.own_values(own, x), sum.add(x);
      if (wire) {
        if (!wait_for_lines<1>(s, rows, &at, &theirs, 1, s.c.rank ^ 1)) return false;
        rows.values(s, at, theirs, s.c.rank ^ 1, x), sum.add(x);
      }
    } else {
      auto where = [&](int r) { return s.sum(s.c.rank, slot(s, r, t)); };
      auto held = [&](int) { return own; };
      auto add = [&](int, const float *x) { sum.add(x); };
      if (!gather_lines(s, rows, ranks, wire, [](int r) { return (uint32_t)r; }, where, held, add)) return false;
    }
    *out = sum.round();
    return true;
  }
};

// ---- reduction="source": every row travels
template <int Dtype, typename Rows, typename N> struct BySource {
  static constexpr uint32_t kHeader = EPCY_LOW_LATENCY_SOURCE;
  template <bool InLoop>
  EPCY_DEVICE bool send(const LowLatency &s, const epcy_low_latency_combine &a, Lanes &to_send, const Lanes &,
                        List *lists, int t, int tokens, int first_turn, const Rows &rows) {
    constexpr bool repeats = InLoop || N::kRanks != 2;
    const uint32_t first_slot = (uint32_t)t * N::topk(s.c);
    const char *y = payload_of(a, rows);
#pragma unroll
    for (int turn = first_turn; turn < N::ranks(s.c); turn++) {
      const int source = s.after(turn);
      const bool real = t < __shfl_sync(~0u, tokens, source);
      if (turn > first_turn) to_send.template load<N>(s.c, source, t);
      lists[0].fill(real && to_send.brings(s.c) ? to_send.row : -1, 0.0f);
#pragma unroll
      for (int k = 0; k < N::topk(s.c) && real; k += kRows) {
        uint4 v[kRows];
        const unsigned here = load_rows<kRows, repeats>(a, lists[0], k, y, v);
#pragma unroll
        for (int j = 0; j < kRows; j++)
          if (here >> j & 1) rows.send(s, s.sum(source, first_slot + k + j), v[j]);
        count_row(s, source, __popc(here));
      }
    }
    return true;
  }
  EPCY_DEVICE void leave_own(const epcy_low_latency_combine &, int, const Rows &) const {}
  EPCY_DEVICE void take_own(const epcy_low_latency_combine &, int, const Rows &) {}
  EPCY_DEVICE bool receive(const LowLatency &s, const epcy_low_latency_combine &a, const Lanes &l, uint32_t others,
                           int t, const Rows &rows, bool keeps, uint4 *out) {
    const int K = N::topk(s.c), my_row = l.is_here(s.c) ? l.row & ~kRepeatedRow : -1;
    const bool used = others != kNowhere && (int)(others >> 8) < K;
    const unsigned mine = __ballot_sync(~0u, used && keeps && (int)(others & 255) == s.c.rank);
    const unsigned which = __ballot_sync(~0u, used);
    Sum<Dtype> sum;
    auto where = [&](int k) { return s.sum(s.c.rank, (uint32_t)t * K + (__shfl_sync(~0u, others, k) >> 8)); };
    const char *y = payload_of(a, rows);
    auto held = [&](int k) {
      const int row = __shfl_sync(~0u, my_row, k);
      return row >= 0 ? load_early(in_row(a, y, row)) : nothing();
    };
    auto add = [&](int k, const float *x) { sum.add(__shfl_sync(~0u, l.weight, k), x); };
    auto rank_of = [&](int k) { return __shfl_sync(~0u, others, k) & 255; };
    if (!gather_lines(s, rows, which, which & ~mine, rank_of, where, held, add)) return false;
    *out = sum.round();
    return true;
  }
};
