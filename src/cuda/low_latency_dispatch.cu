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
constexpr int kBoth = EPCY_LOW_LATENCY_SEND | EPCY_LOW_LATENCY_RECEIVE;
constexpr int kClerk = kWarps - 1; // the warp of a block that sees to acknowledgements and the header: it casts nothing

struct Shared {
  uint4 payload[kCasters];
  float scale[kGroups];
  unsigned bad;
};

// What a thread reads of an item before anything else.
template <int From> struct Input {
  Caster<From == kBytes ? kBf16 : From> raw;
  uint4 unit;
  Id id; // of lane `lane`
  float weight;

  EPCY_DEVICE void load(const epcy_low_latency_dispatch &a, int t, int part, bool real) {
    const int lane = threadIdx.x & 31, K = a.call.num_topk;
    const char *row = a.x + (int64_t)t * a.x_stride_bytes;
    if constexpr (From == kBytes) {
      const Seat seat(a.call, part);
      unit = make_uint4(0, 0, 0, 0);
      if (real && seat.has_data) unit = load_early((const uint4 *)(row + seat.offset));
    } else {
      const int at = part * kCasters + threadIdx.x;
      raw.clear();
      if (real && threadIdx.x < kCasters && at * 16 < a.call.row_bytes) raw.load(row, at);
    }
    id.low = id.high = -1, weight = 1.0f;
    if (real && lane < K) {
      id.load(a, t * K + lane);
      if (a.topk_weights) weight = load_early(a.topk_weights + t * K + lane);
    }
  }
};

EPCY_DEVICE uint32_t line_scale(const epcy_low_latency_dispatch &a, const Shared &shared) {
  const int line = threadIdx.x >> 3;
  if (line >= a.part_scales) return 0;
  if (a.part_scales == kGroups) return __float_as_uint(shared.scale[line]);
  uint32_t four = 0; // ue8m0: exponents, low first
#pragma unroll
  for (int i = 0; i < 4; i++) four |= (__float_as_uint(shared.scale[4 * line + i]) >> 23) << (8 * i);
  return four;
}

// This rank receives nothing: say so wherever a combine would look. Written by the blocks that wrote it before.
__device__ __noinline__ void forget(const epcy_low_latency_dispatch &a) {
  const int G = gridDim.x, L = (int)a.call.num_local.by, P = (int)a.call.num_parts.by;
  __syncthreads();
  if (blockIdx.x == 0 && (int)threadIdx.x < a.call.num_ranks) a.call.handle.tokens[threadIdx.x] = 0;
#pragma unroll 1
  for (int i = blockIdx.x; threadIdx.x == 0 && i < a.call.num_tokens * P; i += G)
    if (i % P == 0) a.call.handle.ranks[i / P] = 0;
#pragma unroll 1
  for (int e = blockIdx.x + threadIdx.x * G; e < L; e += kThreads * G) a.recv_count[e] = a.call.handle.counts[e] = 0;
}

// One thread: keep the first bad id for the handle's check(), and for the Buffer's if none is kept there.
__device__ __noinline__ void tell_bad(const epcy_low_latency_dispatch &a, uint32_t epoch, unsigned first) {
  const int64_t at = first, K = a.call.num_topk;
  epcy_low_latency_found *found = a.call.handle.found;
  found->bad_token = at / K, found->bad_lane = at % K;
  found->bad_value = a.is_int64 ? ((const int64_t *)a.topk_idx)[first] : ((const int32_t *)a.topk_idx)[first];
  epcy_cuda_bad *bad = &a.call.peers.report->bad[0];
  if (bad->epoch) return;
  bad->token = at / K, bad->lane = at % K, bad->value = found->bad_value;
  __threadfence_system();
  *(volatile uint32_t *)&bad->epoch = epoch;
}

