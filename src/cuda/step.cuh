// A call as every kernel sees it: its epoch, the headers of all ranks, bounded waits, and the end.
#pragma once
#include "elsewhere.cuh"
#include "epcy/cuda.h"
#include "ptx.cuh"
#include "stamp.cuh"

struct Step {
  const epcy_peers &p;
  uint32_t epoch;
  int me, num_ranks;

  // All threads. `broken` Buffers do nothing until reset: a block asks as one, since another block may find out just then.
  EPCY_DEVICE explicit Step(const epcy_peers &peers) : p(peers), me(peers.rank), num_ranks((int)peers.shape.num_ranks) {
    const uint32_t before = load_local(&local()->epoch[blockIdx.x]);
    epoch = before == 0xFFFFFFFFu ? 2u : before + 1; // 0 is no epoch, and each call takes the other set than the last
    stamp_begin(is_first_thread());
  }
  EPCY_DEVICE epcy_local *local() const { return (epcy_local *)(p.base[me] + p.control.local); }
  EPCY_DEVICE bool broken() const { return load_local(&local()->broken) != 0; }
  EPCY_DEVICE int set() const { return epoch & 1; }

  EPCY_DEVICE uint64_t *header(int on, int from) const {
    return (uint64_t *)(p.base[on] + p.control.headers) + ((int64_t)set() * num_ranks + from) * EPCY_NUM_HEADERS;
  }
  EPCY_DEVICE uint64_t *done(int on, int from) const { // [EPCY_MAX_BLOCKS]
    return (uint64_t *)(p.base[on] + p.control.done) + ((int64_t)set() * num_ranks + from) * EPCY_MAX_BLOCKS;
  }
  EPCY_DEVICE uint64_t *counts(int on, int from, int chunk) const { // [R] by destination
    return (uint64_t *)(p.base[on] + p.control.counts) +
           (((int64_t)set() * num_ranks + from) * EPCY_MAX_CHUNKS + chunk) * num_ranks;
  }
  EPCY_DEVICE uint64_t *experts(int on, int from, int chunk) const { // [L]
    const int64_t L = p.num_local;
    return (uint64_t *)(p.base[on] + p.control.experts) +
           (((int64_t)set() * num_ranks + from) * EPCY_MAX_CHUNKS + chunk) * L;
  }
  EPCY_DEVICE uint64_t *starts(int on, int chunk) const { // [E]
    return (uint64_t *)(p.base[on] + p.control.starts) +
           ((int64_t)set() * EPCY_MAX_CHUNKS + chunk) * p.shape.num_experts;
  }
  EPCY_DEVICE uint64_t *progress(int on, int from, int chunk) const { // [EPCY_MOVER_WARPS]
    return (uint64_t *)(p.base[on] + p.control.progress) +
           (((int64_t)set() * num_ranks + from) * EPCY_MAX_CHUNKS + chunk) * EPCY_MOVER_WARPS;
  }
  EPCY_DEVICE int32_t *fans(int on) const { // [R M][K]
    return (int32_t *)(p.base[on] + p.control.fans) + set() * num_ranks * p.shape.num_max_tokens * p.shape.num_topk;
  }
  EPCY_DEVICE int64_t *bad(int on, int from, int chunk) const { // token, lane, value
    return (int64_t *)(p.base[on] + p.control.bad) +
           (((int64_t)set() * num_ranks + from) * EPCY_MAX_CHUNKS + chunk) * 4;
  }
  EPCY_DEVICE uint64_t *mark(int on, int from, int which) const {
    return (uint64_t *)(p.base[on] + p.control.marks) + ((int64_t)set() * num_ranks + from) * EPCY_NUM_MARKS + which;
  }
  EPCY_DEVICE uint32_t *left(int on, int from) const { return (uint32_t *)(p.base[on] + p.control.left) + from; }
  EPCY_DEVICE char *text(int on, int from) const {
    return p.base[on] + p.control.text + ((int64_t)set() * num_ranks + from) * EPCY_CUDA_TEXT_BYTES;
  }
  EPCY_DEVICE uint64_t word(uint32_t value) const { return (uint64_t)epoch << 32 | value; }

