// A low-latency call as its kernels see it: epochs, acknowledgements, headers, bounded waits.
//
// Why nothing here waits for ever, and nothing is overwritten while it is read:
//  - A block sends everything it has to send before it waits for data of this call. Blocks wait for blocks of peers, never
//    for each other; all blocks of a kernel that waits are resident (cooperative launch), so the blocks they wait for
//    have been, or will be, scheduled whatever else these GPUs run.
//  - Before its first store of call n a block has seen an acknowledgement of n - 2 of every rank. A rank acknowledges as
//    the first thing of each call of the kind, before it waits: of the calls before n at most n - 1 is unreceived there
//    (the host sees to that), so that this answers every n. A kernel that only receives acknowledges at its end too, so
//    that the next send need not wait for a peer's.
//  - The epoch of a call is the copy that its block keeps in device memory, plus one; a block writes only copies that
//    no other block of this launch reads, and only after all its threads have read theirs. A call that is received by
//    another kernel keeps its epoch in the handle.
//
// Going on without a rank. What is masked does not change while a kernel runs: the host changes it in stream order. A masked
// rank gets no header but a word of its own (`without`) that grows from call to call, so that its headers stay as they
// were until it has read them; nothing else is sent to it but acknowledgements, and it is not waited for. It may be behind,
// and finds in each call either a header or, later, that word: so all its blocks find the same. With `goes_on` a kernel
// masks ranks by itself, and then one warp must decide for all: the clerk looks for acknowledgements and headers, and
// the others wait for its word (`go`). A rank that has sent its header and then sends no more breaks the Buffer all the same.
//
// What makes these kernels fast is what they do not do. They run almost every instruction once, and sixteen warps share
// a multiprocessor's four schedulers, so that each instruction of a warp's way costs four cycles or more: the way of an
// ordinary call is short and straight, loops that do not pay stay rolled, what goes wrong is called, not inlined, and
// what one block can do for all is done by one that carries no tokens, the clerk. And a load takes longer than all
// arithmetic: those that need not wait for others are issued together, at the start, by `load_early`.
#pragma once
#include "elsewhere.cuh"
#include "launch.cuh"
#include "lines.cuh"
#include "stamp.cuh"

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