// All threads: send this block's items; the first one's own copy goes to *own if `Keeps`. False: gave up. `hist`: [2][E].
template <int From, bool Keeps>
EPCY_DEVICE bool send(const LowLatency &s, const epcy_low_latency_dispatch &a, Shared &shared, int *hist,
                      Arrival *own) {
  const epcy_low_latency_call &c = a.call;
  const int lane = s.lane, warp = threadIdx.x >> 5, b = blockIdx.x, G = gridDim.x;
  const int K = c.num_topk, E = c.num_experts, P = (int)c.num_parts.by, T = c.num_tokens, items = T * P;
  const bool clerk = warp == kClerk, head = clerk && s.is_head();
  int item = b, t = quotient(item, c.num_parts), part = item - t * P;
  Input<From> in;
  in.load(a, t, part, item < items);
  Ids ids;
  ids.load(a, 0, T);
  uint64_t acks = 0;
  uint2 held = make_uint2(0, 0);
  uint32_t broken = 0;
  if (clerk) acks = s.look_for_acks(), broken = load_local(c.broken);
  if (head) held = s.look_for_held();
#pragma unroll 1
  for (int i = threadIdx.x; i < 2 * E; i += kThreads) hist[i] = 0;
  if (threadIdx.x == 0) shared.bad = ~0u;
  __syncthreads();
  if (head) s.acknowledge(held);

  for (int end = T, mid = t;; end = mid = t) {
    const bool first = item == b, real = item < items;
    ids.count(a, end, mid, hist, first && s.is_head() ? &shared.bad : nullptr);
    if constexpr (From != kBytes) {
      uint4 out;
      float scale;
      in.raw.cast(c.header & EPCY_LOW_LATENCY_ROUND_SCALE, &out, &scale);
      if (threadIdx.x < kCasters) {
        shared.payload[threadIdx.x] = out;
        if (threadIdx.x % 8 == 0) shared.scale[threadIdx.x / 8] = scale;
      }
    }
    const int id = in.id.checked(a), owner = id < 0 ? -1 : quotient(id, c.num_local);
    const unsigned same = __match_any_sync(~0u, id), ranks = __reduce_or_sync(~0u, id < 0 ? 0u : 1u << owner);
    const bool fails = clerk && first && (broken || !s.wait_for_acks(acks));
    if (__syncthreads_or(fails)) return false;

    const bool by_wire = !Keeps || !first;
    const Seat seat(c, part);
    uint4 v;
    if constexpr (From == kBytes) v = in.unit;
    else v = shared.payload[(threadIdx.x >> 3) * 7 + (seat.is_tail ? 0 : threadIdx.x & 7)];
    if (seat.is_tail) v = tail(s.epoch, From == kBytes ? 0 : line_scale(a, shared));
    if (real && seat.line_is_real)
#pragma unroll 1
      for (unsigned left = by_wire ? ranks : ranks & ~(1u << c.rank); left; left &= left - 1)
        store_unit(s.row(__ffs(left) - 1, c.rank, t) + seat.at, v);

    const uint32_t place =
        id < 0 ? kNowhere : make_place(id - owner * (int)c.num_local.by, hist[id], same & ((1u << lane) - 1));
    if (real && part == 0 && lane < K) {
#pragma unroll 1
      for (int r = warp; r < c.num_ranks; r += kWarps)
        if (r != c.rank || by_wire || P > 1) // another part of the token may come by the wire
          store_words(s.lanes(r, c.rank, t) + lane, s.word(owner == r ? place : kNowhere),
                      s.word(__float_as_uint(in.weight)));
    }
    if (first) {
#pragma unroll 1
      for (int e = b + threadIdx.x * G; e < E; e += kThreads * G) {
        const int r = quotient(e, c.num_local);
        store_word(s.counts(r, c.rank) + (e - r * (int)c.num_local.by), s.word(hist[e] + hist[E + e]));
      }
      if (head) s.announce(T, c.header);
      if (head && lane == 0) {
        c.handle.found->has_bad = shared.bad != ~0u;
        if (EPCY_RARELY(shared.bad != ~0u)) tell_bad(a, s.epoch, shared.bad);
      }
      own->item = b, own->source = c.rank, own->unit = v;
      own->words = make_ulonglong2(s.word(owner == c.rank ? place : kNowhere), s.word(__float_as_uint(in.weight)));
    }
    if (real && part == 0 && warp == kClerk) {
      if (lane < K) {
        c.handle.lanes[t * K + lane] = id < 0 ? kNowhere : make_lane(owner, __ffs(same) - 1);
        c.handle.lane_weights[t * K + lane] = in.weight;
      }
      if (lane == 0) c.handle.ranks[t] = ranks;
    }
    item += G;
    if (!EPCY_RARELY(item < items)) return true;
    const int before = t;
    t = quotient(item, c.num_parts), part = item - t * P;
    in.load(a, t, part, true);
    ids.load(a, before, t);
    __syncthreads(); // everybody has read what the next turn writes
  }
}