  // One thread: wait until a word is of this call, and return its value; false in *ok if that took too long, or if
  // another wait of this Buffer has expired.
  EPCY_DEVICE uint32_t wait(const uint64_t *at, int phase, int peer, bool *ok) const {
    return wait_for(at, 0, phase, peer, ok);
  }
  // The same, until its value is `least` or more.
  EPCY_DEVICE uint32_t wait_for(const uint64_t *at, uint32_t least, int phase, int peer, bool *ok) const {
    uint64_t v = load_word_acquire(at), start = 0;
#pragma unroll 1
    for (int turn = 1; !has_come(v, least); turn++) {
      if ((turn & 255) == 0 && !(start = patience(at, least, phase, peer, start))) return *ok = false, 0;
      v = load_word_acquire(at);
    }
    return (uint32_t)v;
  }
  EPCY_DEVICE bool has_come(uint64_t v, uint32_t least) const {
    return (uint32_t)(v >> 32) == epoch && (uint32_t)v >= least;
  }
  // What a wait does now and then: when it began, or 0 if it is over without its word. A peer that has left is not waited
  // for, but what it did before counts.
  __device__ __noinline__ uint64_t patience(const uint64_t *at, uint32_t least, int phase, int peer,
                                            uint64_t start) const {
    const uint64_t now = global_time_ns();
    if (!start) start = now;
    if (is_stopped(p)) give_up();
    if (broken()) return 0;
    if (phase == EPCY_CUDA_HEADERS) {
      const epcy_low_latency_wire wire = epcy_low_latency_wire_layout(&p.shape, p.control.bytes);
      if (is_elsewhere(p, wire, kStepCalls, epoch, peer, header_value(me, 0))) return 0;
    }
    const bool gone = load_local(left(me, peer)) != 0;
    const uint64_t v = load_word_acquire(at);
    if (has_come(v, least) || (!gone && now - start <= (uint64_t)p.timeout_ns)) return start;
    expire(phase, peer, v, gone);
    return 0;
  }
  // This Buffer is broken, and whoever waits for this rank need wait no longer. False: somebody else has told.
  EPCY_DEVICE bool give_up() const {
    if (atomicCAS(&local()->broken, 0u, 1u) != 0) return false;
    for (int q = 0; q < num_ranks; q++)
      if (!(p.far >> q & 1)) *(volatile uint32_t *)left(q, me) = 1; // far ones hear of it at the call's end
    return true;
  }
  // The first wait that does not end.
  __device__ __noinline__ void expire(int phase, int peer, uint64_t seen, bool gone) const {
    if (!give_up()) return;
    epcy_report *r = p.report;
    r->gone = gone;
    r->phase = phase, r->peer = peer, r->epoch = epoch, r->expected = word(0), r->seen = seen;
    r->operation = p.operation, r->timeout_ns = p.timeout_ns;
    __threadfence_system();
    *(volatile uint32_t *)&r->expired = 1;
  }

  // All threads of one block: say what this rank does. Each word is a thread's, so that none waits for another.
  EPCY_DEVICE void announce(uint32_t header_word, uint32_t second, uint32_t third, uint32_t grid) const {
    static_assert(EPCY_NUM_HEADERS == 4, "a value each");
    if ((int)threadIdx.x < num_ranks * EPCY_NUM_HEADERS) {
      const int which = threadIdx.x % EPCY_NUM_HEADERS;
      store_word_release(header(threadIdx.x / EPCY_NUM_HEADERS, me) + which, word(which == 0   ? header_word
                                                                                  : which == 1 ? second
                                                                                  : which == 2 ? third
                                                                                               : grid));
    }
  }

  // All threads of a block: wait for every rank's header; ends with a block barrier. `verdict` is shared and starts OK.
  // A rank that is seen here lets its peers write where its header says.
  EPCY_DEVICE void gather(uint32_t mine, int *verdict) const {
    if (EPCY_HEADER_OP(mine) == EPCY_STEP_DISPATCH) stamp(EPCY_SPAN_COUNT);
    if ((int)threadIdx.x < num_ranks * EPCY_NUM_HEADERS) {
      const int from = threadIdx.x / EPCY_NUM_HEADERS, which = threadIdx.x % EPCY_NUM_HEADERS;
      bool ok = true;
      const uint64_t since = global_time_ns();
      const uint32_t theirs = wait(header(me, from) + which, EPCY_CUDA_HEADERS, from, &ok);
      if (blockIdx.x == 0 && which == 0) stamp_wait(p, from, since);
      if (!ok) atomicMax(verdict, (int)EPCY_VERDICT_BROKEN);
      else if (which == 0 && (theirs & EPCY_HEADER_REFUSED)) atomicMax(verdict, (int)EPCY_VERDICT_REFUSED);
      else if (which == 0 && ((theirs ^ mine) & EPCY_HEADER_COMPARED)) atomicMax(verdict, (int)EPCY_VERDICT_MISMATCH);
    }
    __syncthreads();
    stamp(EPCY_SPAN_EXCHANGE);
  }
  EPCY_DEVICE uint32_t header_value(int rank, int word_of) const {
    return (uint32_t)load_word(header(me, rank) + word_of);
  }

