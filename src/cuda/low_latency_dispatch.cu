// Low-latency dispatch: a token crosses a link once for each rank that has experts of it, and is copied to its experts'
// rows there.
//
// A work item is a part of a token's row: 64 lines, a thread for 16 bytes. Its block sends it, and receives the same item
// of every other rank; the first item's own copy stays in registers. Places need no exchange of their own: a sender
// counts which of its tokens go to an expert, a lane brings its ordinal among them, and the counts of all ranks give
// the base.
#include "low_latency.cuh"
#include "low_latency_cast.cuh"
#include "low_latency_count.cuh"
#include "low_latency_receive.cuh"

namespace {

enum { kBytes = kFp32 + 1 }; // rows travel as they are; else the kind that is cast to FP8

struct Shared {
  uint4 payload[kCasters];
  float scale[kGroups];
  int ordinal[2][32]; // by turn: of each lane of this block's token
  unsigned bad;
};

// What a thread reads of an item before anything else.
template <int From> struct Input {
  Caster<From == kBytes ? kBf16 : From> raw;
  uint4 unit;
  int id; // of lane `lane`; -1: unused
  float weight;

  EPCY_DEVICE void load(const epcy_low_latency_dispatch &a, int t, int part, bool real) {
    const int lane = threadIdx.x & 31, K = (int)a.call.peers.shape.num_topk;
    const char *row = a.x + (int64_t)t * a.x_stride_bytes;
    if constexpr (From == kBytes) {
      const Seat seat(a.call, part);
      unit = real && seat.has_data ? __ldg((const uint4 *)(row + seat.offset)) : make_uint4(0, 0, 0, 0);
    } else {
      const int at = part * kCasters + threadIdx.x;
      if (real && threadIdx.x < kCasters && at * 16 < a.call.row_bytes) raw.load(row, at);
      else raw.clear();
    }
    id = -1, weight = 1.0f;
    if (real && lane < K) {
      id = checked_id(raw_id(a, (int64_t)t * K + lane), (int)a.call.peers.shape.num_experts);
      if (a.topk_weights) weight = __ldg(a.topk_weights + (int64_t)t * K + lane);
    }
  }
};

EPCY_DEVICE uint32_t line_scale(const epcy_low_latency_dispatch &a, const Shared &shared) {
  const int line = threadIdx.x >> 3;
  if (line >= a.part_scales) return 0;
  if (a.part_scales == kGroups) return __float_as_uint(shared.scale[line]);
  uint32_t four = 0; // ue8m0: exponents, low first
  for (int i = 0; i < 4; i++) four |= (__float_as_uint(shared.scale[4 * line + i]) >> 23) << (8 * i);
  return four;
}

// This rank receives nothing: say so wherever a combine would look. Written by the threads that wrote it before.
EPCY_DEVICE void forget(const epcy_low_latency_dispatch &a) {
  const int G = gridDim.x, L = (int)epcy_num_local_experts(&a.call.peers.shape);
  if (blockIdx.x == 0 && (int)threadIdx.x < (int)a.call.peers.shape.num_ranks) a.call.handle.tokens[threadIdx.x] = 0;
  for (int i = blockIdx.x; threadIdx.x == 0 && i < a.call.num_tokens * a.call.num_parts; i += G)
    if (i % a.call.num_parts == 0) a.call.handle.ranks[i / a.call.num_parts] = 0;
  for (int e = blockIdx.x + threadIdx.x * G; e < L; e += kThreads * G) a.recv_count[e] = a.call.handle.counts[e] = 0;
}

// One thread: keep the first bad id for the handle's check(), and for the Buffer's if none is kept there.
EPCY_DEVICE void tell_bad(const LowLatency &s, const epcy_low_latency_dispatch &a, unsigned first) {
  const int64_t at = first, K = a.call.peers.shape.num_topk;
  epcy_low_latency_found *found = a.call.handle.found;
  found->has_bad = first != ~0u;
  if (first == ~0u) return;
  found->bad_token = at / K, found->bad_lane = at % K, found->bad_value = raw_id(a, at);
  epcy_cuda_bad *bad = &s.p.report->bad[0];
  if (bad->epoch) return;
  bad->token = at / K, bad->lane = at % K, bad->value = found->bad_value;
  __threadfence_system();
  *(volatile uint32_t *)&bad->epoch = s.epoch;
}

template <int From>
__global__ void __launch_bounds__(kThreads, 2) dispatch_tokens(const __grid_constant__ epcy_low_latency_dispatch a) {
  extern __shared__ int dynamic[]; // counts of all ranks for my experts [E], my counts for this block's experts
  __shared__ Shared shared;
  const epcy_low_latency_call &c = a.call;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, b = blockIdx.x, G = gridDim.x;
  const int K = (int)c.peers.shape.num_topk, E = (int)c.peers.shape.num_experts, R = (int)c.peers.shape.num_ranks;
  const int L = E / R, P = c.num_parts, items = c.num_tokens * P;
  const bool sends = c.phases & EPCY_LOW_LATENCY_SEND, receives = c.phases & EPCY_LOW_LATENCY_RECEIVE;
  const bool keeps = sends && receives; // else the own tokens take the wire too, so that x may change in between
  int *counts = dynamic, *hist = dynamic + E;

  Input<From> in;
  if (sends) in.load(a, b / P, b % P, b < items);
  const LowLatency s(c.peers, c.wire, EPCY_LOW_LATENCY_DISPATCH, sends ? nullptr : c.sent);
  const uint64_t acks = sends ? s.look_for_acks() : 0;
  const int each = (E + G - 1) / G, first = b * each < E ? b * each : E, mine = E - first < each ? E - first : each;
  for (int i = threadIdx.x; i < each; i += kThreads) hist[i] = 0;
  if (threadIdx.x < 64) shared.ordinal[threadIdx.x >> 5][lane] = 0;
  if (threadIdx.x == 64) shared.bad = ~0u;
  if (__syncthreads_or(s.broken())) {
    if (b == 0 && threadIdx.x == 0) c.handle.found->verdict = EPCY_VERDICT_BROKEN, c.handle.found->has_bad = 0;
    return forget(a);
  }

  uint4 own = make_uint4(0, 0, 0, 0);
  uint32_t own_place = kNowhere;
  const float own_weight = in.weight;
  bool fails = false;
  if (sends) {
    if (b == 0 && warp == 0) s.acknowledge();

    for (int item = b, turn = 0; turn == 0 || item < items; item += G, turn++) {
      const bool real = item < items;
      const int t = item / P, part = item % P;
      if (turn) in.load(a, t, part, true);
      const unsigned same = __match_any_sync(~0u, in.id);
      const bool repeated = same & ((1u << lane) - 1);
      const int owner = in.id < 0 ? -1 : in.id / L;
      const unsigned ranks = __reduce_or_sync(~0u, in.id < 0 ? 0u : 1u << owner);
      const Counters to = {shared.ordinal[turn & 1],         turn ? nullptr : hist, real ? t : 0, first, mine,
                           turn || b ? nullptr : &shared.bad};
      if (K <= 8) count_tokens<8>(a, in.id, to);
      else count_tokens<0>(a, in.id, to);
      if constexpr (From != kBytes) {
        uint4 out;
        float scale;
        in.raw.cast(c.header & EPCY_LOW_LATENCY_ROUND_SCALE, &out, &scale);
        if (threadIdx.x < kCasters) {
          shared.payload[threadIdx.x] = out;
          if (threadIdx.x % 8 == 0) shared.scale[threadIdx.x / 8] = scale;
        }
      }
      if (turn == 0 && !s.wait_for_acks(acks)) fails = true;
      fails = __syncthreads_or(fails);
      if (fails) break;

      const bool by_wire = !keeps || turn;
      const uint32_t place =
          in.id < 0 ? kNowhere : make_place(in.id - owner * L, shared.ordinal[turn & 1][lane], repeated);
      const Seat seat(c, part);
      uint4 v = in.unit;
      if constexpr (From != kBytes)
        if (!seat.is_tail) v = shared.payload[(threadIdx.x >> 3) * 7 + (threadIdx.x & 7)];
      if (seat.is_tail) v = tail(s.epoch, From == kBytes ? 0 : line_scale(a, shared));
      if (real) {
        if (seat.line_is_real)
          for (unsigned left = ranks; left; left &= left - 1) {
            const int r = __ffs(left) - 1;
            if (r != s.me || by_wire) store_unit(s.row(r, s.me, t) + seat.at, v);
          }
        for (int r = warp; part == 0 && r < R; r += kWarps)
          if (lane < K && (r != s.me || by_wire || P > 1)) // another part of the token may come by the wire
            store_words(s.lanes(r, s.me, t) + lane, s.word(owner == r ? place : kNowhere),
                        s.word(__float_as_uint(in.weight)));
        if (part == 0 && warp == 0) {
          if (lane < K) {
            c.handle.lanes[(int64_t)t * K + lane] = in.id < 0 ? kNowhere : make_lane(owner, __ffs(same) - 1);
            c.handle.lane_weights[(int64_t)t * K + lane] = in.weight;
          }
          if (lane == 0) c.handle.ranks[t] = ranks;
        }
      }
      if (turn == 0) {
        for (int i = threadIdx.x; i < mine; i += kThreads) {
          const int r = (first + i) / L;
          store_word(s.counts(r, s.me) + (first + i - r * L), s.word(hist[i]));
        }
        if (b == 0 && warp == 0) s.announce(c.num_tokens, c.header);
        if (b == 0 && threadIdx.x == 0) tell_bad(s, a, shared.bad);
        if (real) own = v, own_place = owner == s.me ? place : kNowhere;
      }
      if (item + G < items) {
        __syncthreads();
        if (warp == 0) shared.ordinal[turn & 1][lane] = 0;
      }
    }
  }

  if (receives && !fails) {
    int tokens;
    const int q = threadIdx.x;
    bool ok = true;
    uint64_t count = q < E ? load_word(s.counts(s.me, 0) + q) : 0;
    int verdict = s.gather(c.header, c.num_tokens, &tokens);
    for (int i = q; i < E; i += kThreads) {
      if (i != q) count = load_word(s.counts(s.me, 0) + i);
      counts[i] = (int)s.wait(s.counts(s.me, 0) + i, count, EPCY_CUDA_COUNTS, i / L, &ok);
    }
    fails = __syncthreads_or(!ok || verdict == EPCY_VERDICT_BROKEN);
    if (fails) verdict = EPCY_VERDICT_BROKEN;
    if (b == 0 && threadIdx.x == 0) {
      c.handle.found->verdict = verdict;
      s.report(verdict, c.header);
    }
    fails |= verdict != EPCY_VERDICT_OK;
    if (!fails) {
      if (keeps && b < items) {
        const Rows rows(a, counts, s.me, b / P, own_place, own_weight, b % P == 0 && warp == 0);
        rows.fill(a, Seat(c, b % P), b % P, own);
      }
      for (int e = b + q * G; e < L; e += kThreads * G) {
        int sum = 0;
        for (int r = 0; r < R; r++) sum += counts[r * L + e];
        a.recv_count[e] = c.handle.counts[e] = sum;
        if (a.stats && a.stats_is_int64) ((int64_t *)a.stats)[e] += sum;
        else if (a.stats) ((int32_t *)a.stats)[e] += sum;
      }
      if (b == 0 && warp == 0 && lane < R) c.handle.tokens[lane] = tokens;
      fails = !receive(s, a, counts, tokens, keeps);
    }
  }
  if (fails) forget(a); // a wait that expired breaks the Buffer: then the verdict does not matter
  s.leave(c.phases, c.sent);
}

size_t shared_bytes(const epcy_shape &shape, int grid) {
  return (size_t)(shape.num_experts + (shape.num_experts + grid - 1) / grid) * 4;
}

} // namespace