// Whether a rank has left its calls, in some rank's memory.
EPCY_DEVICE uint32_t *left_word(const epcy_low_latency_call &c, int on, int from) {
  return (uint32_t *)(c.peers.base[on] + c.peers.control.left) + from;
}
// One thread: this Buffer is broken, and whoever waits for this rank need wait no longer. False: somebody else has told.
EPCY_DEVICE bool leave(const epcy_low_latency_call &c) {
  if (atomicCAS(c.broken, 0u, 1u) != 0) return false;
  for (int q = 0; q < (int)c.peers.shape.num_ranks; q++) *(volatile uint32_t *)left_word(c, q, c.peers.rank) = 1;
  return true;
}
// Any threads: whether this Buffer is broken, or its host wants it to be.
static __device__ __noinline__ bool is_over(const epcy_low_latency_call &c) {
  if (is_stopped(c.peers)) leave(c);
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
  if (!leave(c)) return;
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

struct LowLatency;
// How long a warp has waited: looks at the clock now and then. All lanes call it; some of them wait.
struct Patience {
  uint32_t turn = 0, since = 0; // of 2^20 ns
  // `MayBeLeft`: nothing comes of a peer that went on without this rank, as excuse() will find out.
  template <bool MayBeLeft = false>
  EPCY_DEVICE bool over(const LowLatency &s, bool waits, int phase, int peer, uint64_t seen);
};

struct LowLatency {
  const epcy_low_latency_call &c;
  const int kind, lane;
  uint32_t before, epoch;
  uint32_t peers; // the other ranks that take part, as bits

  // All threads. `sent`: where the epoch of a call is that was sent by another kernel; else NULL.
  EPCY_DEVICE LowLatency(const epcy_low_latency_call &call, int kind_of, const uint32_t *sent)
      : c(call), kind(kind_of), lane(threadIdx.x & 31), peers(other_ranks(call)) {
    after_others();
    if (sent) before = 0, epoch = load_local(sent);
    else before = load_local(&state()->epoch[kind][blockIdx.x]), epoch = next_epoch(before);
    stamp_begin(notes());
  }
  EPCY_DEVICE LowLatency(const LowLatency &other, const epcy_low_latency_call &call) // the same call's
      : c(call), kind(other.kind), lane(other.lane), before(other.before), epoch(other.epoch), peers(other.peers) {}
  EPCY_DEVICE epcy_low_latency_local *state() const { return (epcy_low_latency_local *)(c.own + c.wire.local); }
  EPCY_DEVICE bool is_broken() const { return load_local(c.broken) != 0; }
  EPCY_DEVICE uint32_t set() const { return epoch & 1; }
  EPCY_DEVICE uint64_t word(uint32_t value) const { return (uint64_t)epoch << 32 | value; }
  EPCY_DEVICE bool is_now(uint64_t v) const { return (uint32_t)(v >> 32) == epoch; }
  // The block that speaks for its rank, and carries no tokens: the one that begins first.
  EPCY_DEVICE bool is_clerk() const { return blockIdx.x == 0; }
  // The thread whose times are those of the call: the last one of the first block that carries tokens.
  EPCY_DEVICE static bool notes() { return blockIdx.x == 1 && threadIdx.x == blockDim.x - 1; }
  EPCY_DEVICE bool has_other() const { return lane < c.num_ranks && lane != c.rank; } // a lane a rank
  EPCY_DEVICE bool has_peer() const { return peers >> lane & 1; }                     // one that takes part
  EPCY_DEVICE bool takes_part(int rank) const { return (peers | 1u << c.rank) >> rank & 1; }
  EPCY_DEVICE uint32_t missing() const { return other_ranks(c) & ~peers; }
  // The rank that comes `turn` after this one.
  EPCY_DEVICE int after(int turn) const {
    const int r = c.rank + turn;
    return r < c.num_ranks ? r : r - c.num_ranks;
  }

  // ---- where things lie
  EPCY_DEVICE uint32_t slot(int from, int token) const { return (set() * c.num_ranks + from) * c.max_tokens + token; }
  EPCY_DEVICE ulonglong2 *header(int on, int from) const {
    return (ulonglong2 *)(c.peers.base[on] + c.wire.headers) + ((kind * 2 + set()) * c.num_ranks + from);
  }
  EPCY_DEVICE uint64_t *ack(int on, int from) const {
    return (uint64_t *)(c.peers.base[on] + c.wire.acks) + (kind * c.num_ranks + from);
  }
  EPCY_DEVICE uint64_t *without(int on, int from) const {
    return (uint64_t *)(c.peers.base[on] + c.wire.without) + (kind * c.num_ranks + from);
  }
  EPCY_DEVICE char *text(int on, int from) const {
    return c.peers.base[on] + c.wire.text + ((kind * 2 + set()) * c.num_ranks + from) * EPCY_CUDA_TEXT_BYTES;
  }
  EPCY_DEVICE uint64_t *counts(int on, int from) const {
    return (uint64_t *)(c.peers.base[on] + c.wire.counts) + (set() * c.num_ranks + from) * c.num_local.by;
  }
  EPCY_DEVICE ulonglong2 *lanes(int on, int from, int token) const {
    return (ulonglong2 *)(c.peers.base[on] + c.wire.lanes) + slot(from, token) * c.num_topk;
  }
  EPCY_DEVICE uint64_t *weights(int on, int from, int token) const {
    return (uint64_t *)(c.peers.base[on] + c.wire.weights) + slot(from, token) * c.num_topk;
  }
  EPCY_DEVICE uint4 *row(int on, int from, int token) const {
    return (uint4 *)(c.peers.base[on] + c.wire.rows + (uint64_t)slot(from, token) * c.row_slot);
  }
  EPCY_DEVICE uint4 *sum(int on, uint32_t of) const {
    return (uint4 *)(c.peers.base[on] + c.wire.sums + (uint64_t)(set() * c.num_slots + of) * c.sum_slot);
  }

  // ---- acknowledgements: a whole warp each
  EPCY_DEVICE uint64_t look_for_acks() const { return has_peer() ? load_word(ack(c.rank, lane)) : 0; }
  // An epoch a little behind this call's, or any ahead of it (a rank that refuses receives nothing and need not wait).
  EPCY_DEVICE bool allows(uint32_t acknowledged) const {
    const uint32_t one = next_epoch(acknowledged);
    return (int32_t)(acknowledged - epoch) >= -2 || one == epoch || next_epoch(one) == epoch;
  }
  EPCY_DEVICE bool wait_for_acks(uint64_t v);
  // One warp of the launch, before anything that waits: tell all ranks up to where this one has received. A call that
  // is sent and not received holds that back, whatever came after it.
  EPCY_DEVICE uint2 look_for_held() const {
    const uint32_t *held = state()->held[kind];
    return make_uint2(load_local(held), load_local(held + 1));
  }
  EPCY_DEVICE uint32_t received(uint2 held) const {
    uint32_t received = before;
    if (held.x && (int32_t)(held.x - 1 - received) < 0) received = held.x - 1;
    if (held.y && (int32_t)(held.y - 1 - received) < 0) received = held.y - 1;
    return received;
  }
  EPCY_DEVICE void acknowledge(uint2 held) const { acknowledge(received(held)); }
  EPCY_DEVICE void acknowledge(uint32_t received) const {
    if (has_other()) store_word(ack(lane, c.rank), received);
  }

  // ---- headers: a whole warp each; lane r has that of rank r
  EPCY_DEVICE void announce(uint32_t tokens, uint32_t options) const {
    if (has_peer()) store_words(header(lane, c.rank), word(tokens), word(options));
    else if (EPCY_RARELY(has_other())) store_word(without(lane, c.rank), word(1));
  }
  EPCY_DEVICE ulonglong2 look_for_headers() const {
    return has_peer() ? load_words(header(c.rank, lane)) : make_ulonglong2(0, 0);
  }
  EPCY_DEVICE bool misses_header(const ulonglong2 &seen) const {
    return has_peer() && !(is_now(seen.x) && is_now(seen.y));
  }
  // Whether the lane's rank has come to this call with something else in mind.
  EPCY_DEVICE bool sees_another_call() const {
    if (!has_peer()) return false;
    const uint64_t options = load_word((const uint64_t *)header(c.rank, lane) + 1);
    return is_now(options) && ((uint32_t)options ^ c.header) & (EPCY_HEADER_COMPARED | EPCY_HEADER_REFUSED);
  }
  // Of all ranks: lane r gets T of rank r.
  EPCY_DEVICE int compare(const ulonglong2 &seen, int *tokens) const {
    *tokens = lane == c.rank ? c.num_tokens
              : has_peer()   ? (int)(uint32_t)seen.x
                             : 0; // of ranks that take no part: none
    const uint32_t differs =
        has_peer() ? ((uint32_t)seen.y ^ c.header) & (EPCY_HEADER_COMPARED | EPCY_HEADER_REFUSED) : 0;
    if (!EPCY_RARELY(__any_sync(~0u, differs))) return EPCY_VERDICT_OK;
    return __any_sync(~0u, differs & EPCY_HEADER_REFUSED) ? EPCY_VERDICT_REFUSED : EPCY_VERDICT_MISMATCH;
  }
  // Wait for every rank's, and compare. `counts`: for the statistics. kAgain: once more, with what it was given, after
  // look_around(); what that does would cost registers in here.
  EPCY_DEVICE int gather(ulonglong2 seen, int *tokens, bool counts, Patience &patience) const;
  EPCY_DEVICE int gather_all(int *tokens, bool counts);

  // ---- going on without a rank: a whole warp each
  // Whether a rank goes on without this one in this call or a later one.
  EPCY_DEVICE bool is_left_by(int rank) const {
    const uint64_t last = load_word_acquire(without(c.rank, rank));
    return last && (int32_t)((uint32_t)(last >> 32) - epoch) >= 0;
  }
  // Leave out ranks that are masked by now, or (`receives`) went on without this one in this call. False: there is none.
  EPCY_DEVICE bool excuse(bool receives) {
    bool absent = has_peer() && load_local(c.broken + 1) >> lane & 1;
    if (receives && has_peer() && !absent && is_left_by(lane))
      absent = !is_now(load_word((const uint64_t *)header(c.rank, lane))); // what it sent before that counts
    const uint32_t out = __ballot_sync(~0u, absent);
    peers &= ~out;
    return out != 0;
  }
  // With goes_on: tell this launch's other warps what the clerk found; wait to be told. False: gave up.
  enum { kToSend, kToWeigh, kToReceive };
  EPCY_DEVICE uint64_t *go_word(int what) const { return &state()->go[kind][what]; }
  EPCY_DEVICE void give_go(int what) const {
    if (lane != 0) return;
    if (missing()) *(volatile uint32_t *)&c.peers.report->masked = load_local(c.broken + 1);
    store_word(go_word(what), word(missing()));
  }
  EPCY_DEVICE bool wait_for_go(int what) {
    uint64_t v = load_word(go_word(what));
#pragma unroll 1
    for (uint32_t turn = 1; !is_now(v); turn++) {
      if ((turn & 63) == 0 && is_broken()) return false;
      v = load_word(go_word(what));
    }
    peers &= ~(uint32_t)v;
    return true;
  }

  // ---- the end: all threads of a block, once a barrier has followed the reading of the epoch
  EPCY_DEVICE void leave(int phases, uint32_t *sent) const {
    epcy_low_latency_local *mine = state();
    if (blockIdx.x == 1 && threadIdx.x >= blockDim.x - 32) {
      const bool receives = phases & EPCY_LOW_LATENCY_RECEIVE, alone = phases == EPCY_LOW_LATENCY_RECEIVE;
      stamp_end(c.counters, EPCY_STAMP_LOW_LATENCY_DISPATCH + kind + (alone ? 2 : 0), epoch, c.peers.operation,
                !receives                           ? EPCY_SPAN_SEND
                : kind == EPCY_LOW_LATENCY_DISPATCH ? EPCY_SPAN_FAN_OUT
                                                    : EPCY_SPAN_REDUCE,
                notes());
    }
    if (phases & EPCY_LOW_LATENCY_SEND)
#pragma unroll 1
      for (int g = blockIdx.x + threadIdx.x * gridDim.x; g < EPCY_LOW_LATENCY_MAX_BLOCKS; g += blockDim.x * gridDim.x)
        mine->epoch[kind][g] = epoch;
    if (EPCY_RARELY((epoch & 0xFFFF) == 0) && is_clerk() && threadIdx.x < 32 && phases & EPCY_LOW_LATENCY_RECEIVE)
      forget_old_masks(c, kind, epoch);
    if (phases == kBoth) return; // the next call acknowledges this one
    if (is_clerk() && threadIdx.x == 0) {
      mine->held[kind][set()] = phases == EPCY_LOW_LATENCY_SEND ? epoch : 0;
      if (phases == EPCY_LOW_LATENCY_SEND) *sent = epoch;
    }
    if (phases == EPCY_LOW_LATENCY_SEND) return;
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      last = atomicAdd(&mine->blocks_done[kind], 1u) == gridDim.x - 1;
      if (last) mine->blocks_done[kind] = 0;
    }
    __syncthreads();
    if (last && threadIdx.x < 32) acknowledge(epoch);
  }
};

