// Low-latency dispatch: a token crosses a link once for each rank that has experts of it, and is copied to its experts'
// rows there.
//
// A block carries a part of a token's row: 64 lines, a thread for 16 bytes. It sends that, and receives the same part of
// the same token of every other rank; the first token's own copy stays in registers. Places need no exchange of their
// own: a sender counts how many of its earlier tokens go to an expert, a lane brings that number along, and the counts of
// all ranks, which the clerks send first, give the base.
#include "low_latency.cuh"
#include "low_latency_cast.cuh"
#include "low_latency_count.cuh"
#include "low_latency_receive.cuh"

namespace {

enum { kBytes = kFp32 + 1 }; // rows travel as they are; else the kind that is cast to FP8

struct Shared {
  uint4 payload[kCasters];
  float scale[kGroups];
  int flows[2][32]; // the clerk's: lanes to each rank, and from each
  unsigned bad;
};

// What a thread reads of a token before anything else.
template <int From, typename N> struct Input {
  Caster<From == kBytes ? kBf16 : From> raw;
  uint4 unit;
  Id id; // of lane `lane`
  float weight;

  EPCY_DEVICE void load(const epcy_low_latency_dispatch &a, int t, const Tour &tour, const Seat &seat, bool real) {
    const int lane = threadIdx.x & 31, K = N::topk(a.call);
    const char *row = a.x + (int64_t)t * a.x_stride_bytes;
    if constexpr (From == kBytes) {
      unit = make_uint4(0, 0, 0, 0);
      if (real && seat.has_data) unit = load_early((const uint4 *)(row + seat.offset));
    } else {
      const int at = tour.part * kCasters + threadIdx.x;
      raw.clear();
      if (real && threadIdx.x < kCasters && at * 16 < a.call.row_bytes) raw.load(row, at);
    }
    id.low = id.high = -1, weight = 1.0f;
    if (real && lane < K) {
      id.load(a, t * K + lane);
      if (a.topk_weights && threadIdx.x >> 5 == kScribe) weight = load_early(a.topk_weights + t * K + lane);
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

// This rank receives nothing: say so wherever a combine would look. Of a block all warps call it, or those whose wait has
// ended; what it overwrites was written before a barrier that came since.
__device__ __noinline__ void forget(const epcy_low_latency_dispatch &a, const Tour &tour) {
  const epcy_low_latency_handle &h = a.call.handle;
  const int lane = threadIdx.x & 31, K = a.call.num_topk;
#pragma unroll 1
  for (int t = tour.token; tour.part == 0 && t < a.call.num_tokens; t += tour.step) {
    if (lane == 0) h.ranks[t] = 0;
    if (lane < K) h.lanes[t * K + lane] = kNowhere;
  }
  if (blockIdx.x != 0) return; // the clerk:
  if ((int)threadIdx.x < a.call.num_ranks) h.tokens[threadIdx.x] = 0;
#pragma unroll 1
  for (int e = threadIdx.x; e < (int)a.call.num_local.by; e += kThreads) a.recv_count[e] = h.counts[e] = 0;
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

// All threads: send this block's tokens; the first one's own copy stays in *own if `Keeps`. False: gave up.
// `hist`: [E], and all 0.
template <int From, bool Keeps, typename N>
EPCY_DEVICE bool send(const LowLatency &s, const epcy_low_latency_dispatch &a, const Tour &tour, const Seat &seat,
                      Shared &shared, int *hist, Own *own) {
  const epcy_low_latency_call &c = a.call;
  const int lane = s.lane, warp = threadIdx.x >> 5, K = N::topk(c), E = c.num_experts, T = c.num_tokens;
  const bool is_clerk = s.is_clerk(), speaks = is_clerk && warp == kAcks;
  int t = tour.token;
  Input<From, N> in;
  in.load(a, t, tour, seat, t < T);
  Ids<N> ids;
  ids.load(a, 0, t < T ? t : is_clerk ? T : 0);
  uint64_t acks = 0;
  uint32_t broken = 0;
  if (warp == kAcks) acks = s.look_for_acks(), broken = load_local(c.broken);
  if (speaks) s.acknowledge(s.look_for_held());

  for (;;) {
    const bool first = t == tour.token, real = t < T, by_wire = !Keeps || !first;
    ids.count(a, real ? t : is_clerk ? T : 0, hist, is_clerk ? &shared.bad : nullptr);
    if constexpr (From != kBytes) {
      if (real && warp < kScribe) {
        uint4 out;
        float scale;
        in.raw.cast(c.header & EPCY_LOW_LATENCY_ROUND_SCALE, &out, &scale);
        shared.payload[threadIdx.x] = out;
        if (threadIdx.x % 8 == 0) shared.scale[threadIdx.x / 8] = scale;
      }
    }
    const int id = in.id.checked(a), owner = id < 0 ? 31 : quotient(id, c.num_local);
    const unsigned ranks = __reduce_or_sync(~0u, id < 0 ? 0u : 1u << owner);
    const int earlier = warp == kScribe ? first_lane<N>(c, id, lane) : 0;
    const bool fails = warp == kAcks && first && (broken || !s.wait_for_acks(acks));
    if (__syncthreads_or(fails)) return false;

    if (is_clerk) {
      if (speaks) s.announce(T, c.header);
#pragma unroll 1
      for (int e = threadIdx.x; e < E; e += kThreads) {
        const int r = quotient(e, c.num_local);
        store_word(s.counts(r, c.rank) + (e - r * (int)c.num_local.by), s.word(hist[e]));
        if (hist[e]) atomicAdd(&shared.flows[0][r], hist[e]);
      }
      __syncthreads();
      if ((int)threadIdx.x < c.num_ranks)
        add_to(&c.counters->tokens_to[lane], c.handle.flows[lane] = shared.flows[0][lane]);
      if (speaks && lane == 0) {
        c.handle.found->has_bad = shared.bad != ~0u;
        if (EPCY_RARELY(shared.bad != ~0u)) tell_bad(a, s.epoch, shared.bad);
      }
      return true;
    }
    if (warp == kScribe && real && lane < K) {
      const uint32_t place =
          id < 0 ? kNowhere : make_place(id - owner * (int)c.num_local.by, hist[id], earlier != lane);
      const uint64_t weight = s.word(__float_as_uint(in.weight));
      if (tour.part == 0) {
#pragma unroll 1
        for (int turn = by_wire ? 0 : 1; turn < N::ranks(c); turn++) {
          const int r = s.after(turn);
          store_words(s.lanes(r, c.rank, t) + lane, s.word(id >= 0 && owner == r ? place : kNowhere), weight);
        }
        c.handle.lanes[t * K + lane] = id < 0 ? kNowhere : make_lane(owner, earlier);
        c.handle.lane_weights[t * K + lane] = in.weight;
        if (lane == 0) {
          c.handle.ranks[t] = ranks;
          add_to(&c.counters->bytes_moved,
                 (uint64_t)__popc(ranks & ~(1u << c.rank)) * (c.row_bytes + a.num_scales * 4));
        }
      }
    }
    uint4 v;
    if constexpr (From == kBytes) v = in.unit;
    else v = shared.payload[(threadIdx.x >> 3) * 7 + (seat.is_tail ? 0 : threadIdx.x & 7)];
    if (seat.is_tail) v = tail(s.epoch, From == kBytes ? 0 : line_scale(a, shared));
    if (real && seat.line_is_real)
#pragma unroll 1
      for (unsigned left = by_wire ? ranks : ranks & ~(1u << c.rank); left; left &= left - 1)
        store_unit(s.row(__ffs(left) - 1, c.rank, t) + seat.at, v);
    if (Keeps && first) { // while that is on its way
      const bool here = id >= 0 && owner == c.rank, repeated = first_lane<N>(c, id, lane) != lane;
      const int local = id - owner * (int)c.num_local.by;
      own->unit = v;
      own->places.set<N>(s, here ? make_place(local, hist[id], repeated) : kNowhere, in.weight);
    }
    const int before = t;
    t += tour.step;
    if (!EPCY_RARELY(t < T)) return true;
    in.load(a, t, tour, seat, true);
    ids.load(a, before, t);
    __syncthreads(); // everybody has read what the next turn writes
  }
}

template <int From, int Phases, typename N>
__global__ void __launch_bounds__(kThreads, 2) dispatch_tokens(const __grid_constant__ epcy_low_latency_dispatch a) {
  int *const dynamic = (int *)dynamic_shared(); // tokens of this rank for each expert [E]; of each rank for mine [R][L]
  __shared__ Shared shared;
  constexpr bool sends = Phases & EPCY_LOW_LATENCY_SEND, receives = Phases & EPCY_LOW_LATENCY_RECEIVE;
  constexpr bool keeps = Phases == kBoth; // else the own tokens take the wire too, so that x may change in between
  const epcy_low_latency_call &c = a.call;
  // What needs nobody's data comes first: the kernel before this one may still run.
  const Tour tour(c);
  const Seat seat(c, tour.part);
#pragma unroll 1
  for (int i = threadIdx.x; sends && i < c.num_experts; i += kThreads) dynamic[i] = 0;
  if (threadIdx.x == 0) shared.bad = ~0u;
  if (threadIdx.x < 64) (&shared.flows[0][0])[threadIdx.x] = 0;
  __syncthreads();
  const LowLatency s(c, EPCY_LOW_LATENCY_DISPATCH, sends ? nullptr : c.sent);
  Own own;
  int verdict = EPCY_VERDICT_OK;
  if constexpr (sends) {
    if (!send<From, keeps, N>(s, a, tour, seat, shared, dynamic, &own)) verdict = EPCY_VERDICT_BROKEN;
    if (verdict != EPCY_VERDICT_OK && s.is_clerk() && threadIdx.x == 0) c.handle.found->has_bad = 0;
    stamp(EPCY_SPAN_SEND, s.notes());
  } else if (__syncthreads_or(s.is_broken())) {
    verdict = EPCY_VERDICT_BROKEN;
  }
  if (receives && verdict == EPCY_VERDICT_OK)
    verdict = receive<N>(s, a, tour, seat, dynamic + c.num_experts, keeps, own, shared.flows[1]);
  if (s.is_clerk() && threadIdx.x == 0 && (receives || verdict != EPCY_VERDICT_OK)) {
    c.handle.found->verdict = verdict;
    if (EPCY_RARELY(verdict != EPCY_VERDICT_OK)) report(c, s.kind, s.epoch, verdict);
  }
  if (EPCY_RARELY(verdict != EPCY_VERDICT_OK)) forget(a, tour);
  s.leave(Phases, c.sent);
}

size_t shared_bytes(const epcy_shape &shape) { return (size_t)shape.num_experts * 2 * 4; }

template <int Phases, typename N> auto kernel_of(bool fp8, int dtype) {
  return !fp8             ? dispatch_tokens<kBytes, Phases, N>
         : dtype == kBf16 ? dispatch_tokens<kBf16, Phases, N>
         : dtype == kFp16 ? dispatch_tokens<kFp16, Phases, N>
                          : dispatch_tokens<kFp32, Phases, N>;
}
auto kernel_of(bool fp8, int dtype, int phases, bool usual) {
  return phases == kBoth ? usual ? kernel_of<kBoth, UsualSizes>(fp8, dtype) : kernel_of<kBoth, AnySizes>(fp8, dtype)
         : phases == EPCY_LOW_LATENCY_SEND
             ? kernel_of<EPCY_LOW_LATENCY_SEND, AnySizes>(fp8, dtype)
             : dispatch_tokens<kBytes, EPCY_LOW_LATENCY_RECEIVE, AnySizes>; // lines are lines
}

} // namespace

extern "C" int epcy_cuda_low_latency_dispatch_blocks(const epcy_shape *shape, int *blocks) {
  *blocks = EPCY_LOW_LATENCY_MAX_BLOCKS;
  int error = 0;
  for (int i = 0; i < 16 && !error; i++)
    error = resident_blocks(kernel_of(i % 4 != 3, i % 4, i < 12 ? 1 + i / 4 : kBoth, i < 12), kThreads,
                            shared_bytes(*shape), blocks);
  return error;
}

extern "C" int epcy_cuda_launch_low_latency_dispatch(const epcy_low_latency_dispatch *a, void *stream) {
  const epcy_low_latency_call &c = a->call;
  const auto kernel = kernel_of(c.header & EPCY_LOW_LATENCY_FP8, c.dtype, c.phases, is_usual(c));
  return launch_together<true>(kernel, low_latency_grid(c), kThreads, shared_bytes(c.peers.shape), stream, *a);
}
