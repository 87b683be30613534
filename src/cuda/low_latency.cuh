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
//    no other block of this launch reads. A call that is received by another kernel keeps its epoch in the handle.
#pragma once
#include "launch.cuh"
#include "lines.cuh"

constexpr int kThreads = 512, kWarps = kThreads / 32;
static_assert(kThreads == EPCY_PART_LINES * 8, "a thread a unit");

// A lane's place at its expert's rank, as it travels: local expert, how many earlier tokens of its source go there.
constexpr uint32_t kNowhere = 0xFFFFFFFFu, kRepeated = 0x80000000u; // repeated: an earlier lane brings the row
EPCY_DEVICE uint32_t make_place(int local, int ordinal, bool repeated) {
  return (uint32_t)local << 16 | (uint32_t)ordinal | (repeated ? kRepeated : 0u);
}
// In the handle: rows carry the mark of a repeated lane too; lanes are (owner, lane whose row it is).
constexpr int kRepeatedRow = 1 << 30;
EPCY_DEVICE uint32_t make_lane(int owner, int first) { return (uint32_t)owner | (uint32_t)first << 8; }

// Epoch 0 is what fresh memory holds, and parity must alternate: 2 follows the largest.
EPCY_DEVICE uint32_t next_epoch(uint32_t e) { return e == 0xFFFFFFFFu ? 2u : e + 1; }

struct LowLatency {
  const epcy_peers &p;
  const epcy_low_latency_wire &w;
  const int kind, me, num_ranks, lane;
  uint32_t before, epoch;

  // All threads. `sent`: where the epoch of a call is that was sent by another kernel; else NULL.
  EPCY_DEVICE LowLatency(const epcy_peers &peers, const epcy_low_latency_wire &wire, int kind_of, const uint32_t *sent)
      : p(peers), w(wire), kind(kind_of), me(peers.rank), num_ranks((int)peers.shape.num_ranks),
        lane(threadIdx.x & 31) {
    if (sent) before = 0, epoch = load_local(sent);
    else before = load_local(&state()->epoch[kind][blockIdx.x]), epoch = next_epoch(before);
  }
  EPCY_DEVICE epcy_low_latency_local *state() const { return (epcy_low_latency_local *)(p.base[me] + w.local); }
  EPCY_DEVICE epcy_local *shared_state() const { return (epcy_local *)(p.base[me] + p.control.local); }
  EPCY_DEVICE bool broken() const { return load_local(&shared_state()->broken) != 0; }
  EPCY_DEVICE int set() const { return epoch & 1; }
  EPCY_DEVICE uint64_t word(uint32_t value) const { return (uint64_t)epoch << 32 | value; }
  EPCY_DEVICE bool is_now(uint64_t v) const { return (uint32_t)(v >> 32) == epoch; }

  // ---- where things lie
  EPCY_DEVICE uint64_t *header(int on, int from) const {
    return (uint64_t *)(p.base[on] + w.headers) + ((kind * 2 + set()) * num_ranks + from) * 2;
  }
  EPCY_DEVICE uint64_t *ack(int on, int from) const {
    return (uint64_t *)(p.base[on] + w.acks) + kind * num_ranks + from;
  }
  EPCY_DEVICE char *text(int on, int from) const {
    return p.base[on] + w.text + (int64_t)((kind * 2 + set()) * num_ranks + from) * EPCY_CUDA_TEXT_BYTES;
  }
  EPCY_DEVICE uint64_t *counts(int on, int from) const {
    return (uint64_t *)(p.base[on] + w.counts) + (set() * num_ranks + from) * epcy_num_local_experts(&p.shape);
  }
  EPCY_DEVICE int64_t slot(int from, int token) const {
    return (int64_t)(set() * num_ranks + from) * p.shape.num_low_latency_tokens + token;
  }
  EPCY_DEVICE ulonglong2 *lanes(int on, int from, int token) const {
    return (ulonglong2 *)(p.base[on] + w.lanes) + slot(from, token) * p.shape.num_topk;
  }
  EPCY_DEVICE uint64_t *weights(int on, int from, int token) const {
    return (uint64_t *)(p.base[on] + w.weights) + slot(from, token) * p.shape.num_topk;
  }
  EPCY_DEVICE uint4 *row(int on, int from, int token) const {
    return (uint4 *)(p.base[on] + w.rows) + slot(from, token) * w.row_lines * 8;
  }
  EPCY_DEVICE uint4 *sum(int on, int64_t of) const {
    return (uint4 *)(p.base[on] + w.sums) + (set() * w.num_slots + of) * w.sum_lines * 8;
  }

