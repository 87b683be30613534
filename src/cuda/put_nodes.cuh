// A call between nodes as every kernel sees it: its epoch, everybody's records, and bounded waits for what is put.
//
// The kernels of a call follow each other in the stream; only those that move rows wait for others of the same launch on
// another rank, and those launches are cooperative.
#pragma once
#include "epcy/put_nodes.h"
#include "launch.cuh"
#include "put.cuh"
#include "step.cuh"

namespace nodes {

constexpr int kBlock = 512, kWarps = kBlock / 32;

EPCY_DEVICE int part_of(int n, int part, int num) { // the part-th of num parts of n things begins here
  const unsigned each = (unsigned)n / num, rest = (unsigned)n % num;
  return (int)(each * part + rest * part / num);
}

struct NodeCall : Step {
  const epcy_nodes_call &a;
  EPCY_DEVICE explicit NodeCall(const epcy_nodes_call &call) : Step(call.peers), a(call) {}

  EPCY_DEVICE int K() const { return (int)p.shape.num_topk; }
  EPCY_DEVICE int M() const { return (int)p.shape.num_max_tokens; }
  EPCY_DEVICE int E() const { return (int)p.shape.num_experts; }
  EPCY_DEVICE int L() const { return p.num_local; }
  EPCY_DEVICE bool by_expert() const { return EPCY_HEADER_LAYOUT(a.header); }
  EPCY_DEVICE bool is_near(int r) const { return a.map.near_ranks >> r & 1; }
  EPCY_DEVICE char *own() const { return p.base[me]; }
  EPCY_DEVICE epcy_nodes_local *notes() const { return (epcy_nodes_local *)(own() + a.wire.local); }
  EPCY_DEVICE void note(int span, bool notes_it = is_first_thread()) const {
    if (notes_it) notes()->end_ns[span] = global_time_ns();
  }

  // ---- records: offsets in any rank's allocation
  EPCY_DEVICE int64_t record_at(int from) const {
    return a.wire.records + ((int64_t)set() * num_ranks + from) * a.wire.record_bytes;
  }
  EPCY_DEVICE int64_t announced_at(int from) const {
    return a.wire.announced + ((int64_t)set() * num_ranks + from) * 8;
  }
  EPCY_DEVICE epcy_nodes_record *record(int from) const { return (epcy_nodes_record *)(own() + record_at(from)); }
  EPCY_DEVICE int32_t *ids(int from) const { return (int32_t *)(own() + record_at(from) + EPCY_NODES_RECORD_BYTES); }
  EPCY_DEVICE static int64_t array_bytes(uint32_t tokens, int K) { return ((int64_t)tokens * K * 4 + 15) / 16 * 16; }
  EPCY_DEVICE float *weights(int from) const { // NULL: there are none
    const uint32_t parts = __ldcg(&record(from)->parts), tokens = __ldcg(&record(from)->num_tokens);
    if (!(parts & EPCY_NODES_WEIGHTS)) return nullptr;
    return (float *)((char *)ids(from) + (parts & EPCY_NODES_IDS ? array_bytes(tokens, K()) : 0));
  }
  EPCY_DEVICE uint32_t header_of(int r) const { return __ldcg(&record(r)->header); }
  // Where rank r wants its rows.
  EPCY_DEVICE int64_t area_at(int r) const { return p.heap.receive[EPCY_HEADER_AREA(header_of(r))]; }

  // ---- slots
  EPCY_DEVICE int64_t slot(int group, int channel, int chunk) const {
    return ((int64_t)group * a.wire.num_channels + channel) * a.wire.num_slots + chunk % a.wire.num_slots;
  }
  EPCY_DEVICE uint64_t chunk_word(int chunk) const { return word((uint32_t)chunk + 1); }

  // ---- waits: one thread. False: gave up.
  EPCY_DEVICE bool wait_exact(int64_t at, uint64_t value, int phase, int peer) const {
    uint64_t *flag = (uint64_t *)(own() + at), start = 0;
#pragma unroll 1
    for (int turn = 1; !::has_come(flag, value); turn++)
      if ((turn & 63) == 0 && !(start = patience(flag, (uint32_t)value, phase, peer, start))) return false;
    return true;
  }

