// Moves rows from wherever they lie to places one after the other, on any GPU: bulk copies through rings in shared memory.
//
// A warp has a ring of its own, and its first lane issues both loads and stores. One store after the other from a block
// fills a link best, rows that several warps send at once take 4 % longer; but to issue a copy in and one out takes a
// thread 300 ns, so that rows of 7 KB need two warps to keep up with a link, and smaller ones four.
#pragma once
#include "epcy/cuda.h"
#include "launch.cuh"
#include "ptx.cuh"

constexpr int kRowWarps = 4;  // at most
constexpr int kRowBatch = 32; // tokens that a warp looks up at a time

struct RowShape {
  int num_warps, num_stages, stage_bytes;
  __host__ __device__ int64_t ring_bytes() const { return (int64_t)num_warps * num_stages * stage_bytes; }
  __host__ __device__ int64_t bytes() const { return ring_bytes() + num_warps * num_stages * 8; } // with barriers
};

inline RowShape row_shape(int64_t row_bytes, int64_t reserved_bytes) {
  const int64_t most = 16384, room = 214 * 1024 - reserved_bytes, pieces = (row_bytes + most - 1) / most;
  const int64_t stage = ((row_bytes + pieces - 1) / pieces + 127) / 128 * 128;
  if (!has_bulk_copies()) return {kRowWarps, 0, (int)stage};
  const int warps = row_bytes > 8192 ? 1 : row_bytes > 4096 ? 2 : kRowWarps;
  const int64_t stages = room / (warps * (stage + 8));
  return {warps, (int)(stages > 8 ? 8 : stages < 4 ? 4 : stages), (int)stage};
}

// The rows of a block; warps take them by turns.
struct RowPath {
  int num_rows;
  int64_t row_bytes;
  const char *x; // the row of token t begins at x + t * stride
  int64_t stride;
};

#ifdef EPCY_HAS_BULK
struct RowMover {
  static constexpr int kLag = 2; // stores whose stage may still be read when the one before them is filled again
  const RowShape shape;
  const int lane, warp;
  char *const ring;
  uint64_t *const full;
  int32_t *const tokens; // shared, [2 * kRowBatch] of each warp: of the batch that it stores, and of the next
  int ahead = 0;
  int loaded = 0, load_row = 0, load_stage = 0, load_at = 0; // of the first lane; rows are the warp's own

  // All threads; a block barrier must follow. `of_block`: [kRowWarps][2 * kRowBatch].
  EPCY_DEVICE RowMover(char *shared, const RowShape &of, int32_t *of_block)
      : shape(of), lane(threadIdx.x & 31), warp(threadIdx.x >> 5),
        ring(shared + (int64_t)warp * of.num_stages * of.stage_bytes),
        full((uint64_t *)(shared + of.ring_bytes()) + warp * of.num_stages),
        tokens(of_block + warp % kRowWarps * 2 * kRowBatch) {
    if (lane != 0 || !moves()) return;
#pragma unroll 1
    for (int i = 0; i < shape.num_stages; i++) barrier_init(full + i, 1);
    barrier_init_fence();
  }
  // Whether this warp is one of those; they call the others whole.
  EPCY_DEVICE bool moves() const { return warp < shape.num_warps; }