  // ---- waits that end
  EPCY_DEVICE void expire(int phase, int peer, uint64_t expected, uint64_t seen) const {
    if (atomicCAS(&shared_state()->broken, 0u, 1u) != 0) return;
    epcy_report *r = p.report;
    r->phase = phase, r->peer = peer, r->epoch = epoch, r->expected = expected, r->seen = seen;
    r->operation = p.operation;
    __threadfence_system();
    *(volatile uint32_t *)&r->expired = 1;
  }
  // One thread: wait until a word is of this call, `v` being what it held; false in *ok if that took too long.
  EPCY_DEVICE uint32_t wait(const uint64_t *at, uint64_t v, int phase, int peer, bool *ok) const {
    uint64_t start = 0;
    for (int turn = 1; !is_now(v); turn++) {
      if ((turn & 1023) == 0 && late(&start, phase, peer, word(0), v)) return *ok = false, 0;
      v = load_word(at);
    }
    return (uint32_t)v;
  }
  EPCY_DEVICE uint32_t wait(const uint64_t *at, int phase, int peer, bool *ok) const {
    return wait(at, load_word(at), phase, peer, ok);
  }
  EPCY_DEVICE bool late(uint64_t *start, int phase, int peer, uint64_t expected, uint64_t seen) const {
    const uint64_t now = global_time_ns();
    if (!*start) *start = now;
    if (broken()) return true;
    if (now - *start <= (uint64_t)p.timeout_ns) return false;
    expire(phase, peer, expected, seen);
    return true;
  }

  // ---- acknowledgements: a whole warp each
  EPCY_DEVICE uint64_t look_for_acks() const { return lane < num_ranks && lane != me ? load_word(ack(me, lane)) : 0; }
  // An epoch a little behind this call's, or any ahead of it (a rank that refuses receives nothing and need not wait).
  EPCY_DEVICE bool allows(uint32_t acknowledged) const {
    const uint32_t one = next_epoch(acknowledged);
    return (int32_t)(acknowledged - epoch) >= -2 || one == epoch || next_epoch(one) == epoch;
  }
  EPCY_DEVICE bool wait_for_acks(uint64_t v) const {
    bool ok = true;
    uint64_t start = 0;
    if (lane < num_ranks && lane != me)
      for (int turn = 1; ok && !allows((uint32_t)v); turn++) {
        if ((turn & 1023) == 0) ok = !late(&start, EPCY_CUDA_ACKS, lane, word(0), v << 32);
        v = load_word(ack(me, lane));
      }
    return __all_sync(~0u, ok);
  }
  // One warp of the launch, before anything that waits: tell all ranks up to where this one has received. A call that
  // is sent and not received holds that back, whatever came after it.
  EPCY_DEVICE void acknowledge() const {
    const uint32_t a = load_local(&state()->held[kind][0]), b = load_local(&state()->held[kind][1]);
    uint32_t received = before;
    if (a && (int32_t)(a - 1 - received) < 0) received = a - 1;
    if (b && (int32_t)(b - 1 - received) < 0) received = b - 1;
    acknowledge(received);
  }
  EPCY_DEVICE void acknowledge(uint32_t received) const {
    if (lane < num_ranks && lane != me) store_word(ack(lane, me), received);
  }

  // ---- headers: a whole warp each
  EPCY_DEVICE void announce(uint32_t tokens, uint32_t options) const {
    if (lane >= num_ranks || lane == me) return;
    uint64_t *h = header(lane, me);
    store_word(h, word(tokens));
    store_word(h + 1, word(options));
  }
  // Wait for every rank's; lane r gets T of rank r.
  EPCY_DEVICE int gather(uint32_t mine, int my_tokens, int *tokens) const {
    int verdict = EPCY_VERDICT_OK;
    *tokens = lane == me ? my_tokens : 0;
    if (lane < num_ranks && lane != me) {
      bool ok = true;
      const uint64_t *h = header(me, lane);
      const uint64_t first = load_word(h), second = load_word(h + 1);
      *tokens = (int)wait(h, first, EPCY_CUDA_HEADERS, lane, &ok);
      const uint32_t theirs = wait(h + 1, second, EPCY_CUDA_HEADERS, lane, &ok);
      if (!ok) verdict = EPCY_VERDICT_BROKEN;
      else if (theirs & EPCY_HEADER_REFUSED) verdict = EPCY_VERDICT_REFUSED;
      else if ((theirs ^ mine) & EPCY_HEADER_COMPARED) verdict = EPCY_VERDICT_MISMATCH;
    }
    return __reduce_max_sync(~0u, verdict);
  }

