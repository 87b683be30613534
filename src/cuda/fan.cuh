// The expert layout's rows of a token: a token crosses a link once, and fans out to its other rows where it came.
//
// fans[i] is for the i-th token that comes to this rank, in the order of the rank layout: (K) rows of its lanes here, in
// the order of lanes, then -1. Senders write those of other ranks into the control region; the handle keeps all.
#pragma once
#include "mover.cuh"
#include "step.cuh"

constexpr int kFanStages = 16; // as many items as a ring may hold, and a power of two

// For each item in a warp's ring: the row that a lane stores it to, or -1.
struct FanRows {
  int row[kMoverWarps][kFanStages][32];
};

// A whole mover warp: store items that `next` names to all their rows but the first `skip`. next(&from, &fan) gives the
// address of a whole row, where it may be read at once, and the lane's entry of its fan; false at the end.
template <typename Next>
EPCY_DEVICE void fan_out(Mover &mover, FanRows &rows, char *payload, int64_t row_bytes, int skip, Next &&next) {
  const char *row = nullptr;
  int mine = -1;
  int64_t at = row_bytes, put_at = 0;
  auto bytes_at = [&](int64_t offset) {
    return (uint32_t)(row_bytes - offset < mover.stage_bytes ? row_bytes - offset : mover.stage_bytes);
  };
  auto source = [&](const char **from, uint32_t *bytes) {
    if (at >= row_bytes) {
      do {
        if (!next(&row, &mine)) return false;
        if (mover.lane < skip) mine = -1;
      } while (!__ballot_sync(~0u, mine >= 0));
      at = 0;
    }
    rows.row[mover.warp][mover.loaded % kFanStages][mover.lane] = mine;
    *from = row + at, *bytes = bytes_at(at);
    at += mover.stage_bytes;
    return true;
  };
  mover.run<false>(source, [&](uint32_t *bytes) {
    const int to = rows.row[mover.warp][mover.stored % kFanStages][mover.lane];
    char *dst = to < 0 ? nullptr : payload + to * row_bytes + put_at;
    *bytes = bytes_at(put_at);
    put_at += mover.stage_bytes;
    if (put_at >= row_bytes) put_at = 0;
    return dst;
  });
  mover.arrived<0>();
}
