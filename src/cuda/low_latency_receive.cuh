// Low-latency dispatch: tokens that come are copied to the rows of their experts.
#pragma once
#include "low_latency.cuh"

// What a warp has of an item of some rank: a line's units, and the place and weight of each lane of the token.
struct Arrival {
  int item, source;
  ulonglong2 words;
  uint4 unit;
  EPCY_DEVICE void look_at_words(const LowLatency &s) {
    if (s.lane < s.c.num_topk) words = load_words(s.lanes(s.c.rank, source, quotient(item, s.c.num_parts)) + s.lane);
  }
  EPCY_DEVICE void look_at_unit(const LowLatency &s) {
    const int t = quotient(item, s.c.num_parts);
    const Seat seat(s.c, item - t * (int)s.c.num_parts.by);
    if (seat.line_is_real) unit = load_unit(s.row(s.c.rank, source, t) + seat.at);
  }
};

// A block's way through the items that come by the wire: each item of every rank.
struct Way {
  int item, turn, source;
  EPCY_DEVICE bool next(const LowLatency &s, int tokens) { // lane r: of rank r
    const int P = (int)s.c.num_parts.by, items = __reduce_max_sync(~0u, tokens) * P;
    do {
      if (++turn == s.c.num_ranks) turn = 0, item += gridDim.x;
      source = s.after(turn);
      if (item >= items) return false;
    } while (item >= __shfl_sync(~0u, tokens, source) * P);
    return true;
  }
};

// A whole warp: wait for an item to be there, copy it to the rows of its lanes, and keep these in the handle. False: gave
// up. `counts`: of every rank for my experts.
EPCY_DEVICE bool place(const LowLatency &s, const epcy_low_latency_dispatch &a, const int *counts, Arrival &x) {
  const int lane = s.lane, K = s.c.num_topk, L = (int)s.c.num_local.by;
  const int t = quotient(x.item, s.c.num_parts), part = x.item - t * (int)s.c.num_parts.by;
  const Seat seat(s.c, part);
  Patience patience;
  for (;;) { // for both together: if the lanes say that nothing comes, there is no unit to wait for
    const bool unknown = lane < K && !(s.is_now(x.words.x) && s.is_now(x.words.y));
    const bool comes = lane < K && (uint32_t)x.words.x != kNowhere, late = seat.late(x.unit, s.epoch);
    const bool any_unknown = __any_sync(~0u, unknown), any_late = __any_sync(~0u, late);
    if (!EPCY_RARELY(any_unknown || any_late)) break;
    if (!any_unknown && !__any_sync(~0u, comes)) break;
    if (patience.over(s, unknown || late, EPCY_CUDA_LINES, x.source, unknown ? x.words.x : (uint64_t)x.unit.x << 32))
      return false;
    if (any_unknown) x.look_at_words(s);
    if (any_late) x.look_at_unit(s);
  }
  const uint32_t place = (uint32_t)x.words.x;
  const bool here = lane < K && place != kNowhere, repeated = place & kRepeated;
  int row = -1;
  if (here) {
    const int local = (place & ~kRepeated) >> 16;
    row = (int)(place & 0xFFFF) + local * s.c.num_ranks * s.c.max_tokens;
#pragma unroll 1
    for (int r = 0; r < x.source; r++) row += counts[r * L + local];
  }
  if (part == 0 && threadIdx.x < 32 && lane < K) {
    const int at = (x.source * s.c.max_tokens + t) * K + lane;
    s.c.handle.rows[at] = here && repeated ? row | kRepeatedRow : row;
    s.c.handle.weights[at] = __uint_as_float((uint32_t)x.words.y);
  }
  if (repeated) row = -1; // an earlier lane brings it
  if (!__any_sync(~0u, row >= 0)) return true;
  const int line = threadIdx.x >> 3, scale = part * a.part_scales + line;
  const bool has_scale = seat.is_tail && a.recv_scales && line < a.part_scales && scale < a.num_scales;
  char *to = seat.is_tail ? (char *)(a.recv_scales + scale) : a.recv_x + seat.offset;
  const uint32_t stride = seat.is_tail ? a.num_scales * 4 : s.c.row_bytes;
#pragma unroll 1
  for (int k = 0; k < K; k += 4)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int r = __shfl_sync(~0u, row, k + j);
      if (r < 0) continue;
      char *at = to + (uint64_t)(uint32_t)r * stride;
      if (seat.has_data) *(uint4 *)at = x.unit;
      if (has_scale) *(uint32_t *)at = scale_of(x.unit);
    }
  return true;
}

