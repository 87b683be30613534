// Low-latency calls to far ranks: the kernels around those that send and receive. See epcy/put.h.
//
// Why nothing here waits for ever: only the kernel that awaits waits for data, bounded as everywhere; it waits for what its
// peers put after sends that wait for acknowledgements alone, and every call ends with acknowledgements. A block waits for
// no other block.
#include "epcy/put.h"
#include "low_latency_rows.cuh"
#include "put.cuh"

namespace {

constexpr int kMostBlocks = 128;

// A call's puts, and what is waited for.
struct Puts {
  const epcy_put &a;
  const LowLatency &s;
  EPCY_DEVICE bool is_far(int r) const { return a.far >> r & 1; }
  EPCY_DEVICE bool refuses() const { return s.c.header & EPCY_HEADER_REFUSED; }

  // ---- where flags are, in an allocation that begins at `base`: those raised by rank `from`
  EPCY_DEVICE uint64_t *flag(char *base, int from, int piece) const {
    const int at = ((s.kind * 2 + s.set()) * s.c.num_ranks + from) * EPCY_NUM_PUT_PIECES + piece;
    return (uint64_t *)(base + a.wire.flags) + at;
  }
  EPCY_DEVICE uint64_t *row_flag(char *base, int from, int token) const {
    return (uint64_t *)(base + a.wire.rows) + s.slot(from, token);
  }
  EPCY_DEVICE uint64_t *sum_flag(char *base, uint32_t of) const {
    return (uint64_t *)(base + a.wire.sums) + s.set() * s.c.num_slots + of;
  }

  // ---- to a far rank, all threads of a block
  // What is in its mirror at an address, to where it belongs; `flag` is this rank's name for it.
  EPCY_DEVICE void put(int to, const void *in_mirror, size_t bytes, uint64_t *flag) const {
    const char *from = (const char *)in_mirror;
    put_block(a.name[to] + (from - s.c.peers.base[to]), from, bytes, flag, s.epoch, a.pe[to]);
  }
  EPCY_DEVICE void put_piece(int to, int piece) const {
    const int me = s.c.rank, K = s.c.num_topk, T = s.c.num_tokens > 0 ? s.c.num_tokens : 1; // no put is empty
    uint64_t *up = flag(a.name[to], me, piece);
    const bool counts = s.kind == EPCY_LOW_LATENCY_DISPATCH;
    if (piece == EPCY_PUT_HEADER) put(to, s.header(to, me), 16, up);
    if (piece == EPCY_PUT_COUNTS && counts) put(to, s.counts(to, me), s.c.num_local.by * 8, up);
    if (piece == EPCY_PUT_LANES && counts && !refuses()) put(to, s.lanes(to, me, 0), (size_t)T * K * 16, up);
    if (piece == EPCY_PUT_TEXT && refuses()) put(to, s.text(to, me), EPCY_CUDA_TEXT_BYTES, up);
  }
  // Bytes of a row and of a sum on the wire. In LogFMT lines lie in pieces, each at a place of its own.
  EPCY_DEVICE size_t line_bytes() const { return (size_t)s.c.num_lines * EPCY_LINE_BYTES; }
  EPCY_DEVICE size_t sum_bytes() const {
    if (!(s.c.header & EPCY_LOW_LATENCY_LOGFMT)) return line_bytes();
    const int pieces = (s.c.row_bytes + EPCY_LOGFMT_PIECE - 1) / EPCY_LOGFMT_PIECE;
    return (size_t)pieces * EPCY_LOGFMT_PIECE_LINES * EPCY_LINE_BYTES;
  }
  // This rank has given up: the far ranks need not wait for it.
  EPCY_DEVICE void tell_left() const {
    if (s.has_peer() && is_far(s.lane))
      put_half_word((uint32_t *)(a.name[s.lane] + s.c.peers.control.left) + s.c.rank, 1, a.pe[s.lane]);
  }