extern "C" int epcy_cuda_low_latency_dispatch_blocks(const epcy_shape *shape, int *blocks) {
  const size_t most = shared_bytes(*shape, 1);
  *blocks = EPCY_LOW_LATENCY_MAX_BLOCKS;
  int error = resident_blocks(dispatch_tokens<kBf16>, most, blocks);
  if (!error) error = resident_blocks(dispatch_tokens<kFp16>, most, blocks);
  if (!error) error = resident_blocks(dispatch_tokens<kFp32>, most, blocks);
  return error ? error : resident_blocks(dispatch_tokens<kBytes>, most, blocks);
}

extern "C" int epcy_cuda_launch_low_latency_dispatch(const epcy_low_latency_dispatch *a, void *stream) {
  const int grid = low_latency_grid(a->call);
  const size_t bytes = shared_bytes(a->call.peers.shape, grid);
  if (!(a->call.header & EPCY_LOW_LATENCY_FP8))
    return launch_together(dispatch_tokens<kBytes>, grid, kThreads, bytes, stream, *a);
  switch (a->call.dtype) {
    case kBf16: return launch_together(dispatch_tokens<kBf16>, grid, kThreads, bytes, stream, *a);
    case kFp16: return launch_together(dispatch_tokens<kFp16>, grid, kThreads, bytes, stream, *a);
    default: return launch_together(dispatch_tokens<kFp32>, grid, kThreads, bytes, stream, *a);
  }
}
