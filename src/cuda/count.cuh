// What dispatch does alike in both layouts: give each block a destination and a chunk of this rank's tokens, count those
// that go there, and exchange the counts.
//
// Each block serves one destination (a block that also stores to its own rank is several times slower), so a rank has as
// many chunks for a destination as blocks for it. Counts of the chunks that are not used are sent as 0: a receiver needs
// not know how many there are.
#pragma once
#include "launch.cuh"
#include "step.cuh"

constexpr int kThreads = 256, kWarps = kThreads / 32, C = EPCY_MAX_CHUNKS;
static_assert(C == 32, "a lane a chunk");

// A block's part of the work.
struct Role {
  int d, j, g; // destination, which of its blocks, how many
  EPCY_DEVICE Role(const epcy_cuda_dispatch &a, int me, int num_ranks) {
    const int b = blockIdx.x, to_peers = a.num_peer_blocks * (num_ranks - 1);
    const bool own = b >= to_peers;
    d = own ? me : (me + 1 + b / a.num_peer_blocks) % num_ranks;
    j = own ? b - to_peers : b % a.num_peer_blocks; // a block that only copies has no chunk: j >= g
    g = own ? a.num_own_blocks : a.num_peer_blocks;
  }
  EPCY_DEVICE bool sends() const { return j < g; }
};

// What a block knows of the counts for its destination; shared.
struct Counts {
  int n[EPCY_MAX_RANKS * C], base[EPCY_MAX_RANKS * C]; // by source and chunk: tokens, and how many come before
  int total;
};

// The tokens that a block sends: pieces of chunks, which lie one after the other at the destination; shared.
struct Share {
  int n[C], num_pieces, total, base; // base: of the first one, at the destination
  const int32_t *list[C];
  EPCY_DEVICE int token(int i) const {
    int k = 0;
#pragma unroll 1
    for (; i >= n[k]; k++) i -= n[k];
    return list[k][i];
  }
};

// A whole warp: the sum of n over this lane and all before it.
template <typename Int> EPCY_DEVICE Int sum_up_to(Int n) {
#pragma unroll 1
  for (int step = 1; step < 32; step *= 2) {
    const Int other = __shfl_up_sync(~0u, n, step);
    if ((int)(threadIdx.x & 31) >= step) n += other;
  }
  return n;
}

// The part-th of num parts of n things begins here: n part / num, without a division of 64 bits.
EPCY_DEVICE int part_of(int n, int part, int num) {
  const unsigned each = (unsigned)n / num, rest = (unsigned)n % num;
  return (int)(each * part + rest * part / num);
}
EPCY_DEVICE int first_token(const epcy_cuda_dispatch &a, int chunk, int num_chunks) {
  return part_of(a.num_tokens, chunk, num_chunks);
}
EPCY_DEVICE int32_t *chunk_list(const epcy_cuda_dispatch &a, int d, int chunk, int num_chunks) {
  return a.routing.list + (int64_t)d * a.num_tokens + first_token(a, chunk, num_chunks);
}

template <typename Id> EPCY_DEVICE int64_t read_id(const epcy_cuda_dispatch &a, int64_t i) {
  return a.cached ? a.lane_ids[i] : (int64_t)((const Id *)a.topk_idx)[i];
}
// The local number at rank d of a lane's expert, or -1.
template <typename Id> EPCY_DEVICE int local_id(const Step &s, const epcy_cuda_dispatch &a, int64_t lane, int d) {
  const int L = s.p.num_local;
  const int64_t local = read_id<Id>(a, lane) - d * L; // an id below 0 gives less than 0
  return local >= 0 && local < L ? (int)local : -1;
}

// Whether a token goes to rank d; *bad becomes the first lane with a bad id, if that is less.
template <typename Id>
EPCY_DEVICE bool goes_to(const Step &s, const epcy_cuda_dispatch &a, int token, int d, int64_t *bad) {
  constexpr int kAtOnce = 8;
  const int K = (int)s.p.shape.num_topk, E = (int)s.p.shape.num_experts, L = s.p.num_local, from = d * L;
  const int64_t first = (int64_t)token * K;
  bool goes = false;
#pragma unroll 1
  for (int k0 = 0; k0 < K; k0 += kAtOnce) {
    Id id[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; k++) id[k] = k0 + k < K ? ((const Id *)a.topk_idx)[first + k0 + k] : (Id)-1;
#pragma unroll
    for (int k = kAtOnce - 1; k >= 0; k--) {
      if ((id[k] < -1 || id[k] >= E) && first + k0 + k < *bad) *bad = first + k0 + k;
      goes |= id[k] >= from && id[k] < from + L;
    }
  }
  return goes;
}