// All threads: recv_count and what follows from it.
EPCY_DEVICE void tell_counts(const epcy_low_latency_dispatch &a, const int *counts) {
  const int G = gridDim.x, L = (int)a.call.num_local.by;
#pragma unroll 1
  for (int e = blockIdx.x + threadIdx.x * G; e < L; e += kThreads * G) {
    int sum = 0;
#pragma unroll 1
    for (int r = 0; r < a.call.num_ranks; r++) sum += counts[r * L + e];
    a.recv_count[e] = a.call.handle.counts[e] = sum;
    if (!a.stats) continue;
    if (a.stats_is_int64) atomicAdd((unsigned long long *)a.stats + e, (unsigned long long)sum);
    else atomicAdd((int *)a.stats + e, sum);
  }
}

// All threads: receive this block's items of every rank. `now`: one of this rank that did not take the wire, if `kept`.
// What the call comes to; of use is nothing unless it is well.
EPCY_DEVICE int receive(const LowLatency &s, const epcy_low_latency_dispatch &a, int *counts, Arrival now, bool kept,
                        bool keeps) {
  const int lane = s.lane, E = s.c.num_experts, at = threadIdx.x;
  const uint64_t *words = s.counts(s.c.rank, 0);
  const ulonglong2 headers = s.look_for_headers();
  uint64_t count = at < E ? load_word(words + at) : 0;
  int tokens, verdict = s.gather(headers, &tokens);
  Patience patience;
#pragma unroll 1
  for (int i = at; i - lane < E; i += kThreads) {
    if (i != at && i < E) count = load_word(words + i);
    for (;;) {
      const bool waits = i < E && !s.is_now(count);
      if (verdict == EPCY_VERDICT_BROKEN || !EPCY_RARELY(__any_sync(~0u, waits))) break;
      if (patience.over(s, waits, EPCY_CUDA_COUNTS, quotient(i, s.c.num_local), count)) verdict = EPCY_VERDICT_BROKEN;
      if (waits) count = load_word(words + i);
    }
    if (i < E) counts[i] = (int)(uint32_t)count;
  }
  if (__syncthreads_or(verdict == EPCY_VERDICT_BROKEN)) verdict = EPCY_VERDICT_BROKEN;
  if (blockIdx.x == 0 && at == 0) s.c.handle.found->verdict = verdict;
  if (EPCY_RARELY(verdict != EPCY_VERDICT_OK)) return verdict;

  // Rows come with the counts, so this is the time to look for them: one item ahead of the one that is worked on.
  Way way = {(int)blockIdx.x, keeps ? 0 : -1, 0};
  bool here = kept, told = false;
  for (;;) {
    Arrival next;
    const bool more = way.next(s, tokens);
    if (more) {
      next.item = way.item, next.source = way.source;
      next.words = make_ulonglong2(0, 0), next.unit = make_uint4(0, 0, 0, 0);
      next.look_at_words(s), next.look_at_unit(s);
    }
    if (!told) tell_counts(a, counts);
    told = true;
    if (here && !place(s, a, counts, now)) return EPCY_VERDICT_BROKEN;
    if (!more) break;
    now = next, here = true;
  }
  if (blockIdx.x == 0 && at < s.c.num_ranks) s.c.handle.tokens[lane] = tokens;
  return EPCY_VERDICT_OK;
}