  // All threads of a block, when all records are here: what everybody finds of this call. Ends with a block barrier.
  EPCY_DEVICE int judge() const {
    __shared__ int verdict;
    if (threadIdx.x < 32) {
      const int r = threadIdx.x;
      int v = EPCY_VERDICT_OK;
      if (broken()) v = EPCY_VERDICT_BROKEN;
      else if (r < num_ranks) {
        const uint32_t theirs = header_of(r);
        if (theirs & EPCY_HEADER_REFUSED) v = EPCY_VERDICT_REFUSED;
        else if ((theirs ^ a.header) & EPCY_HEADER_COMPARED) v = EPCY_VERDICT_MISMATCH;
        else if (places_rows() && (theirs & EPCY_HEADER_WAITS) && notes()->bad[r][0] >= 0) v = EPCY_VERDICT_BAD_ID;
      }
      v = __reduce_max_sync(~0u, v);
      if (r == 0) verdict = v;
    }
    __syncthreads();
    return verdict;
  }
  EPCY_DEVICE bool places_rows() const { // a dispatch that is not cached
    return EPCY_HEADER_OP(a.header) == EPCY_STEP_DISPATCH && (a.parts & EPCY_NODES_IDS);
  }

  // One thread: tell the host how the part of this call that concerns rank r came out.
  EPCY_DEVICE void tell_verdict(int r, int verdict) const {
    epcy_report *report = p.report;
    __threadfence_system();
    if (p.ticket) return tell(&report->verdict[r], verdict);
    if (verdict == EPCY_VERDICT_OK) return;
    for (int q = 0; verdict == EPCY_VERDICT_REFUSED && q < num_ranks; q++)
      if (header_of(q) & EPCY_HEADER_REFUSED) {
        for (int i = 0; i < EPCY_CUDA_TEXT_BYTES; i++) report->late_text[i] = record(q)->text[i];
        report->late_rank = q;
        break;
      }
    if (verdict == EPCY_VERDICT_MISMATCH) {
      uint32_t *headers = (uint32_t *)report->late_text;
      for (int q = 0; q < num_ranks; q++) headers[q] = header_of(q);
      headers[num_ranks] = epoch;
    }
    __threadfence_system();
    *(volatile uint32_t *)&report->late_verdict = verdict;
  }

  // A warp: this rank has given up; ranks of its own node have been told by who found out.
  EPCY_DEVICE void tell_far_ranks() const {
    const int r = threadIdx.x & 31;
    if (r < num_ranks && !is_near(r)) put_half_word((uint32_t *)(a.map.name[r] + p.control.left) + me, 1, a.map.pe[r]);
  }

  // All threads of every block, at the end of a kernel that stores to, or reads from, ranks of the own node: tell them that
  // this block has done so, and see that theirs have.
  EPCY_DEVICE bool finish_near() const {
    __syncthreads();
    bool ok = true;
    const int r = threadIdx.x;
    if (r < num_ranks && r != me && is_near(r)) {
      __threadfence_system();
      store_word_release(done(r, me) + blockIdx.x, word(0));
      const int blocks = (int)__ldcg(&record(r)->num_blocks);
      const uint64_t since = global_time_ns();
#pragma unroll 1
      for (int b = blockIdx.x; b < blocks && ok; b += gridDim.x) wait(done(me, r) + b, EPCY_CUDA_COMPLETION, r, &ok);
      if (blockIdx.x == 0) stamp_wait(p, r, since);
    }
    return !__syncthreads_or(!ok);
  }
};

// Which part of the work a block has: groups' senders, groups' receivers, the own node; `turn` of num_blocks.
struct Part {
  int group, turn;
  bool sends, receives;
  EPCY_DEVICE explicit Part(const epcy_nodes_call &a) {
    const int J = a.num_blocks, G = a.wire.num_groups, kind = blockIdx.x / J;
    turn = blockIdx.x % J;
    sends = kind < G, receives = kind >= G && kind < 2 * G;
    group = kind % G;
  }
};
inline int num_parts(const epcy_nodes_call &a) { return a.num_blocks * (1 + 2 * a.wire.num_groups); }

constexpr int kAtOnce = 4;
// A whole warp: copy a row to where each lane that has a bit in `who` wants it. bytes: a multiple of 16.
EPCY_DEVICE void copy_row(const char *from, int64_t bytes, unsigned who, char *mine) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int64_t begin = lane * 16; begin - lane * 16 < bytes; begin += kAtOnce * 512) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; j++)
      if (begin + j * 512 < bytes) v[j] = __ldcg((const uint4 *)(from + begin + j * 512));
