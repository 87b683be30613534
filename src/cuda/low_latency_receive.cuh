// Low-latency dispatch: tokens that come are copied to the rows of their experts.
#pragma once
#include "low_latency_grid.cuh"

// What a warp has of its part of a token of some rank: a line's units, and the place and weight of each lane.
struct Arrival {
  int token, source;
  ulonglong2 words;
  uint4 unit;
  EPCY_DEVICE void look_at_words(const LowLatency &s, int K) {
    if (s.lane < K) words = load_words(s.lanes(s.c.rank, source, token) + s.lane);
  }
  EPCY_DEVICE void look_at_unit(const LowLatency &s, const Seat &seat) {
    if (seat.line_is_real) unit = load_unit(s.row(s.c.rank, source, token) + seat.at);
  }
  EPCY_DEVICE void begin(const LowLatency &s, const Seat &seat, int K, int of, int from) {
    token = of, source = from, words = make_ulonglong2(0, 0), unit = make_uint4(0, 0, 0, 0);
    look_at_words(s, K), look_at_unit(s, seat);
  }
  EPCY_DEVICE bool misses_words(const LowLatency &s, int K) const {
    return s.lane < K && !(s.is_now(words.x) && s.is_now(words.y));
  }
  // Wait for both together: if the lanes say that nothing comes, there is no unit to wait for. False: gave up.
  EPCY_DEVICE bool wait(const LowLatency &s, const Seat &seat, int K) {
    Patience patience;
    for (;;) {
      const bool unknown = misses_words(s, K), comes = s.lane < K && (uint32_t)words.x != kNowhere;
      const bool late = seat.late(unit, s.epoch);
      if (!EPCY_RARELY(__any_sync(~0u, unknown || late))) return true;
      const bool any_unknown = __any_sync(~0u, unknown);
      if (!any_unknown && !__any_sync(~0u, comes)) return true;
      if (patience.over(s, unknown || late, EPCY_CUDA_LINES, source, unknown ? words.x : (uint64_t)unit.x << 32))
        return false;
      if (any_unknown) look_at_words(s, K);
      look_at_unit(s, seat);
    }
  }
};

// A block's way through the tokens that come by the wire: its own of every rank, one rank after the other.
template <typename N> struct Way {
  int token, turn, source;
  EPCY_DEVICE bool next(const LowLatency &s, const Tour &tour, int tokens) { // lane r: of rank r
    const int most = __reduce_max_sync(~0u, tokens);
    do {
      if (++turn == N::ranks(s.c)) turn = 0, token += tour.step;
      source = s.after(turn);
      if (token >= most) return false;
    } while (token >= __shfl_sync(~0u, tokens, source));
    return true;
  }
};

// Where a token's lanes go here, as far as that is known before the counts are; a whole warp.
struct Places {
  int local, row; // of lane `lane`: the expert, and the row but for what earlier ranks have for it; -1: none here
  bool repeated;  // an earlier lane brings the row
  unsigned lanes; // that bring one
  float weight;

  template <typename N> EPCY_DEVICE void set(const LowLatency &s, uint32_t place, float of_lane) {
    const bool here = s.lane < N::topk(s.c) && place != kNowhere;
    repeated = place & kRepeated, weight = of_lane;
    local = here ? (place & ~kRepeated) >> 16 : 0;
    row = here ? (int)(place & 0xFFFF) + local * N::ranks(s.c) * s.c.max_tokens : -1;
    lanes = __ballot_sync(~0u, here && !repeated);
  }
};

// A whole warp: copy what has come of a token of `source` to the rows of its lanes; if it `keeps_handle`, keep these there.
// `counts`: of every rank for my experts.
template <typename N>
EPCY_DEVICE void place(const LowLatency &s, const epcy_low_latency_dispatch &a, const Tour &tour, const Seat &seat,
                       const int *counts, const Places &p, int source, int token, const uint4 &unit,
                       bool keeps_handle) {
  const int K = N::topk(s.c);
  int row = p.row;
  if (row >= 0) {
    if constexpr (N::kRanks == 2) {
      if (source) row += counts[p.local];
    } else {
#pragma unroll 1
      for (int r = 0; r < source; r++) row += counts[r * (int)s.c.num_local.by + p.local];
    }
  }
  const int line = threadIdx.x >> 3, scale = tour.part * a.part_scales + line;
  const bool has_scale = seat.is_tail && a.recv_scales && line < a.part_scales && scale < a.num_scales;
  char *to = seat.is_tail ? (char *)(a.recv_scales + scale) : a.recv_x + seat.offset;
  const uint32_t stride = seat.is_tail ? a.num_scales * 4 : s.c.row_bytes;
#pragma unroll 1
  for (unsigned left = p.lanes; left;) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const bool more = left;
      const int r = __shfl_sync(~0u, row, __ffs(left) - 1);
      left &= left - 1;
      char *at = to + (uint64_t)(uint32_t)r * stride;
      if (more && seat.has_data) *(uint4 *)at = unit;
      if (more && has_scale) *(uint32_t *)at = scale_of(unit);
    }
  }
  if (tour.part == 0 && keeps_handle && s.lane < K) {
    const int at = (source * s.c.max_tokens + token) * K + s.lane;
    s.c.handle.rows[at] = row >= 0 && p.repeated ? row | kRepeatedRow : row;
    s.c.handle.weights[at] = p.weight;
  }
}