template <bool MayBeLeft>
EPCY_DEVICE bool Patience::over(const LowLatency &s, bool waits, int phase, int peer, uint64_t seen) {
  if (!EPCY_RARELY((++turn & 1023) == 0)) return false;
  const uint32_t now = (uint32_t)(global_time_ns() >> 20);
  if (turn == 1024) since = now;
  // Who refuses, or calls something else, sends no lines; the clerk tells why.
  if (phase == EPCY_CUDA_LINES && __any_sync(~0u, s.sees_another_call())) return true;
  if (MayBeLeft && phase == EPCY_CUDA_HEADERS && (turn & 4095) == 0) return true; // see look_around()
  if (MayBeLeft && __any_sync(~0u, waits && s.is_left_by(peer))) return true;
  // What a rank sent before it left comes within a tick; more will not come.
  const bool left = waits && now - since > 1 && load_local(left_word(s.c, s.c.peers.rank, peer)) != 0;
  const bool late = now - since > (uint32_t)((s.c.peers.timeout_ns + 0xFFFFF) >> 20); // never before its time
  if (!late && !__any_sync(~0u, left) && !is_over(s.c)) return false;
  if (left || (waits && late)) expire(s.c, s.epoch, phase, peer, seen); // of the others nothing is known
  return true;
}