#pragma unroll 1
    for (unsigned left = who; left; left &= left - 1) {
      char *to = (char *)__shfl_sync(~0u, (unsigned long long)mine, __ffs(left) - 1);
#pragma unroll
      for (int j = 0; j < kAtOnce; j++)
        if (begin + j * 512 < bytes) *(uint4 *)(to + begin + j * 512) = v[j];
    }
  }
}
EPCY_DEVICE void copy_row(const char *from, char *to, int64_t bytes) { copy_row(from, bytes, 1u, to); }
// Likewise numbers of 4 bytes.
EPCY_DEVICE void copy_numbers(const float *from, int n, unsigned who, float *mine) {
#pragma unroll 1
  for (unsigned left = who; left; left &= left - 1) {
    float *to = (float *)__shfl_sync(~0u, (unsigned long long)mine, __ffs(left) - 1);
#pragma unroll 1
    for (int i = threadIdx.x & 31; i < n; i += 32) to[i] = __ldcg(from + i);
  }
}

// The messages of a channel to or from a group, chunk by chunk.
struct Chunks {
  const NodeCall &s;
  int group, channel, num, chunk_tokens;
  int64_t row, extra; // bytes of each message
  EPCY_DEVICE Chunks(const NodeCall &s, int group, int channel, int num, int64_t extra_bytes)
      : s(s), group(group), channel(channel), num(num), chunk_tokens(s.a.wire.chunk_tokens), row(s.a.row_bytes),
        extra((extra_bytes + 15) / 16 * 16) {}
  EPCY_DEVICE int num_chunks() const { return (num + chunk_tokens - 1) / chunk_tokens; }
  EPCY_DEVICE int size(int chunk) const { return min(chunk_tokens, num - chunk * chunk_tokens); }
  EPCY_DEVICE char *staged(int chunk) const {
    return s.own() + s.a.wire.staging + s.slot(group, channel, chunk) * s.a.wire.slot_bytes;
  }
  EPCY_DEVICE char *arrived(int chunk) const {
    return s.own() + s.a.wire.rings + s.slot(group, channel, chunk) * s.a.wire.slot_bytes;
  }
  EPCY_DEVICE int peer() const { return s.a.map.peer[group]; }
  EPCY_DEVICE int64_t there(int chunk) const { return s.slot(s.a.map.back[group], channel, chunk); }

  // All threads: wait until the slot of a chunk is free again. False: gave up.
  EPCY_DEVICE bool wait_free(int chunk) const {
    const int before = chunk - s.a.wire.num_slots;
    return before < 0 || wait_credit(before);
  }
  EPCY_DEVICE bool wait_credit(int chunk) const {
    bool ok = true;
    if (threadIdx.x == 0)
      ok = s.wait_exact(s.a.wire.credits + s.slot(group, channel, chunk) * 8, s.chunk_word(chunk), EPCY_CUDA_CREDITS,
                        peer());
    return !__syncthreads_or(!ok);
  }
  // All threads: what has been staged of a chunk, from `skip` bytes on, to the slot over there.
  EPCY_DEVICE void put(int chunk, int64_t skip, int64_t bytes) const {
    char *const name = s.a.map.name[peer()];
    put_block(name + s.a.wire.rings + there(chunk) * s.a.wire.slot_bytes + skip, staged(chunk) + skip, bytes,
              (uint64_t *)(name + s.a.wire.flags) + there(chunk), s.chunk_word(chunk), s.a.map.pe[peer()]);
  }
  EPCY_DEVICE void count_bytes(int64_t rows, int64_t rest) const {
    if (threadIdx.x != 0) return;
    add_to(&s.notes()->node_bytes[0], rows), add_to(&s.notes()->node_bytes[1], rest);
    add_to(&counters_of(s.p)->bytes_moved, rows);
  }
  // All threads, when everything has been put: wait for the credits that are still out.
  EPCY_DEVICE bool drain() const {
#pragma unroll 1
    for (int k = max(0, num_chunks() - s.a.wire.num_slots); k < num_chunks(); k++)
      if (!wait_credit(k)) return false;
    return true;
  }
  // All threads: wait for a chunk. False: gave up.
  EPCY_DEVICE bool wait_arrival(int chunk) const {
    bool ok = true;
    if (threadIdx.x == 0)
      ok = s.wait_exact(s.a.wire.flags + s.slot(group, channel, chunk) * 8, s.chunk_word(chunk), EPCY_CUDA_FORWARD,
                        peer());
    return !__syncthreads_or(!ok);
  }
  // One thread, when the whole block has read a chunk.
  EPCY_DEVICE void give_credit(int chunk) const {
    put_word((uint64_t *)(s.a.map.name[peer()] + s.a.wire.credits) + there(chunk), s.chunk_word(chunk),
             s.a.map.pe[peer()]);
  }
};

} // namespace nodes
