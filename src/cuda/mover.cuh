// Moves rows from one place in global memory to another, any GPU's: bulk copies through a ring in shared memory.
#pragma once
#include "launch.cuh"
#include "ptx.cuh"

// Shared memory of a block's movers: each warp has a ring of stages; a row larger than a stage goes in pieces.
struct MoverShape {
  int num_warps, num_stages, stage_bytes;
  __host__ __device__ int64_t ring_bytes() const { return (int64_t)num_warps * num_stages * stage_bytes; }
  __host__ __device__ int64_t bytes() const {
    return ring_bytes() + num_warps * num_stages * 24;
  } // + barrier, address, size
};

inline MoverShape mover_shape(int64_t row_bytes, int num_warps, int64_t reserved_bytes) {
  if (!has_bulk_copies()) return {num_warps, 0, 0};
  const int64_t most = 16384, room = 200 * 1024 - reserved_bytes;
  const int64_t pieces = (row_bytes + most - 1) / most;
  const int64_t stage = (row_bytes / pieces + 127) / 128 * 128;
  int64_t stages = room / (num_warps * (stage + 24));
  stages = stages > 8 ? 8 : stages < 4 ? 4 : stages;
  return {num_warps, (int)stages, (int)stage};
}

struct Mover {
  static constexpr int kLag = 2; // stores whose shared memory may still be read when a stage is filled again
  char *ring;
  uint64_t *full;
  char **destination;
  int64_t *size;
  int stages, stage_bytes, warps, warp, lane;
  uint32_t loaded = 0, stored = 0;

  // All threads; a block barrier must follow. Warps 0 .. num_warps - 1 are the movers.
  EPCY_DEVICE Mover(char *shared, const MoverShape &shape)
      : stages(shape.num_stages), stage_bytes(shape.stage_bytes), warps(shape.num_warps), warp(threadIdx.x >> 5),
        lane(threadIdx.x & 31) {
    const int all = warps * stages, mine = warp * stages;
    full = (uint64_t *)(shared + shape.ring_bytes()) + mine;
    destination = (char **)(shared + shape.ring_bytes() + 8 * all) + mine;
    size = (int64_t *)(shared + shape.ring_bytes() + 16 * all) + mine;
    ring = shared + (int64_t)mine * stage_bytes;
#ifdef EPCY_HAS_BULK
    if (threadIdx.x == 0) {
      for (int i = 0; i < all; i++) barrier_init(full + i, 1);
      barrier_init_fence();
    }
#endif
  }

  // A whole mover warp: copy rows list[warp], list[warp + warps], ... of x to rows warp, warp + warps, ... of `to`.
  EPCY_DEVICE void rows(const char *x, int64_t stride_bytes, const int32_t *list, int n, char *to, int64_t row_bytes) {
    scatter(x, stride_bytes, list, n, [](int i, int) { return i; }, to, row_bytes);
  }

  // The same, item i to row row_of(i, list[i]) of `to`; nowhere if that is negative.
  template <typename RowOf>
  EPCY_DEVICE void scatter(const char *x, int64_t stride_bytes, const int32_t *list, int n, RowOf row_of, char *to,
                           int64_t row_bytes) {
    for (int begin = warp; begin < n; begin += 32 * warps) {
      const int ahead = begin + lane * warps;
      const int token = ahead < n ? list[ahead] : 0, row = ahead < n ? row_of(ahead, token) : -1;
      for (int l = 0; l < 32 && begin + l * warps < n; l++) {
        const char *src = x + (int64_t)__shfl_sync(~0u, token, l) * stride_bytes;
        const int at_row = __shfl_sync(~0u, row, l);
        char *dst = to + (int64_t)at_row * row_bytes;
        if (at_row < 0) continue;
#ifdef EPCY_HAS_BULK
        if (lane == 0)
          for (int64_t at = 0; at < row_bytes; at += stage_bytes)
            push(src + at, dst + at, row_bytes - at < stage_bytes ? row_bytes - at : stage_bytes);
#else
        for (int64_t at = lane * 16; at < row_bytes; at += 32 * 16) *(uint4 *)(dst + at) = *(const uint4 *)(src + at);
#endif
      }
    }
  }

  // A whole mover warp: returns when all its rows have arrived and are ordered before what the block does next.
  EPCY_DEVICE void drain() {
#ifdef EPCY_HAS_BULK
    if (lane == 0) {
      while (stored < loaded) store();
      bulk_wait_all();
      proxy_fence();
    }
    __syncwarp();
#endif
  }

private:
#ifdef EPCY_HAS_BULK
  EPCY_DEVICE void push(const char *src, char *dst, int64_t bytes) {
    const int at = loaded % stages;
    if (loaded >= stages) bulk_wait_read<kLag>(); // the store of item loaded - stages is at least kLag + 1 back
    barrier_expect(full + at, (uint32_t)bytes);
    bulk_load(ring + (int64_t)at * stage_bytes, src, (uint32_t)bytes, full + at);
    destination[at] = dst, size[at] = bytes;
    if (++loaded - stored > stages - 1 - kLag) store();
  }
  EPCY_DEVICE void store() {
    const int at = stored % stages;
    barrier_wait(full + at, (stored / stages) & 1);
    bulk_store(destination[at], ring + (int64_t)at * stage_bytes, (uint32_t)size[at]);
    bulk_commit();
    stored++;
  }
#endif
};
