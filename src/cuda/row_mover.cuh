// Moves rows from wherever they lie to places one after the other, on any GPU: through a ring of stages in shared memory,
// which one warp fills with bulk loads and another one empties with bulk stores.
//
// Issuing a copy costs a thread more time than a row of 7 KB takes on a link. So loads and stores are two warps' work, and
// rows that fit one stage leave as one store. One store after the other from a block fills a link best: rows that several
// warps of a block send at once take 4 % longer.
#pragma once
#include "epcy/cuda.h"
#include "launch.cuh"
#include "ptx.cuh"

struct RowShape {
  int num_stages, stage_bytes, stage_rows; // a stage has so many rows, a power of two, or a piece of one
  __host__ __device__ int64_t bytes() const { return (int64_t)num_stages * (stage_bytes + 2 * 8); } // with barriers
};

inline RowShape row_shape(int64_t row_bytes, int64_t reserved_bytes) {
  const int64_t most = 16384, room = 214 * 1024 - reserved_bytes, pieces = (row_bytes + most - 1) / most;
  const int64_t fitting = most / row_bytes, rows = fitting >= 8 ? 8 : fitting >= 4 ? 4 : fitting >= 2 ? 2 : 1;
  const int64_t stage = (rows * ((row_bytes + pieces - 1) / pieces) + 127) / 128 * 128;
  if (!has_bulk_copies()) return {0, (int)stage, (int)rows};
  const int64_t stages = room / (stage + 2 * 8);
  return {(int)(stages > 10 ? 10 : stages < 4 ? 4 : stages), (int)stage, (int)rows};
}

// Where a block's rows lie and go. `from(i)`: the token of the i-th one.
struct RowPath {
  int num_rows;
  int64_t row_bytes;
  const char *x; // row `token` begins at x + token * stride
  int64_t stride;
};

#ifdef EPCY_HAS_BULK
constexpr int kRowWarps = 2; // the one that loads, and the one that stores

struct RowMover {
  static constexpr int kLag = 2; // stores whose stage may still be read when the one before them is filled again
  static constexpr int kBatch = 32;
  static_assert(kBatch % 8 == 0, "a stage's rows are of one batch");
  const RowShape shape;
  char *const ring;
  uint64_t *const full, *const empty;
  int32_t *const tokens; // shared, [kBatch]: of the rows that the loader is at
  const int lane;
  int row = 0, batch = -1, ahead = 0;                  // of the loader: all its lanes have the same
  int loaded = 0, stage = 0, in_stage = 0, offset = 0; // its first lane's: stages, and where the next row goes

  // All threads; a block barrier must follow.
  EPCY_DEVICE RowMover(char *shared, const RowShape &of, int32_t *of_block)
      : shape(of), ring(shared), full((uint64_t *)(shared + (int64_t)of.num_stages * of.stage_bytes)),
        empty(full + of.num_stages), tokens(of_block), lane(threadIdx.x & 31) {
    if (threadIdx.x != 0) return;
#pragma unroll 1
    for (int i = 0; i < 2 * shape.num_stages; i++) barrier_init(full + i, 1);
    barrier_init_fence();
  }

  // The loader, as far as there is room, before it is known where rows go.
  template <typename From> EPCY_DEVICE void prime(const RowPath &p, From &&from) {
    if (is_loader()) load(p, from, false);
  }
  // Both warps: everything, to `to` and behind it; only the first `num_fitting` rows have room there.
  template <typename From> EPCY_DEVICE void run(const RowPath &p, From &&from, char *to, int num_fitting) {
    if (is_loader()) load(p, from, true);
    else if (lane == 0) store(p, to, num_fitting);
    __syncwarp();
  }
  // Instead of run(): nothing is stored. What is on its way must have come before this block's memory is given away.
  EPCY_DEVICE void give_up() {
#pragma unroll 1
    for (int i = 0; is_loader() && lane == 0 && i < loaded; i++) barrier_wait(full + i, 0);
    __syncwarp();
  }

private:
  EPCY_DEVICE static bool is_loader() { return threadIdx.x < 32; }
  EPCY_DEVICE static uint32_t least(int64_t a, int64_t b) { return (uint32_t)(a < b ? a : b); }
  // Of the stage that begins with this row, at this offset in it: how many bytes it gets.
  EPCY_DEVICE uint32_t stage_bytes_of(const RowPath &p, int first, int at) const {
    if (p.row_bytes > shape.stage_bytes) return least(p.row_bytes - at, shape.stage_bytes);
    return least(shape.stage_rows, p.num_rows - first) * (uint32_t)p.row_bytes;
  }

