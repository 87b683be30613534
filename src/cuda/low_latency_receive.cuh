// Low-latency dispatch: tokens that come are copied to the rows of their experts.
#pragma once
#include "low_latency.cuh"

// The place of a lane's row here; lanes of a warp.
EPCY_DEVICE int row_of(const epcy_shape &shape, const int *counts, int source, uint32_t place) {
  const int L = (int)epcy_num_local_experts(&shape), local = (place & ~kRepeated) >> 16;
  int row = (int)(place & 0xFFFF);
  for (int s = 0; s < source; s++) row += counts[s * L + local];
  return row + local * (int)(shape.num_ranks * shape.num_low_latency_tokens);
}

// A whole warp: what came in a token's line goes to the rows of its lanes, and the lanes into the handle.
struct Rows {
  int row;
  unsigned which; // lanes that bring a row
  EPCY_DEVICE Rows(const epcy_low_latency_dispatch &a, const int *counts, int source, int t, uint32_t place,
                   float weight, bool keep) {
    const int lane = threadIdx.x & 31, K = (int)a.call.peers.shape.num_topk;
    const bool here = lane < K && place != kNowhere;
    row = here ? row_of(a.call.peers.shape, counts, source, place) : -1;
    which = __ballot_sync(~0u, here && !(place & kRepeated));
    if (keep && lane < K) {
      const int64_t at = ((int64_t)source * a.call.peers.shape.num_low_latency_tokens + t) * K + lane;
      a.call.handle.rows[at] = here && (place & kRepeated) ? row | kRepeatedRow : row;
      a.call.handle.weights[at] = weight;
    }
  }
  EPCY_DEVICE void fill(const epcy_low_latency_dispatch &a, const Seat &seat, int part, const uint4 &v) const {
    const int line = threadIdx.x >> 3, scale = part * a.part_scales + line;
    const bool has_scale = seat.is_tail && a.recv_scales && line < a.part_scales && scale < a.num_scales;
    for (unsigned left = which; left; left &= left - 1) {
      const int64_t to = __shfl_sync(~0u, row, __ffs(left) - 1);
      if (seat.has_data) *(uint4 *)(a.recv_x + to * a.call.row_bytes + seat.offset) = v;
      else if (has_scale) a.recv_scales[to * a.num_scales + scale] = scale_of(v);
    }
  }
};

// All threads: this block's items of tokens that come by the wire, every rank's. False: gave up.
EPCY_DEVICE bool receive(const LowLatency &s, const epcy_low_latency_dispatch &a, const int *counts, int tokens,
                         bool keeps) {
  const int lane = s.lane, K = (int)a.call.peers.shape.num_topk, P = a.call.num_parts, R = s.num_ranks;
  const int items = __reduce_max_sync(~0u, tokens) * P;
  int item = blockIdx.x, turn = 0, source = 0;
  ulonglong2 words;
  uint4 unit;
  // To the next item that comes by the wire, and a first look at it; false: there is none.
  auto look = [&]() {
    for (;; turn++) {
      if (turn == R) turn = 0, item += gridDim.x;
      if (item >= items) return false;
      source = s.me + turn < R ? s.me + turn : s.me + turn - R;
      if (item < __shfl_sync(~0u, tokens, source) * P && !(keeps && turn == 0 && item == (int)blockIdx.x)) break;
    }
    turn++;
    words = make_ulonglong2(0, 0);
    if (lane < K) words = load_words(s.lanes(s.me, source, item / P) + lane);
    const Seat seat(a.call, item % P);
    if (seat.line_is_real) unit = load_unit(s.row(s.me, source, item / P) + seat.at);
    return true;
  };
  for (bool more = look(); more;) {
    const int from = source, t = item / P, part = item % P;
    const Seat seat(a.call, part);
    ulonglong2 got = words;
    uint4 v = unit;
    more = look();
    Patience patience;
    for (;;) {
      const bool waits = lane < K && !(s.is_now(got.x) && s.is_now(got.y));
      if (!__any_sync(~0u, waits)) break;
      if (patience.over(s, waits, from, (uint32_t)(got.x >> 32))) return false;
      if (lane < K) got = load_words(s.lanes(s.me, from, t) + lane);
    }
    const Rows rows(a, counts, from, t, (uint32_t)got.x, __uint_as_float((uint32_t)got.y),
                    part == 0 && threadIdx.x < 32);
    if (!rows.which) continue;
    for (;;) {
      const bool waits = seat.late(v, s.epoch);
      if (!__any_sync(~0u, waits)) break;
      if (patience.over(s, waits, from, v.x)) return false;
      if (seat.line_is_real) v = load_unit(s.row(s.me, from, t) + seat.at);
    }
    rows.fill(a, seat, part, v);
  }
  return true;
}
