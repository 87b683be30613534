// Calls that move nothing: a barrier, a rank that refuses its arguments, and reset.
#include "epcy/low_latency.h"
#include "launch.cuh"
#include "step.cuh"
#include "text.cuh"

namespace {

// A rank that refuses takes part all the same: its epoch steps, and its header frees everybody who waits.
__global__ void __launch_bounds__(256, 1)
    step_alone(const __grid_constant__ epcy_peers peers, uint32_t header, const __grid_constant__ Text text) {
  __shared__ int verdict;
  const Step s(peers);
  if (__syncthreads_or(s.broken())) return s.report_broken();
  if (threadIdx.x == 0) verdict = EPCY_VERDICT_OK;
  if (header & EPCY_HEADER_REFUSED)
    for (int i = threadIdx.x; i < s.num_ranks * EPCY_CUDA_TEXT_BYTES; i += blockDim.x)
      s.text(i / EPCY_CUDA_TEXT_BYTES, s.me)[i % EPCY_CUDA_TEXT_BYTES] = text.bytes[i % EPCY_CUDA_TEXT_BYTES];
  __threadfence_system();
  __syncthreads();
  s.announce(header, 0, 0, EPCY_GRID(1, 0, 0));
  s.gather(header, &verdict);
  s.finish(&verdict);
  __syncthreads();
  if (threadIdx.x == 0 && s.broken()) verdict = EPCY_VERDICT_BROKEN; // somebody came here, but left before the end
  if (threadIdx.x == 0 && (s.p.ticket || !(header & EPCY_HEADER_REFUSED))) s.report(s.me, verdict);
}

// A whole warp: both kinds of low-latency calls go on from `epoch`, as if everything before it had been received.
__device__ void reset_low_latency(const epcy_peers &p, const epcy_low_latency_wire &wire, uint32_t epoch) {
  char *base = p.base[p.rank];
  epcy_low_latency_local *local = (epcy_low_latency_local *)(base + wire.local);
  for (int i = threadIdx.x; i < 2 * EPCY_LOW_LATENCY_MAX_BLOCKS; i += 32) (&local->epoch[0][0])[i] = epoch;
  for (int i = threadIdx.x; i < 2 * (int)p.shape.num_ranks; i += 32)
    store_word((uint64_t *)(base + wire.acks) + i, epoch);
  if (threadIdx.x < 4) (&local->held[0][0])[threadIdx.x] = 0;
  if (threadIdx.x < 2) local->blocks_done[threadIdx.x] = 0;
}

// Two rounds: everybody has left his calls; everybody has the new epoch. Nothing else of this Buffer runs meanwhile.
__global__ void __launch_bounds__(32, 1) reset_all(const __grid_constant__ epcy_peers p,
                                                   const __grid_constant__ epcy_low_latency_wire wire, uint32_t round) {
  const int R = (int)p.shape.num_ranks, r = threadIdx.x;
  epcy_local *local = (epcy_local *)(p.base[p.rank] + p.control.local);
  uint32_t most = local->epoch[0];
  if (wire.bytes) {
    const epcy_low_latency_local *own = (const epcy_low_latency_local *)(p.base[p.rank] + wire.local);
    most = max(most, max(own->epoch[0][0], own->epoch[1][0]));
  }
  // After a timeout the same round goes on: its epochs are settled, and this rank's word tells what it said first.
  const uint64_t said = load_word((uint64_t *)(p.base[p.rank] + p.control.resets) + p.rank);
  const bool again = (uint32_t)(said >> 32) == round;
  const bool settled =
      again && (uint32_t)(load_word((uint64_t *)(p.base[p.rank] + p.control.resets) + R + p.rank) >> 32) == round;
  const uint32_t mine = again ? (uint32_t)said : most;
  const bool meets = r < R && !(local->masked >> r & 1); // a lane a rank that takes part
  bool ok = true;
  for (int half = 0; half < 2 && ok; half++) {
    uint64_t seen = 0;
    if (r < R) // masked ones too: they shall know how far the others are
      store_word_release((uint64_t *)(p.base[r] + p.control.resets) + half * R + p.rank, (uint64_t)round << 32 | mine);
    if (meets) {
      const uint64_t start = global_time_ns();
      const uint64_t *at = (const uint64_t *)(p.base[p.rank] + p.control.resets) + half * R + r;
      while ((int32_t)((uint32_t)((seen = load_word_acquire(at)) >> 32) - round) < 0 && ok)
        ok = global_time_ns() - start < (uint64_t)p.timeout_ns;
      if (!ok) {
        p.report->phase = EPCY_CUDA_RESET, p.report->peer = r, p.report->epoch = mine;
        p.report->expected = (uint64_t)round << 32, p.report->seen = seen;
        p.report->timeout_ns = p.timeout_ns;
        __threadfence_system();
        *(volatile uint32_t *)&p.report->expired = 1;
      }
    }
    ok = __all_sync(~0u, ok);
    if (half == 0 && ok && settled) {
      if (r == 0) local->broken = 0;
      __threadfence_system();
      __syncwarp();
    } else if (half == 0 && ok) { // the furthest, modulo 2^32
      most = mine + (uint32_t)__reduce_max_sync(~0u, meets ? (int32_t)((uint32_t)seen - mine) : INT32_MIN);
      __syncwarp();
      for (int b = r; b < EPCY_MAX_BLOCKS; b += 32) local->epoch[b] = most + 2;
      if (r == 0) local->blocks_met = 0, local->broken = 0;
      if (meets) ((uint32_t *)(p.base[p.rank] + p.control.left))[r] = 0; // all have come
      if (wire.bytes) reset_low_latency(p, wire, most + 2);
      __threadfence_system();
      __syncwarp();
    }
  }
  __threadfence_system();
  if (r == 0)
    *(volatile uint64_t *)&p.report->verdict[p.rank] =
        (uint64_t)p.ticket << 32 | (ok ? EPCY_VERDICT_OK : EPCY_VERDICT_BROKEN);
}

__global__ void __launch_bounds__(32, 1)
    change_mask(const __grid_constant__ epcy_peers p, uint32_t more, uint32_t fewer) {
  if (threadIdx.x != 0) return;
  epcy_local *local = (epcy_local *)(p.base[p.rank] + p.control.local);
  *(volatile uint32_t *)&p.report->masked = local->masked = (local->masked | more) & ~fewer;
}

} // namespace

extern "C" int epcy_cuda_launch_step(const epcy_peers *peers, uint32_t header, const char *text, void *stream) {
  return launch_apart(step_alone, 1, 256, stream, *peers, header, text_of(text));
}

extern "C" int epcy_cuda_launch_mask(const epcy_peers *peers, uint32_t more, uint32_t fewer, void *stream) {
  return launch_apart(change_mask, 1, 32, stream, *peers, more, fewer);
}

extern "C" int epcy_cuda_launch_reset(const epcy_peers *peers, const epcy_low_latency_wire *wire, uint32_t round,
                                      void *stream) {
  return launch_apart(reset_all, 1, 32, stream, *peers, *wire, round);
}