EPCY_DEVICE bool LowLatency::wait_for_acks(uint64_t v) {
  Patience patience;
  for (;;) {
    const bool waits = has_peer() && !allows((uint32_t)v);
    if (!EPCY_RARELY(__any_sync(~0u, waits))) return true;
    if (patience.over(*this, waits, EPCY_CUDA_ACKS, lane, v << 32) && !excuse(false)) return false;
    v = look_for_acks();
  }
}

EPCY_DEVICE int LowLatency::gather(ulonglong2 seen, int *tokens, bool counts, Patience &patience) const {
  const uint64_t since = counts ? global_time_ns() : 0;
  for (;;) {
    const bool waits = misses_header(seen);
    if (!EPCY_RARELY(__any_sync(~0u, waits))) break;
    if (patience.over<true>(*this, waits, EPCY_CUDA_HEADERS, lane, seen.x))
      return __any_sync(~0u, is_broken()) ? EPCY_VERDICT_BROKEN : kAgain;
    if (waits) seen = look_for_headers();
    if (counts && waits && !misses_header(seen)) add_to(&c.counters->wait_ns[lane], global_time_ns() - since);
  }
  return compare(seen, tokens);
}

// A whole warp that waits for headers: leave out ranks that take no part, and see whether others have come to another call.
EPCY_DEVICE void look_around(LowLatency &s) {
  if (s.excuse(true) || !s.has_peer()) return;
  is_elsewhere(s.c.peers, s.c.wire, s.kind, s.epoch, s.lane, s.c.header);
}
EPCY_DEVICE int LowLatency::gather_all(int *tokens, bool counts) {
  Patience patience;
  int verdict;
  while ((verdict = gather(look_for_headers(), tokens, counts, patience)) == kAgain) look_around(*this);
  return verdict;
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