// All threads of a block: list the tokens of its chunk that go to its destination. Each warp looks at a part of its own.
template <typename Id>
EPCY_DEVICE int list_tokens(const Step &s, const epcy_cuda_dispatch &a, const Role &role, int *warp_total,
                            unsigned long long *first_bad) {
  const int t0 = first_token(a, role.j, role.g), t1 = first_token(a, role.j + 1, role.g);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int32_t *list = chunk_list(a, role.d, role.j, role.g);
  int run = 0;
#pragma unroll 1
  for (int begin = t0; begin < t1; begin += kWarps * 1024) { // a warp keeps 32 votes of a thread in a register
    const int all = t1 - begin < kWarps * 1024 ? t1 - begin : kWarps * 1024,
              each = (all + kWarps * 32 - 1) / (kWarps * 32);
    const int from = begin + warp * each * 32;
    unsigned mine = 0;
    int total = 0;
    int64_t bad = INT64_MAX;
#pragma unroll 2
    for (int i = 0; i < each; i++) {
      const int t = from + i * 32 + lane;
      const bool goes = t < begin + all && goes_to<Id>(s, a, t, role.d, &bad);
      mine |= (unsigned)goes << i;
      total += __popc(__ballot_sync(~0u, goes));
    }
    if (bad != INT64_MAX) atomicMin(first_bad, (unsigned long long)bad);
    if (lane == 0) warp_total[warp] = total;
    __syncthreads();
    int at = run;
#pragma unroll 1
    for (int w = 0; w < kWarps; w++) at += w < warp ? warp_total[w] : 0, run += warp_total[w];
#pragma unroll 1
    for (int i = 0; i < each; i++) {
      const unsigned votes = __ballot_sync(~0u, mine >> i & 1);
      if (mine >> i & 1) list[at + __popc(votes & ((1u << lane) - 1))] = from + i * 32 + lane;
      at += __popc(votes);
    }
    __syncthreads();
  }
  return run;
}

// The first threads of a block: tell every rank how many of the chunk's tokens go to the destination.
template <typename Id>
EPCY_DEVICE void publish_count(const Step &s, const epcy_cuda_dispatch &a, const Role &role, int n,
                               unsigned long long first_bad) {
  const int r = threadIdx.x;
  if (r >= s.num_ranks) return;
#pragma unroll 1
  for (int c = role.j + role.g; c < C; c += role.g) store_word(s.counts(r, s.me, c) + role.d, s.word(0));
  uint64_t *at = s.counts(r, s.me, role.j) + role.d;
  if (first_bad == ~0ull) return store_word(at, s.word((uint32_t)n));
  const int64_t K = s.p.shape.num_topk, lane = (int64_t)first_bad, value = (int64_t)((const Id *)a.topk_idx)[lane];
  const bool refuse = a.header & EPCY_HEADER_WAITS;
  int64_t *slot = s.bad(r, s.me, role.j);
  slot[0] = lane / K, slot[1] = lane % K, slot[2] = value;
  auto *bad = &s.p.report->bad[role.j]; // for the host, where it does not wait
  if (!refuse && r == 0 && role.d == s.me && bad->epoch == 0) {
    bad->token = lane / K, bad->lane = lane % K, bad->value = value;
    __threadfence_system();
    *(volatile uint32_t *)&bad->epoch = s.epoch;
  }
  store_word_release(at, s.word((uint32_t)n | (refuse ? EPCY_COUNT_BAD : 0u)));
}

