// What a low-latency kernel tells when a call does not come to its ordinary end: its peers that this rank has left, its
// host why. Called, not inlined, for the sake of the ordinary way.
#pragma once
#include "low_latency_sizes.cuh"

// Whether a rank has left its calls, in some rank's memory.
EPCY_DEVICE uint32_t *left_word(const epcy_low_latency_call &c, int on, int from) {
  return (uint32_t *)(c.peers.base[on] + c.peers.control.left) + from;
}
// One thread: this Buffer is broken, and whoever waits for this rank need wait no longer. False: somebody else has told.
EPCY_DEVICE bool give_up(const epcy_low_latency_call &c) {
  if (atomicCAS(c.broken, 0u, 1u) != 0) return false;
  for (int q = 0; q < (int)c.peers.shape.num_ranks; q++) *(volatile uint32_t *)left_word(c, q, c.peers.rank) = 1;
  return true;
}
// Any threads: whether this Buffer is broken, or its host wants it to be.
static __device__ __noinline__ bool is_over(const epcy_low_latency_call &c) {
  if (is_stopped(c.peers)) give_up(c);
  return load_local(c.broken) != 0;
}
// One thread: its wait has lasted too long. Called where a warp leaves its wait for good: a call from which the ordinary
// way goes on would cost registers there.
static __device__ __noinline__ void expire(const epcy_low_latency_call &c, uint32_t epoch, int phase, int peer,
                                           uint64_t seen) {
  if (c.peers.goes_on && (phase == EPCY_CUDA_HEADERS || phase == EPCY_CUDA_ACKS)) {
    atomicOr(c.broken + 1, 1u << peer); // the clerk goes on without it
    return;
  }
  if (!give_up(c)) return;
  epcy_report *r = c.peers.report;
  r->gone = load_local(left_word(c, c.peers.rank, peer));
  r->phase = phase, r->peer = peer, r->epoch = epoch, r->expected = (uint64_t)epoch << 32, r->seen = seen;
  r->operation = c.peers.operation, r->timeout_ns = c.peers.timeout_ns;
  __threadfence_system();
  *(volatile uint32_t *)&r->expired = 1;
}

// A whole warp, now and then: a word of long ago must not look as if it lay ahead when the epochs have come round.
static __device__ __noinline__ void forget_old_masks(const epcy_low_latency_call &c, int kind, uint32_t epoch) {
  const int lane = threadIdx.x & 31;
  if (lane >= c.num_ranks) return;
  uint64_t *at = (uint64_t *)(c.own + c.wire.without) + (kind * c.num_ranks + lane);
  const uint64_t last = load_word(at);
  if (last && (int32_t)((uint32_t)(last >> 32) - epoch) < 0)
    atomicCAS_system((unsigned long long *)at, (unsigned long long)last, 0ull);
}

// One thread: tell the host of ranks that went on without this one. Returns them.
static __device__ __noinline__ uint32_t report_left(const epcy_low_latency_call &c, uint32_t epoch, uint32_t missing) {
  epcy_report *r = c.peers.report;
  const uint32_t left_by = missing & ~load_local(c.broken + 1);
  if (!left_by) return 0;
  r->without_epoch = epoch, r->without_operation = c.peers.operation;
  __threadfence_system();
  *(volatile uint32_t *)&r->without = left_by;
  return left_by;
}

// One thread: keep for the host, which does not wait, why this call gave nothing.
static __device__ __noinline__ void report(const epcy_low_latency_call &c, int kind, uint32_t epoch, int verdict) {
  epcy_report *r = c.peers.report;
  if (verdict != EPCY_VERDICT_REFUSED && verdict != EPCY_VERDICT_MISMATCH) return;
  const int R = c.num_ranks, first = (kind * 2 + (epoch & 1)) * R;
  char *base = c.own;
  __threadfence_system();
  uint32_t *headers = (uint32_t *)r->late_text;
#pragma unroll 1
  for (int q = 0; q < R; q++) {
    const uint32_t theirs =
        q == c.rank ? c.header : (uint32_t)load_word((const uint64_t *)(base + c.wire.headers) + (first + q) * 2 + 1);
    if (verdict == EPCY_VERDICT_MISMATCH) { // what each rank did, for the host to compare
      headers[q] = theirs;
    } else if (theirs & EPCY_HEADER_REFUSED) {
      const volatile char *text = base + c.wire.text + (first + q) * EPCY_CUDA_TEXT_BYTES;
#pragma unroll 1
      for (int i = 0; i < EPCY_CUDA_TEXT_BYTES; i++) r->late_text[i] = text[i];
      r->late_rank = q;
      break;
    }
  }
  if (verdict == EPCY_VERDICT_MISMATCH) headers[R] = epoch;
  __threadfence_system();
  *(volatile uint32_t *)&r->late_verdict = verdict;
}
