// Numbers of a low-latency call: what a kernel knows when it is compiled, and words that travel or lie in the handle.
#pragma once
#include "elsewhere.cuh"
#include "lines.cuh"

constexpr int kThreads = 512, kWarps = kThreads / 32;
static_assert(kThreads == EPCY_PART_LINES * 8, "a thread a unit");
constexpr int kAgain = EPCY_VERDICT_BROKEN + 1; // of a wait: left for excuse(), to be begun again
constexpr int kBoth = EPCY_LOW_LATENCY_SEND | EPCY_LOW_LATENCY_RECEIVE;
// Warps of a dispatch that cast nothing: one sees to acknowledgements, one sends the lanes of the block's tokens.
constexpr int kAcks = kWarps - 1, kScribe = kWarps - 2;

// A lane's place at its expert's rank, as it travels: local expert, how many earlier tokens of its source go there.
constexpr uint32_t kNowhere = 0xFFFFFFFFu, kRepeated = 0x80000000u; // repeated: an earlier lane brings the row
EPCY_DEVICE uint32_t make_place(int local, int ordinal, bool repeated) {
  return (uint32_t)local << 16 | (uint32_t)ordinal | (repeated ? kRepeated : 0u);
}
// In the handle: rows carry the mark of a repeated lane too; lanes are (owner, lane whose row it is).
constexpr int kRepeatedRow = 1 << 30;
constexpr uint32_t kNotSent = 1u << 30,
                   kLost = 1u << 29; // of a lane: its rank was masked; or took no part, as it turned out
EPCY_DEVICE uint32_t make_lane(int owner, int first) { return (uint32_t)owner | (uint32_t)first << 8; }

// Sizes that a kernel knows when it is compiled; 0: they are the call's.
template <int Ranks, int Topk> struct Sizes {
  static constexpr int kRanks = Ranks, kTopk = Topk;
  EPCY_DEVICE static int ranks(const epcy_low_latency_call &c) { return Ranks ? Ranks : c.num_ranks; }
  EPCY_DEVICE static int topk(const epcy_low_latency_call &c) { return Topk ? Topk : c.num_topk; }
  EPCY_DEVICE static int by_topk(const epcy_low_latency_call &c, int n); // n / K
};
using AnySizes = Sizes<0, 0>;
using UsualSizes = Sizes<2, 8>;

// Epoch 0 is what fresh memory holds, and parity must alternate: 2 follows the largest.
EPCY_DEVICE uint32_t next_epoch(uint32_t e) { return e == 0xFFFFFFFFu ? 2u : e + 1; }

// n / d.by; the product is at most one too small.
EPCY_DEVICE int quotient(int n, const epcy_divisor &d) {
  const uint32_t q = __umulhi((uint32_t)n, d.inverse);
  return (int)(q + ((uint32_t)n - q * d.by >= d.by));
}

template <int Ranks, int Topk> EPCY_DEVICE int Sizes<Ranks, Topk>::by_topk(const epcy_low_latency_call &c, int n) {
  if constexpr (Topk != 0) return n / Topk;
  else return quotient(n, c.topk);
}

// Ranks as bits.
EPCY_DEVICE uint32_t other_ranks(const epcy_low_latency_call &c) {
  return (0xFFFFFFFFu >> (32 - c.num_ranks)) & ~(1u << c.rank);
}
