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
  uint32_t missing; // ranks that take no part: here, since in registers it would stay for the whole call
  bool gives_up;    // what one warp finds before anything is sent: this call comes to nothing
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

// Not the ordinary end: this rank receives nothing, or nothing of `missing` ranks. Say so wherever a combine would look. Of a
// block all warps call it, or those whose wait has ended; what it overwrites was written before a barrier that came since.
__device__ __noinline__ void mend(const epcy_low_latency_dispatch &a, uint32_t epoch, int verdict, uint32_t missing) {
  const Tour tour(a.call); // as a parameter it would lie in memory
  const epcy_low_latency_handle &h = a.call.handle;
  const int lane = threadIdx.x & 31, K = a.call.num_topk;
  const bool fails = verdict != EPCY_VERDICT_OK;
#pragma unroll 1
  for (int t = tour.token; tour.part == 0 && t < a.call.num_tokens && (fails || threadIdx.x >> 5 == kScribe);
       t += tour.step) {
    if (lane == 0) h.ranks[t] = fails ? 0 : h.ranks[t] & ~missing;
    if (lane >= K) continue;
    const uint32_t word = h.lanes[t * K + lane];
    if (fails) h.lanes[t * K + lane] = kNowhere;
    else if (word != kNowhere && !(word & kNotSent) && missing >> (word & 31) & 1) h.lanes[t * K + lane] = word | kLost;
  }
  if (blockIdx.x != 0) return; // the clerk:
  if (threadIdx.x == 0) {
    if (fails) report(a.call, EPCY_LOW_LATENCY_DISPATCH, epoch, verdict);
    h.found->left_by = fails ? 0 : report_left(a.call, epoch, missing);
  }
  if (!fails) return;
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

// All threads of the clerk: count the lanes that go to ranks that are masked, and so nowhere.
__device__ __noinline__ void count_not_sent(const epcy_low_latency_dispatch &a, uint32_t missing) {
  __shared__ int lanes[32];
  const int i = threadIdx.x;
  if (i < 32) lanes[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (int at = i; at < a.call.num_tokens * a.call.num_topk; at += kThreads) {
    Id id;
    id.load(a, at);
    const int checked = id.checked(a), owner = checked < 0 ? 0 : quotient(checked, a.call.num_local);
    if (checked >= 0 && missing >> owner & 1) atomicAdd(lanes + owner, 1);
  }
  __syncthreads();
  if (i >= a.call.num_ranks) return;
  a.call.handle.dropped[i] = lanes[i];
  if (lanes[i]) add_to(&a.call.counters->lanes_lost[0][i], lanes[i]);
}

// All threads: send this block's tokens; the first one's own copy stays in *own if `Keeps`. False: gave up.
// `hist`: [E], and all 0.
template <int From, bool Keeps, typename N>
EPCY_DEVICE bool send(LowLatency &s, const epcy_low_latency_dispatch &a, const Tour &tour, const Seat &seat,
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
  uint2 state = make_uint2(0, 0); // broken, masked
  if (warp == kAcks) acks = s.look_for_acks(), state = load_local_pair(c.broken);
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
    unsigned ranks = __reduce_or_sync(~0u, id < 0 ? 0u : 1u << owner);
    const int earlier = warp == kScribe ? first_lane<N>(c, id, lane) : 0;
    bool is_special = false;
    if (warp == kAcks && first) {
      const bool follows = N::kRanks == 0 && c.peers.goes_on && !is_clerk; // what the clerk finds
      s.peers &= ~state.y;
      const bool gives_up = state.x || !(follows ? s.wait_for_go(s.kToSend) : s.wait_for_acks(acks));
      if (N::kRanks == 0 && c.peers.goes_on && is_clerk) s.give_go(s.kToSend);
      is_special = gives_up || s.missing();
      if (EPCY_RARELY(is_special) && lane == 0) shared.missing = s.missing(), shared.gives_up = gives_up;
    }
    if (EPCY_RARELY(__syncthreads_or(is_special))) {
      if (shared.gives_up) return false;
      s.peers &= ~shared.missing;
    }
    ranks &= s.peers | 1u << c.rank;

    if (is_clerk) {
      if (speaks) s.announce(T, c.header);
#pragma unroll 1
      for (int e = threadIdx.x; e < E; e += kThreads) {
        const int r = quotient(e, c.num_local);
        if (EPCY_RARELY(!s.takes_part(r))) continue;
        store_word(s.counts(r, c.rank) + (e - r * (int)c.num_local.by), s.word(hist[e]));
        if (hist[e]) atomicAdd(&shared.flows[0][r], hist[e]);
      }
      __syncthreads();
      if ((int)threadIdx.x < c.num_ranks)
        add_to(&c.counters->tokens_to[lane], c.handle.flows[lane] = shared.flows[0][lane]);
      if (speaks && lane == 0) {
        c.handle.found->has_bad = shared.bad != ~0u, c.handle.found->not_sent_to = s.missing();
        if (EPCY_RARELY(shared.bad != ~0u)) tell_bad(a, s.epoch, shared.bad);
      }
      if (EPCY_RARELY(s.missing())) count_not_sent(a, s.missing());
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
          if (EPCY_RARELY(!s.takes_part(r))) continue;
          store_words(s.lanes(r, c.rank, t) + lane, s.word(id >= 0 && owner == r ? place : kNowhere), weight);
        }
        c.handle.lanes[t * K + lane] =
            id < 0 ? kNowhere : make_lane(owner, earlier) | (s.takes_part(owner) ? 0 : kNotSent);
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
  if (threadIdx.x == 0) shared.bad = ~0u, shared.missing = 0;
  if (threadIdx.x < 64) (&shared.flows[0][0])[threadIdx.x] = 0;
  __syncthreads();
  LowLatency s(c, EPCY_LOW_LATENCY_DISPATCH, sends ? nullptr : c.sent);
  Own own;
  int verdict = EPCY_VERDICT_OK;
  if constexpr (sends) {
    if (!send<From, keeps, N>(s, a, tour, seat, shared, dynamic, &own)) verdict = EPCY_VERDICT_BROKEN;
    if (verdict != EPCY_VERDICT_OK && s.is_clerk() && threadIdx.x == 0)
      c.handle.found->has_bad = c.handle.found->not_sent_to = 0;
    stamp(EPCY_SPAN_SEND, s.notes());
  } else {
    const uint2 state = load_local_pair(c.broken); // broken, masked
    if (__syncthreads_or(state.x)) verdict = EPCY_VERDICT_BROKEN;
    s.peers &= ~state.y;
  }
  Patience for_headers;
  while (receives && verdict == EPCY_VERDICT_OK) {
    verdict = receive<N>(s, a, tour, seat, dynamic + c.num_experts, keeps, own, shared.flows[1], &shared.missing,
                         for_headers);
    if (!EPCY_RARELY(verdict == kAgain)) break;
    look_around(s);
    verdict = EPCY_VERDICT_OK;
  }
  const uint32_t missing = receives && verdict == EPCY_VERDICT_OK ? shared.missing : 0;
  if (s.is_clerk() && threadIdx.x == 0 && (receives || verdict != EPCY_VERDICT_OK))
    c.handle.found->verdict = verdict, c.handle.found->missing = missing, c.handle.found->left_by = 0;
  if (EPCY_RARELY(verdict != EPCY_VERDICT_OK || missing)) mend(a, s.epoch, verdict, missing);
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