// All threads of the clerk: recv_count and what follows from it. `from`: [R], nothing yet; then lanes that came from each.
EPCY_DEVICE void tell_counts(const epcy_low_latency_dispatch &a, const int *counts, int *from) {
  const int L = (int)a.call.num_local.by, R = a.call.num_ranks;
  uint64_t *experts = (uint64_t *)(a.call.counters + 1);
#pragma unroll 1
  for (int e = threadIdx.x; e < L; e += kThreads) {
    int sum = 0;
#pragma unroll 1
    for (int r = 0; r < R; r++) {
      const int n = counts[r * L + e];
      sum += n;
      if (n) atomicAdd(from + r, n);
    }
    a.recv_count[e] = a.call.handle.counts[e] = sum;
    add_to(experts + e, sum);
    if (!a.stats) continue;
    if (a.stats_is_int64) ((int64_t *)a.stats)[e] += sum;
    else ((int *)a.stats)[e] += sum;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x, n = lane < R ? from[lane] : 0;
  if (lane < R) add_to(&a.call.counters->tokens_from[lane], a.call.handle.flows[R + lane] = n);
  const int rows = __reduce_add_sync(~0u, n);
  if (lane == 0) atomicMax((unsigned long long *)&a.call.counters->most_rows[1][a.area], (unsigned long long)rows);
}

// This rank's own copy of a block's first token, if it does not take the wire.
struct Own {
  uint4 unit;
  Places places;
};

// All threads: receive this block's tokens of every rank. `keeps`: this rank's first one is `own`. `from`: [R], nothing
// yet. `missing`: the block's, 0 or who takes no part. What the call comes to; of use is nothing unless it is well; kAgain:
// once more, after look_around().
template <typename N>
EPCY_DEVICE int receive(LowLatency &s, const epcy_low_latency_dispatch &a, const Tour &tour, const Seat &seat,
                        int *counts, bool keeps, const Own &own, int *from, uint32_t *missing, Patience &for_headers) {
  const int lane = s.lane, K = N::topk(s.c), E = s.c.num_experts, first = threadIdx.x, warp = first >> 5;
  const uint64_t *words = s.counts(s.c.rank, 0);
  const bool speaks = s.is_clerk() && first < 32;
  if (N::kRanks == 0 && EPCY_RARELY(s.c.peers.goes_on)) { // the clerk finds out who takes part
    int ignored;
    if (speaks && s.gather_all(&ignored, false) != EPCY_VERDICT_BROKEN) s.give_go(s.kToReceive);
    else if (!speaks) s.wait_for_go(s.kToReceive);
  }
  const ulonglong2 headers = s.look_for_headers();
  uint64_t count = first < E ? load_word(words + first) : 0;
  int tokens, verdict = s.gather(headers, &tokens, speaks, for_headers);
  Patience patience;
#pragma unroll 1
  for (int i = first; i - lane < E && verdict < EPCY_VERDICT_BROKEN; i += kThreads) {
    if (i != first && i < E) count = load_word(words + i);
    const bool comes = i < E && (!EPCY_RARELY(s.missing()) || s.takes_part(quotient(i, s.c.num_local)));
    while (EPCY_RARELY(__any_sync(~0u, comes && !s.is_now(count)))) {
      if (patience.over(s, comes && !s.is_now(count), EPCY_CUDA_COUNTS, quotient(i, s.c.num_local), count)) {
        verdict = EPCY_VERDICT_BROKEN;
        break;
      }
      if (i < E) count = load_word(words + i);
    }
    if (i < E) counts[i] = comes ? (int)(uint32_t)count : 0;
  }
  Arrival next; // what comes first, if it comes: hardly before the counts
  const int first_source = s.after(keeps && N::ranks(s.c) > 1 ? 1 : 0);
  if (tour.token < s.c.max_tokens) next.begin(s, seat, K, tour.token, first_source);
  if (EPCY_RARELY(s.missing()) && lane == 0) *missing = s.missing(); // the same for all warps
  if (EPCY_RARELY(__syncthreads_or(verdict >= EPCY_VERDICT_BROKEN)))
    verdict = __syncthreads_or(verdict == EPCY_VERDICT_BROKEN) ? EPCY_VERDICT_BROKEN : kAgain;
  if (EPCY_RARELY(verdict != EPCY_VERDICT_OK)) return verdict;
  stamp(EPCY_SPAN_WAIT, s.notes());
  if (s.is_clerk()) {
    tell_counts(a, counts, from);
    if (first < s.c.num_ranks) s.c.handle.tokens[lane] = tokens;
    return EPCY_VERDICT_OK;
  }

  if (keeps && tour.token < s.c.num_tokens) // while the others' are on their way
    place<N>(s, a, tour, seat, counts, own.places, s.c.rank, tour.token, own.unit, warp == kScribe);
  Way<N> way = {tour.token, keeps ? 0 : -1, 0};
  bool more = way.next(s, tour, tokens);
  if (EPCY_RARELY(more && (way.token != tour.token || way.source != first_source)))
    next.begin(s, seat, K, way.token, way.source);
#pragma unroll 1
  while (more) { // one token ahead of the one that is worked on
    Arrival now = next;
    more = way.next(s, tour, tokens);
    if (EPCY_RARELY(more)) next.begin(s, seat, K, way.token, way.source);
    if (!now.wait(s, seat, K)) return EPCY_VERDICT_BROKEN;
    Places places;
    places.set<N>(s, (uint32_t)now.words.x, __uint_as_float((uint32_t)now.words.y));
    place<N>(s, a, tour, seat, counts, places, now.source, now.token, now.unit, warp == (now.source & (kWarps - 1)));
  }
  return EPCY_VERDICT_OK;
}
