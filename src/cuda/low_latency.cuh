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
#include "launch.cuh"
#include "low_latency_reports.cuh"
#include "stamp.cuh"

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