template <int From, int Phases>
__global__ void __launch_bounds__(kThreads, 2) dispatch_tokens(const __grid_constant__ epcy_low_latency_dispatch a) {
  int *const dynamic =
      (int *)dynamic_shared(); // tokens of this rank for each expert [2][E]; of each rank for mine [R][L]
  __shared__ Shared shared;
  constexpr bool sends = Phases & EPCY_LOW_LATENCY_SEND, receives = Phases & EPCY_LOW_LATENCY_RECEIVE;
  constexpr bool keeps = Phases == kBoth; // else the own tokens take the wire too, so that x may change in between
  const epcy_low_latency_call &c = a.call;
  const LowLatency s(c, EPCY_LOW_LATENCY_DISPATCH, sends ? nullptr : c.sent);
  Arrival own = {};
  bool fails;
  if constexpr (sends) {
    fails = !send<From, keeps>(s, a, shared, dynamic, &own);
    if (fails && s.is_head() && threadIdx.x == 0) c.handle.found->has_bad = 0;
  } else {
    fails = __syncthreads_or(s.is_broken());
  }
  if (fails && blockIdx.x == 0 && threadIdx.x == 0) c.handle.found->verdict = EPCY_VERDICT_BROKEN;
  if (receives && !fails) {
    const bool kept = keeps && (int)blockIdx.x < c.num_tokens * (int)c.num_parts.by;
    const int verdict = receive(s, a, dynamic + 2 * c.num_experts, own, kept, keeps);
    if (blockIdx.x == 0 && threadIdx.x == 0 && verdict != EPCY_VERDICT_OK) report(c, s.kind, s.epoch, verdict);
    fails = verdict != EPCY_VERDICT_OK;
  }
  if (EPCY_RARELY(fails)) forget(a);
  s.leave(Phases, c.sent);
}

size_t shared_bytes(const epcy_shape &shape) { return (size_t)shape.num_experts * 3 * 4; }

template <int Phases> auto kernel_of(bool fp8, int dtype) {
  return !fp8             ? dispatch_tokens<kBytes, Phases>
         : dtype == kBf16 ? dispatch_tokens<kBf16, Phases>
         : dtype == kFp16 ? dispatch_tokens<kFp16, Phases>
                          : dispatch_tokens<kFp32, Phases>;
}
auto kernel_of(bool fp8, int dtype, int phases) {
  return phases == kBoth                   ? kernel_of<kBoth>(fp8, dtype)
         : phases == EPCY_LOW_LATENCY_SEND ? kernel_of<EPCY_LOW_LATENCY_SEND>(fp8, dtype)
                                           : dispatch_tokens<kBytes, EPCY_LOW_LATENCY_RECEIVE>; // any: lines are lines
}

} // namespace

extern "C" int epcy_cuda_low_latency_dispatch_blocks(const epcy_shape *shape, int *blocks) {
  *blocks = EPCY_LOW_LATENCY_MAX_BLOCKS;
  int error = 0;
  for (int i = 0; i < 12 && !error; i++)
    error = resident_blocks(kernel_of(i % 4 != 3, i % 4, 1 + i / 4), shared_bytes(*shape), blocks);
  return error;
}

extern "C" int epcy_cuda_launch_low_latency_dispatch(const epcy_low_latency_dispatch *a, void *stream) {
  const auto kernel = kernel_of(a->call.header & EPCY_LOW_LATENCY_FP8, a->call.dtype, a->call.phases);
  return launch_together(kernel, low_latency_grid(a->call), kThreads, shared_bytes(a->call.peers.shape), stream, *a);
}