  // One thread: keep for the host, which does not wait, why this call gave nothing.
  EPCY_DEVICE void report(int verdict, uint32_t mine) const {
    epcy_report *r = p.report;
    if (verdict != EPCY_VERDICT_REFUSED && verdict != EPCY_VERDICT_MISMATCH) return;
    __threadfence_system();
    uint32_t *headers = (uint32_t *)r->late_text;
    for (int q = 0; q < num_ranks; q++) {
      const uint32_t theirs = q == me ? mine : (uint32_t)load_word(header(me, q) + 1);
      if (verdict == EPCY_VERDICT_MISMATCH) { // what each rank did, for the host to compare
        headers[q] = theirs;
      } else if (theirs & EPCY_HEADER_REFUSED) {
        for (int i = 0; i < EPCY_CUDA_TEXT_BYTES; i++) r->late_text[i] = ((volatile char *)text(me, q))[i];
        r->late_rank = q;
        break;
      }
    }
    if (verdict == EPCY_VERDICT_MISMATCH) headers[num_ranks] = epoch;
    __threadfence_system();
    *(volatile uint32_t *)&r->late_verdict = verdict;
  }

  // ---- the end: all threads of a block, but those that have left it for good
  EPCY_DEVICE void leave(int phases, uint32_t *sent) const {
    epcy_low_latency_local *own = state();
    __syncthreads(); // a warp that is late to start still reads the epoch
    if (phases & EPCY_LOW_LATENCY_SEND)
      for (int g = blockIdx.x + threadIdx.x * gridDim.x; g < EPCY_LOW_LATENCY_MAX_BLOCKS; g += kThreads * gridDim.x)
        own->epoch[kind][g] = epoch;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      if (phases == EPCY_LOW_LATENCY_SEND) own->held[kind][set()] = epoch, *sent = epoch;
      if (phases == EPCY_LOW_LATENCY_RECEIVE) own->held[kind][set()] = 0;
    }
    if (phases != EPCY_LOW_LATENCY_RECEIVE) return; // the next call's first words acknowledge this one: no flight here
    __shared__ bool last;
    if (threadIdx.x == 0) {
      __threadfence();
      last = atomicAdd(&own->blocks_done[kind], 1u) == gridDim.x - 1;
      if (last) own->blocks_done[kind] = 0;
    }
    __syncthreads();
    if (last && threadIdx.x < 32) acknowledge(epoch);
  }
};

// A whole warp: counts turns of a wait for lines, and looks at the clock now and then.
struct Patience {
  uint32_t turn = 0;
  uint64_t start = 0;
  EPCY_DEVICE bool over(const LowLatency &s, bool waits, int peer, uint32_t seen) {
    if ((++turn & 1023) != 0) return false;
    const bool out = waits && s.late(&start, EPCY_CUDA_LINES, peer, s.word(0), (uint64_t)seen << 32);
    return __any_sync(~0u, out);
  }
};

inline int low_latency_grid(const epcy_low_latency_call &c) {
  const int64_t items = (int64_t)c.num_tokens * c.num_parts;
  const int64_t least = c.max_blocks < EPCY_LOW_LATENCY_MIN_BLOCKS ? c.max_blocks : EPCY_LOW_LATENCY_MIN_BLOCKS;
  return (int)(items < least ? least : items > c.max_blocks ? c.max_blocks : items);
}

template <typename Kernel> int resident_blocks(Kernel kernel, size_t shared, int *blocks) {
  int device = 0, sms = 0, each = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess) e = (cudaError_t)allow_shared(kernel);
  if (e == cudaSuccess) e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, kThreads, shared);
  const int all = sms * each < EPCY_LOW_LATENCY_MAX_BLOCKS ? sms * each : EPCY_LOW_LATENCY_MAX_BLOCKS;
  if (e == cudaSuccess && all < *blocks) *blocks = all;
  return e;
}