  // ---- from a far rank, a whole warp
  // Wait for a flag of each lane that `waits`. False: gave up, or somebody has something else in mind.
  EPCY_DEVICE bool wait(uint64_t *flag, bool waits, int phase, int from) const {
    Patience patience;
    for (;;) {
      if (waits && has_come(flag, s.epoch)) waits = false;
      if (!__any_sync(~0u, waits)) return true;
      if (patience.over(s, waits, phase, from, waits ? load_word(flag) << 32 : 0)) return false;
    }
  }
  EPCY_DEVICE bool wait_piece(int from, int piece, int phase) const {
    return wait(flag(s.c.own, from, piece), s.lane == 0, phase, from);
  }
  // Wait for the header of a rank. False: there is nothing more to wait for; the kernel that receives says why.
  EPCY_DEVICE bool wait_header(int from, int *tokens) const {
    if (!wait_piece(from, EPCY_PUT_HEADER, EPCY_CUDA_HEADERS)) return false;
    const ulonglong2 header = load_words(s.header(s.c.rank, from));
    *tokens = (int)(uint32_t)header.x;
    if ((uint32_t)header.y & EPCY_HEADER_REFUSED) wait_piece(from, EPCY_PUT_TEXT, EPCY_CUDA_HEADERS);
    return !(((uint32_t)header.y ^ s.c.header) & (EPCY_HEADER_COMPARED | EPCY_HEADER_REFUSED));
  }
};

// The epoch of a call whose rows have been sent, or which was refused.
EPCY_DEVICE const uint32_t *sent_of(const epcy_put &a) {
  const epcy_low_latency_local *local = (const epcy_low_latency_local *)(a.call.own + a.call.wire.local);
  return a.call.header & EPCY_HEADER_REFUSED ? &local->epoch[a.kind][0] : a.call.sent;
}

// A block for a far rank: weights to it, and its own; the first thing of a combine that is given weights.
__global__ void __launch_bounds__(kThreads) exchange_weights(const __grid_constant__ epcy_put a) {
  LowLatency s(a.call, EPCY_LOW_LATENCY_COMBINE, nullptr);
  const epcy_low_latency_call &c = a.call;
  const Puts puts = {a, s};
  const int r = blockIdx.x, K = c.num_topk, num_lanes = c.num_tokens * K;
  const float *weights = a.topk_weights ? a.topk_weights : c.handle.lane_weights; // NULL: to be renormalized
  if (!puts.is_far(r)) return;
  bool ok = !s.is_broken();
  if (ok && threadIdx.x < 32) ok = s.wait_for_acks(s.look_for_acks());
  if (__syncthreads_or(!ok)) return; // the kernel that sends finds the same
  uint64_t *words = s.weights(r, c.rank, 0);
  for (int i = threadIdx.x; i < num_lanes; i += kThreads) {
    const uint32_t lane = load_early(c.handle.lanes + i);
    if (lane != kNowhere && (int)(lane & 255) == r) store_word(words + i, s.word(__float_as_uint(weights[i])));
  }
  if (threadIdx.x == 0) store_words(s.header(r, c.rank), s.word(c.num_tokens), s.word(c.header));
  __threadfence_system(); // whoever carries them out reads them from memory
  __syncthreads();
  puts.put_piece(r, EPCY_PUT_HEADER);
  puts.put(r, words, (size_t)(num_lanes > 0 ? num_lanes : K) * 8, puts.flag(a.name[r], c.rank, EPCY_PUT_WEIGHTS));
  int ignored;
  if (threadIdx.x < 32 && puts.wait_header(r, &ignored)) puts.wait_piece(r, EPCY_PUT_WEIGHTS, EPCY_CUDA_COUNTS);
}

// Rows of a dispatch: each token's once for each far rank that has lanes of it.
EPCY_DEVICE void put_rows(const Puts &puts) {
  const epcy_low_latency_call &c = puts.s.c;
  for (int t = blockIdx.x; t < c.num_tokens; t += gridDim.x)
    for (unsigned left = load_early(c.handle.ranks + t) & puts.a.far; left; left &= left - 1) {
      const int to = __ffs(left) - 1;
      puts.put(to, puts.s.row(to, c.rank, t), puts.line_bytes(), puts.row_flag(puts.a.name[to], c.rank, t));
    }
}
// Sums of a combine, or rows, as the kernel before has left them: of each far rank's tokens.
EPCY_DEVICE void put_sums(const Puts &puts) {
  const LowLatency &s = puts.s;
  const epcy_low_latency_call &c = s.c;
  for (int turn = 1; turn < c.num_ranks; turn++) {
    const int to = s.after(turn), T = puts.is_far(to) ? load_early(c.handle.tokens + to) : 0;
    for (int t = blockIdx.x; t < T && t < c.max_tokens; t += gridDim.x) {
      Lanes lanes; // every warp finds the same
      lanes.load<AnySizes>(c, to, t);
      const bool by_source = c.header & EPCY_LOW_LATENCY_SOURCE;
      unsigned left = __ballot_sync(~0u, by_source ? lanes.brings(c) : lanes.is_here(c));
      if (!by_source) left = left ? 1 : 0;
      for (; left; left &= left - 1) {
        const uint32_t of = by_source ? t * c.num_topk + __ffs(left) - 1 : c.rank * c.max_tokens + t;
        puts.put(to, s.sum(to, of), puts.sum_bytes(), puts.sum_flag(puts.a.name[to], of));
      }
    }
  }
}
__global__ void __launch_bounds__(kThreads) put_sent(const __grid_constant__ epcy_put a) {
  const LowLatency s(a.call, a.kind, sent_of(a));
  const Puts puts = {a, s};
  if (__syncthreads_or(s.is_broken())) {
    if (blockIdx.x == 0 && threadIdx.x < 32) puts.tell_left();
    return;
  }
  const int R = a.call.num_ranks;
  for (int i = blockIdx.x; i < R * EPCY_NUM_PUT_PIECES; i += gridDim.x)
    if (puts.is_far(i % R)) puts.put_piece(i % R, i / R);
  if (puts.refuses()) return;
  if (a.kind == EPCY_LOW_LATENCY_DISPATCH) put_rows(puts);
  else put_sums(puts);
}

// Rows of a dispatch that come from a rank: each warp waits for those of 32 tokens at a time.
EPCY_DEVICE void await_rows(const Puts &puts, int from, int T) {
  const LowLatency &s = puts.s;
  if (!puts.wait_piece(from, EPCY_PUT_COUNTS, EPCY_CUDA_COUNTS)) return;
  if (!puts.wait_piece(from, EPCY_PUT_LANES, EPCY_CUDA_LINES)) return;
  for (int first = threadIdx.x & ~31; first < T; first += kThreads) {
    const int t = first + s.lane;
    bool comes = false;
    for (int k = 0; t < T && k < s.c.num_topk; k++)
      comes |= (uint32_t)load_words(s.lanes(s.c.rank, from, t) + k).x != kNowhere;
    if (!puts.wait(puts.row_flag(s.c.own, from, t < T ? t : 0), comes, EPCY_CUDA_LINES, from)) return;
  }
}
// Sums of this rank's tokens that come from a rank, or rows.
EPCY_DEVICE void await_sums(const Puts &puts, int from) {
  const LowLatency &s = puts.s;
  const epcy_low_latency_call &c = s.c;
  const int K = c.num_topk;
  const bool by_source = c.header & EPCY_LOW_LATENCY_SOURCE;
  const int num = by_source ? c.num_tokens * K : c.num_tokens;
  for (int first = threadIdx.x & ~31; first < num; first += kThreads) {
    const int i = first + s.lane, at = i < num ? i : 0;
    uint32_t of = 0;
    bool comes;
    if (by_source) { // a repeated lane's row is that of another one
      const uint32_t lane = load_early(c.handle.lanes + at);
      comes = lane != kNowhere && (int)(lane & 255) == from && (int)(lane >> 8) < K;
      if (comes) of = quotient(at, c.topk) * K + (lane >> 8);
    } else {
      comes = load_early(c.handle.ranks + at) >> from & 1, of = from * c.max_tokens + at;
    }
    if (!puts.wait(puts.sum_flag(c.own, of), comes && i < num, EPCY_CUDA_LINES, from)) return;
  }
}
// A block for a far rank.
__global__ void __launch_bounds__(kThreads) await_sent(const __grid_constant__ epcy_put a) {
  const LowLatency s(a.call, a.kind, sent_of(a));
  const Puts puts = {a, s};
  const int from = blockIdx.x;
  int T = 0;
  if (__syncthreads_or(s.is_broken()) || !puts.is_far(from) || !puts.wait_header(from, &T)) return;
  if (a.kind == EPCY_LOW_LATENCY_DISPATCH) await_rows(puts, from, T < a.call.max_tokens ? T : a.call.max_tokens);
  else await_sums(puts, from);
}

__global__ void __launch_bounds__(32) acknowledge_received(const __grid_constant__ epcy_put a) {
  const LowLatency s(a.call, a.kind, nullptr);
  const Puts puts = {a, s};
  const epcy_low_latency_call &c = a.call;
  if (__any_sync(~0u, s.is_broken())) {
    puts.tell_left();
    return;
  }
  if (s.lane == 0) put_fence(); // nothing of a later call overtakes what is under way of this one
  __syncwarp();
  const uint32_t received = s.received(s.look_for_held());
  if (!s.has_peer() || !puts.is_far(s.lane)) return;
  put_word((uint64_t *)(a.name[s.lane] + c.wire.acks) + (a.kind * c.num_ranks + c.rank), received, a.pe[s.lane]);
}

int num_blocks(const epcy_put &a) {
  const bool sends_own = a.kind == EPCY_LOW_LATENCY_DISPATCH || a.call.header & EPCY_HEADER_REFUSED;
  const int tokens = sends_own ? a.call.num_tokens : a.call.max_tokens; // of a combine the others' T
  return tokens < 4 ? 4 : tokens < kMostBlocks ? tokens : kMostBlocks;
}

} // namespace

// Before the first call, which may be inside a graph's capture, or behind a kernel that waits.
int epcy_put_load() {
  cudaFuncAttributes ignored;
  cudaError_t e = cudaSuccess;
  for (auto kernel : {exchange_weights, put_sent, await_sent, acknowledge_received})
    if (e == cudaSuccess) e = cudaFuncGetAttributes(&ignored, kernel);
  return e;
}

extern "C" int epcy_put_launch_weights(const epcy_put *a, void *stream) {
  return launch_apart(exchange_weights, a->call.num_ranks, kThreads, stream, *a);
}
extern "C" int epcy_put_launch_send(const epcy_put *a, void *stream) {
  return launch_apart(put_sent, num_blocks(*a), kThreads, stream, *a);
}
extern "C" int epcy_put_launch_await(const epcy_put *a, void *stream) {
  return launch_apart(await_sent, a->call.num_ranks, kThreads, stream, *a);
}
extern "C" int epcy_put_launch_acknowledge(const epcy_put *a, void *stream) {
  return launch_apart(acknowledge_received, 1, 32, stream, *a);
}