  template <typename From> EPCY_DEVICE void load(const RowPath &p, From &from, bool all) {
    auto fetch = [&](int of_batch) {
      const int i = of_batch * kBatch + lane;
      return i < p.num_rows ? from(i) : 0;
    };
#pragma unroll 1
    while (row < p.num_rows) {
      if (row / kBatch != batch) { // tokens come a batch ahead, since their memory is far
        const int now = batch < 0 ? fetch(0) : ahead;
        batch = row / kBatch, ahead = fetch(batch + 1);
        __syncwarp();
        tokens[lane] = now;
        __syncwarp();
      }
      const int end = (int)least((batch + 1) * kBatch, p.num_rows);
      if (lane == 0)
#pragma unroll 1
        while (row < end && (all || in_stage || loaded < shape.num_stages)) load_next(p);
      row = __shfl_sync(~0u, row, 0);
      if (!all) return;
    }
  }
  EPCY_DEVICE void load_next(const RowPath &p) { // a row, or a piece of one
    if (in_stage == 0) {
      if (loaded >= shape.num_stages) barrier_wait(empty + stage, (loaded / shape.num_stages - 1) & 1);
      barrier_expect(full + stage, stage_bytes_of(p, row, offset));
    }
    const uint32_t bytes = least(p.row_bytes - offset, shape.stage_bytes);
    bulk_load(ring + stage * shape.stage_bytes + in_stage * (int)p.row_bytes,
              p.x + tokens[row % kBatch] * p.stride + offset, bytes, full + stage);
    offset += (int)bytes, in_stage++;
    if (offset == p.row_bytes) offset = 0, row++;
    if (offset == 0 && in_stage < shape.stage_rows && row < p.num_rows) return;
    in_stage = 0, loaded++;
    if (++stage == shape.num_stages) stage = 0;
  }

  EPCY_DEVICE void store(const RowPath &p, char *to, int num_fitting) {
    uint32_t phase = 0;
    int at = 0, done = 0, freed = 0, first = 0, from = 0; // from: in a row that goes piece by piece
    const bool in_pieces = p.row_bytes > shape.stage_bytes;
#pragma unroll 1
    while (first < p.num_rows) {
      const uint32_t bytes = stage_bytes_of(p, first, from);
      const int rows = in_pieces ? 1 : (int)(bytes / (uint32_t)p.row_bytes), fitting = num_fitting - first;
      barrier_wait(full + at, phase);
      if (fitting >= rows) bulk_store(to, ring + at * shape.stage_bytes, bytes);
      else if (fitting > 0) bulk_store(to, ring + at * shape.stage_bytes, fitting * (uint32_t)p.row_bytes);
      bulk_commit();
      to += bytes, from += (int)bytes;
      if (!in_pieces || from == p.row_bytes) first += rows, from = 0;
      if (++at == shape.num_stages) at = 0, phase ^= 1;
      if (++done <= kLag) continue;
      bulk_wait_read<kLag>();
      barrier_arrive(empty + freed);
      if (++freed == shape.num_stages) freed = 0;
    }
    bulk_wait<0>(); // they have arrived, for whoever acquires what this thread releases
    proxy_fence();
  }
};
#else
constexpr int kRowWarps = 4; // each copies rows of its own

struct RowMover {
  EPCY_DEVICE RowMover(char *, const RowShape &, int32_t *) {}
  template <typename From> EPCY_DEVICE void prime(const RowPath &, From &&) {}
  template <typename From> EPCY_DEVICE void run(const RowPath &p, From &&from, char *to, int num_fitting) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int i = threadIdx.x >> 5; i < p.num_rows && i < num_fitting; i += kRowWarps) {
      const char *row = p.x + from(i) * p.stride;
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