  // Begin to load before it is known where rows go. `token_of(i)`: of the block's i-th row.
  template <typename Of> EPCY_DEVICE void prime(const RowPath &p, Of &&token_of) {
    tokens[lane] = fetch(p, token_of, 0), ahead = fetch(p, token_of, 1);
    __syncwarp();
    if (lane == 0)
#pragma unroll 1
      while (loaded < shape.num_stages - kLag && load_row < own_rows(p)) load(p);
    __syncwarp();
  }
  // Everything, to `to` and behind it; only the block's first `num_fitting` rows have room there.
  template <typename Of> EPCY_DEVICE void run(const RowPath &p, Of &&token_of, char *to, int num_fitting) {
    const int num = own_rows(p), fitting = own(num_fitting);
    int row = 0, stage = 0, at = 0;
    uint32_t phase = 0;
    to += warp * p.row_bytes;
#pragma unroll 1
    for (int batch = 0; batch * kRowBatch < num; batch++) {
      tokens[(batch + 1) % 2 * kRowBatch + lane] = ahead; // loads run ahead of stores, but never by a batch
      __syncwarp();
      ahead = fetch(p, token_of, batch + 2); // a batch early, since tokens are far
      const int end = (batch + 1) * kRowBatch < num ? (batch + 1) * kRowBatch : num;
      if (lane == 0)
#pragma unroll 1
        while (row < end) {
          const uint32_t bytes = piece_bytes(p, at);
          barrier_wait(full + stage, phase);
          if (row < fitting) bulk_store(to + at, ring + stage * shape.stage_bytes, bytes);
          bulk_commit();
          if (++stage == shape.num_stages) stage = 0, phase ^= 1;
          at += (int)bytes;
          if (at == p.row_bytes) at = 0, row++, to += shape.num_warps * p.row_bytes;
          if (load_row == num) continue;
          if (loaded >= shape.num_stages) bulk_wait_read<kLag>();
          load(p);
        }
      __syncwarp();
    }
    if (lane == 0) { // they have arrived, for whoever acquires what this thread releases
      bulk_wait<0>();
      proxy_fence();
    }
    __syncwarp();
  }
  // Instead of run(): nothing is stored. What is on its way must have come before this block's memory is given away.
  EPCY_DEVICE void give_up() {
#pragma unroll 1
    for (int i = 0; lane == 0 && i < loaded; i++) barrier_wait(full + i, 0);
    __syncwarp();
  }

private:
  EPCY_DEVICE int own(int n) const { // of a block's first n rows
    return n > warp ? (n - warp + shape.num_warps - 1) / shape.num_warps : 0;
  }
  EPCY_DEVICE int own_rows(const RowPath &p) const { return own(p.num_rows); }
  template <typename Of> EPCY_DEVICE int fetch(const RowPath &p, Of &token_of, int batch) const {
    const int i = batch * kRowBatch + lane;
    return i < own_rows(p) ? token_of(warp + i * shape.num_warps) : 0;
  }
  EPCY_DEVICE uint32_t piece_bytes(const RowPath &p, int at) const {
    return (uint32_t)(p.row_bytes - at < shape.stage_bytes ? p.row_bytes - at : shape.stage_bytes);
  }
  EPCY_DEVICE void load(const RowPath &p) { // a row, or a piece of one
    const uint32_t bytes = piece_bytes(p, load_at);
    barrier_expect(full + load_stage, bytes);
    bulk_load(ring + load_stage * shape.stage_bytes, p.x + tokens[load_row & (2 * kRowBatch - 1)] * p.stride + load_at,
              bytes, full + load_stage);
    loaded++, load_at += (int)bytes;
    if (++load_stage == shape.num_stages) load_stage = 0;
    if (load_at == p.row_bytes) load_at = 0, load_row++;
  }
};
#else
struct RowMover {
  const int warp;
  EPCY_DEVICE RowMover(char *, const RowShape &, int32_t *) : warp(threadIdx.x >> 5) {}
  EPCY_DEVICE bool moves() const { return warp < kRowWarps; }
  template <typename Of> EPCY_DEVICE void prime(const RowPath &, Of &&) {}
  template <typename Of> EPCY_DEVICE void run(const RowPath &p, Of &&token_of, char *to, int num_fitting) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int i = warp; i < p.num_rows && i < num_fitting; i += kRowWarps) {
      const char *row = p.x + token_of(i) * p.stride;
#pragma unroll 1
      for (int64_t at = lane * 16; at < p.row_bytes; at += 32 * 16)
        *(uint4 *)(to + i * p.row_bytes + at) = __ldcg((const uint4 *)(row + at));
    }
    __threadfence_system();
    __syncwarp();
  }
  EPCY_DEVICE void give_up() {}
};
#endif