  // In how many chunks a source counts its tokens for rank d: a block each.
  EPCY_DEVICE int num_chunks(int source, int d) const {
    const uint32_t grid = header_value(source, 3);
    return source == d ? EPCY_GRID_OWN(grid) : EPCY_GRID_PEER(grid);
  }

  // One thread: a value for the host that waits with this call's ticket.
  EPCY_DEVICE void tell(uint64_t *at, uint32_t value) const {
    *(volatile uint64_t *)at = (uint64_t)p.ticket << 32 | value;
  }

  // One thread: tell the host how the part of this call that concerns destination `rank` came out.
  __device__ __noinline__ void report(int rank, int verdict) const {
    epcy_report *r = p.report;
    __threadfence_system();
    if (p.ticket) return tell(&r->verdict[rank], verdict);
    if (verdict == EPCY_VERDICT_OK) return;
    for (int q = 0; verdict == EPCY_VERDICT_REFUSED && q < num_ranks; q++)
      if (header_value(q, 0) & EPCY_HEADER_REFUSED) {
        for (int i = 0; i < EPCY_CUDA_TEXT_BYTES; i++) r->late_text[i] = text(me, q)[i];
        r->late_rank = q;
        break;
      }
    if (verdict == EPCY_VERDICT_MISMATCH) { // what each rank did, for the host to compare; then the number of the call
      uint32_t *headers = (uint32_t *)r->late_text;
      for (int q = 0; q < num_ranks; q++) headers[q] = header_value(q, 0);
      headers[num_ranks] = epoch;
    }
    __threadfence_system();
    *(volatile uint32_t *)&r->late_verdict = verdict;
  }
  // All threads of a block of a Buffer that is broken.
  EPCY_DEVICE void report_broken() const {
    if (blockIdx.x == 0 && (int)threadIdx.x < num_ranks) report(threadIdx.x, EPCY_VERDICT_BROKEN);
  }

  // All threads of every block: wait until every block of every rank has come here, for the turn-th time in this call
  // (from 0). What threads wrote before is then visible; bulk stores as for finish().
  EPCY_DEVICE void together(int turn, int *verdict) const {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence_system();
      last = atomicInc(&local()->blocks_met, gridDim.x - 1) == gridDim.x - 1; // and it is 0 again
    }
    __syncthreads();
    if ((int)threadIdx.x < num_ranks) {
      if (last) {
        __threadfence_system();
        store_word_release(mark(threadIdx.x, me, turn), word(0));
      }
      bool ok = true;
      wait(mark(me, threadIdx.x, turn), EPCY_CUDA_DATA, threadIdx.x, &ok);
      if (!ok) atomicMax(verdict, (int)EPCY_VERDICT_BROKEN);
    }
    __syncthreads();
  }

  // All threads of every block, at the end: tell all ranks that this block has done everything to them, see that their
  // blocks have (each block looks at those of its own number), and take the epoch's step. Bulk stores must be complete
  // and fenced in their issuing threads. A block whose wait did not end has not done its part, and does not say so: a
  // rank that comes too late learns from its own wait that this one has left.
  EPCY_DEVICE void finish(const int *verdict) const {
    __syncthreads();
    if (p.operation == EPCY_STEP_DISPATCH) stamp(EPCY_SPAN_SEND);
    else if (p.operation == EPCY_STEP_COMBINE) stamp(EPCY_SPAN_REDUCE);
    if ((int)threadIdx.x < num_ranks && (int)threadIdx.x != me && *verdict != EPCY_VERDICT_BROKEN) {
      __threadfence_system();
      store_word_release(done(threadIdx.x, me) + blockIdx.x, word(0));
      const int blocks = EPCY_GRID_BLOCKS(header_value(threadIdx.x, 3));
      bool ok = true;
      const uint64_t since = global_time_ns();
#pragma unroll 1
      for (int b = blockIdx.x; b < blocks && ok; b += gridDim.x)
        wait(done(me, threadIdx.x) + b, EPCY_CUDA_COMPLETION, threadIdx.x, &ok);
      if (blockIdx.x == 0) stamp_wait(p, threadIdx.x, since);
    }
#pragma unroll 1
    for (int b = blockIdx.x + threadIdx.x * gridDim.x; b < EPCY_MAX_BLOCKS; b += gridDim.x * blockDim.x)
      local()->epoch[b] = epoch;
    if (blockIdx.x == 0) {
      __syncthreads(); // its waits are over
      if (threadIdx.x < 32)
        stamp_end(counters_of(p), EPCY_STAMP_STEP, epoch, p.operation, EPCY_SPAN_WAIT, is_first_thread());
    }
  }
};