// All threads of a block: everybody's counts for its destination. A block barrier must follow, and come from outside: the
// verdict that let a thread in here may have been raised before another one looks at it.
EPCY_DEVICE void gather_counts(const Step &s, int d, int *verdict, Counts *counts) {
#pragma unroll 1
  for (int q = threadIdx.x; q < s.num_ranks * C; q += kThreads) {
    bool ok = true;
    const uint32_t v = s.wait(s.counts(s.me, q / C, q % C) + d, EPCY_CUDA_COUNTS, q / C, &ok);
    if (!ok) atomicMax(verdict, (int)EPCY_VERDICT_BROKEN);
    if (v & EPCY_COUNT_BAD) atomicMax(verdict, (int)EPCY_VERDICT_BAD_ID);
    counts->n[q] = (int)(v & ~EPCY_COUNT_BAD);
  }
}
// The same of an earlier dispatch, as share_evenly() deals the tokens out now. `n`: [R][C] of the destination.
EPCY_DEVICE void read_counts(const Step &s, const int32_t *n, Counts *counts) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int source = threadIdx.x >> 5; source < s.num_ranks; source += kWarps) {
    const int all = __reduce_add_sync(~0u, n[source * C + lane]), blocks = s.num_chunks(source, s.me);
    const int from = part_of(all, lane, blocks), to = part_of(all, lane + 1, blocks);
    counts->n[source * C + lane] = lane < blocks ? to - from : 0;
  }
}
// The first warp of a block; a block barrier must follow.
EPCY_DEVICE void add_up(const Step &s, Counts *counts) {
  const int lane = threadIdx.x & 31;
  int run = 0;
#pragma unroll 1
  for (int source = 0; source < s.num_ranks; source++) {
    const int n = counts->n[source * C + lane], upto = sum_up_to(n);
    counts->base[source * C + lane] = run + upto - n;
    run += __shfl_sync(~0u, upto, 31);
  }
  if (lane == 0) counts->total = run;
}

// One thread of a sending block, uncached: its share is its chunk.
EPCY_DEVICE void share_chunk(const epcy_cuda_dispatch &a, const Role &role, int n, Share *share) {
  share->num_pieces = 1, share->n[0] = share->total = n, share->list[0] = chunk_list(a, role.d, role.j, role.g);
}
// One warp of a sending block, cached: a j-th part of all tokens that go there, whatever chunks they were counted in.
EPCY_DEVICE void share_evenly(const Step &s, const epcy_cuda_dispatch &a, const Role &role, Share *share) {
  const int c = threadIdx.x & 31, num_chunks = role.d == s.me ? a.routing.num_own_chunks : a.routing.num_peer_chunks;
  const int n = c < num_chunks ? a.routing.chunk_count[role.d * C + c] : 0, base = a.routing.chunk_base[role.d * C];
  const int upto = sum_up_to(n), all = __shfl_sync(~0u, upto, 31), before = upto - n;
  const int from = part_of(all, role.j, role.g), to = part_of(all, role.j + 1, role.g);
  const int skip = from > before ? from - before : 0, end = to < upto ? to - before : n;
  const unsigned used = __ballot_sync(~0u, skip < end);
  if (skip < end) {
    const int k = __popc(used & ((1u << c) - 1));
    share->n[k] = end - skip, share->list[k] = chunk_list(a, role.d, c, num_chunks) + skip;
  }
  if (c == 0) share->num_pieces = __popc(used), share->total = to - from, share->base = base + from;
}

// A thread of each sending block: its tokens, for the statistics.
EPCY_DEVICE void count_sent(const Step &s, const epcy_cuda_dispatch &a, const Role &role, const Share &share) {
  epcy_counters *c = counters_of(s.p);
  add_to(&c->tokens_to[role.d], share.total);
  if (role.d != s.me) add_to(&c->bytes_moved, share.total * (a.row_bytes + a.num_scales * 4));
}
// Threads `at`, at + all, ... of this rank's first own block: what came from each rank and, unless that is counted
// elsewhere, for each expert. The same threads wrote recv_count, if this call did.
EPCY_DEVICE void count_received(const Step &s, const epcy_cuda_routing &routing, int rows, int area, bool with_experts,
                                int at, int all) {
  epcy_counters *c = counters_of(s.p);
  uint64_t *experts = (uint64_t *)(c + 1);
  for (int q = at; q < s.num_ranks * C; q += all) {
    const int n = __ldcg(routing.recv_count + q);
    if (n) add_to(&c->tokens_from[q / C], n);
  }
  for (int e = at; with_experts && e < s.p.num_local; e += all) add_to(experts + e, __ldcg(routing.experts + e));
  if (at == 0) atomicMax((unsigned long long *)&c->most_rows[0][area], (unsigned long long)rows);
}
