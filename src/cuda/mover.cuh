// Moves rows from one place in global memory to others, any GPU's: bulk copies through a ring in shared memory.
//
// EPCY_MOVER_WARPS warps of a block issue the copies, each with a ring of its own: the cost of an item lies in its issue,
// so several warps are needed where items are small. A row larger than a stage goes in pieces.
#pragma once
#include "epcy/cuda.h"
#include "launch.cuh"
#include "ptx.cuh"

constexpr int kMoverWarps = EPCY_MOVER_WARPS;

struct MoverShape {
  int num_stages, stage_bytes;
  __host__ __device__ int64_t ring_bytes() const { return (int64_t)kMoverWarps * num_stages * stage_bytes; }
  __host__ __device__ int64_t bytes() const { return ring_bytes() + kMoverWarps * num_stages * 8; } // + barriers
};

inline MoverShape mover_shape(int64_t row_bytes, int64_t reserved_bytes) {
  const int64_t most = 8192, room = 214 * 1024 - reserved_bytes, pieces = (row_bytes + most - 1) / most;
  const int64_t stage = ((row_bytes + pieces - 1) / pieces + 127) / 128 * 128;
  if (!has_bulk_copies()) return {0, (int)stage};
  const int64_t stages = room / (kMoverWarps * (stage + 8));
  return {(int)(stages > 12 ? 12 : stages < 4 ? 4 : stages), (int)stage};
}

// The rows that a warp goes through: items first, first + step, ... of num, piece by piece. A number for each item comes
// from value(item), 32 items at a time and a batch ahead, since its memory is far.
template <typename Value> struct Walk {
  int num, step, item, left = 0, used = 0, batch = 0, ahead = 0;
  int64_t row_bytes, stage_bytes, at = 0;
  Value value;

  EPCY_DEVICE Walk(int num, int first, int step, int64_t row_bytes, int64_t stage_bytes, Value value)
      : num(num), step(step), item(first), row_bytes(row_bytes), stage_bytes(stage_bytes), value(value) {
    ahead = fetch();
  }
  EPCY_DEVICE int fetch() const {
    const int i = item + (int)(threadIdx.x & 31) * step;
    return i < num ? value(i) : -1;
  }
  // A whole warp: the next piece; false at the end. `number`: the item's value.
  EPCY_DEVICE bool next(int *number, int64_t *offset, uint32_t *bytes) {
    if (left == 0) {
      if (item >= num) return false;
      batch = ahead, used = 0, left = (num - item + step - 1) / step;
      if (left > 32) left = 32;
      item += left * step;
      ahead = fetch();
    }
    *number = __shfl_sync(~0u, batch, used);
    *offset = at;
    *bytes = (uint32_t)(row_bytes - at < stage_bytes ? row_bytes - at : stage_bytes);
    at += stage_bytes;
    if (at >= row_bytes) at = 0, used++, left--;
    return true;
  }
};

struct Mover {
  static constexpr int kLag = 2; // stores whose shared memory may still be read when a stage is filled again
  char *ring;
  uint64_t *full;
  int stages, stage_bytes, warp, lane;
  uint32_t loaded = 0, stored = 0;
  int load_at = 0, store_at = 0; // the stages of these items: a division for each would cost as much as the copy
  uint32_t store_phase = 0;

  // All threads; a block barrier must follow. Warps 0 .. kMoverWarps - 1 are the movers.
  EPCY_DEVICE Mover(char *shared, const MoverShape &shape)
      : stages(shape.num_stages), stage_bytes(shape.stage_bytes), warp(threadIdx.x >> 5), lane(threadIdx.x & 31) {
    full = (uint64_t *)(shared + shape.ring_bytes()) + warp * stages;
    ring = shared + (int64_t)warp * stages * stage_bytes;
#ifdef EPCY_HAS_BULK
    if (lane == 0 && warp < kMoverWarps) {
#pragma unroll 1
      for (int i = 0; i < stages; i++) barrier_init(full + i, 1);
      barrier_init_fence();
    }
#endif
  }

  // A whole mover warp. `source(&from, &bytes)` gives the next item and false at the end; `target(&bytes)` gives, in the
  // same order, each lane's destination or null: a lane's own copy of the item. kOne: only lane 0 ever has one.
  template <bool kOne, typename Source, typename Target, typename After>
  EPCY_DEVICE void run(Source &&source, Target &&target, After &&after) {
    const char *from;
    uint32_t bytes;
#pragma unroll 1
    while (source(&from, &bytes)) {
#ifdef EPCY_HAS_BULK
      if ((int)loaded >= stages) { // the store of item loaded - stages is at least kLag + 1 back
        if (!kOne || lane == 0) bulk_wait_read<kLag>();
        if (!kOne) __syncwarp();
      }
      load(from, bytes);
      if ((int)(loaded - stored) > stages - 1 - kLag) store<kOne>(target), after();
#else
      loaded++;
      char *const to = target(&bytes);
#pragma unroll 1
      for (unsigned who = __ballot_sync(~0u, to != nullptr); who; who &= who - 1) {
        char *dst = (char *)__shfl_sync(~0u, (unsigned long long)to, __ffs(who) - 1);
#pragma unroll 1
        for (uint32_t at = lane * 16; at < bytes; at += 32 * 16)
          *(uint4 *)(dst + at) = __ldcg((const uint4 *)(from + at));
      }
      stored++, after();
#endif
    }
#ifdef EPCY_HAS_BULK
#pragma unroll 1
    while (stored < loaded) store<kOne>(target), after();
#endif
  }
  template <bool kOne, typename Source, typename Target> EPCY_DEVICE void run(Source &&source, Target &&target) {
    run<kOne>(source, target, [] {});
  }
  // All items but the last kPending have arrived at their destinations, for whoever acquires what this thread releases.
  template <int kPending> EPCY_DEVICE void arrived() {
#ifdef EPCY_HAS_BULK
    bulk_wait<kPending>();
    proxy_fence();
    __syncwarp();
#else
    __threadfence_system();
    __syncwarp();
#endif
  }

private:
#ifdef EPCY_HAS_BULK
  EPCY_DEVICE void load(const char *from, uint32_t bytes) {
    if (lane == 0) {
      barrier_expect(full + load_at, bytes);
      bulk_load(ring + load_at * stage_bytes, from, bytes, full + load_at);
    }
    loaded++;
    if (++load_at == stages) load_at = 0;
  }
  template <bool kOne, typename Target> EPCY_DEVICE void store(Target &target) {
    uint32_t bytes;
    char *const to = target(&bytes);
    if (!kOne || lane == 0) {
      barrier_wait(full + store_at, store_phase);
      if (to) bulk_store(to, ring + store_at * stage_bytes, bytes);
      bulk_commit();
    }
    stored++;
    if (++store_at == stages) store_at = 0, store_phase ^= 1;
  }
#endif
};
