// Low-latency combine: the experts' rows go back in lines, summed for each source rank first or row by row, and are
// summed at home.
//
// Every warp works for itself: it sends its part of each token's line, then receives the same part of its own tokens.
// There is no barrier but one; what a warp sends comes before everything it waits for. Lines say themselves that they have
// come: headers are for the clerk, who tells of calls that differ, and for those who have waited long.
#include "low_latency_sums.cuh"

namespace {

// The tokens of a block after its first one, in calls that have more tokens than blocks: apart, since a loop around all
// would keep so much in registers that there were too few for rows.
template <typename By, typename Rows, typename N>
EPCY_DEVICE bool send_more(LowLatency &of, const epcy_low_latency_combine &all, List *lists,
                           typename Rows::Shared &shared, int tokens, int first_turn, int t, int step) {
  const int most = __reduce_max_sync(~0u, tokens);
#pragma unroll 1
  for (; t < most; t += step) {
    const epcy_low_latency_combine &a = (&all)[opaque_zero()];
    LowLatency s(of, a.call);
    const Rows rows(a.call, Tour(a.call).part, shared);
    Lanes to_send, to_sum;
    to_send.load<N>(a.call, s.after(N::ranks(a.call) == 1 ? 0 : first_turn), t);
    if (t < a.call.num_tokens) {
      to_sum.load_own<N, By::kHeader != 0>(a.call, weights_given(a), t);
      if (N::kSpecial && renormalizes(a)) to_sum.weight = made_up_for(a, s.peers, t);
    }
    By by;
    if (!by.template send<true>(s, a, to_send, to_sum, lists, t, tokens, first_turn, rows)) return false;
    if (first_turn && t < a.call.num_tokens) by.leave_own(a, t, rows);
  }
  return true;
}
template <typename By, typename Rows, typename N>
EPCY_DEVICE void receive_more(LowLatency &of, const epcy_low_latency_combine &all, typename Rows::Shared &shared,
                              bool keeps, int t, int step) {
#pragma unroll 1
  for (; t < all.call.num_tokens; t += step) {
    const epcy_low_latency_combine &a = (&all)[opaque_zero()];
    LowLatency s(of, a.call);
    const Rows rows(a.call, Tour(a.call).part, shared);
    By by;
    Lanes lanes;
    uint4 sum;
    if (keeps) by.take_own(a, t, rows);
    if (By::kHeader) {
      lanes.load_own<N, By::kHeader != 0>(a.call, weights_given(a), t);
      if (N::kSpecial && renormalizes(a)) lanes.weight = made_up_for(a, s.peers, t);
    }
    const uint32_t others = Lanes::load_others<N, By::kHeader != 0>(a.call, t);
    while (!by.receive(s, a, lanes, Lanes::of_those<By::kHeader != 0>(s, others), t, rows, keeps, &sum)) {
      if (!may_go_on(s)) return;
      of.peers = s.peers;
    }
    if (rows.has_data()) *(uint4 *)(a.out + (int64_t)t * a.call.row_bytes + rows.offset()) = sum;
  }
}

template <int Dtype, template <int> class Format, template <int, typename, typename> class Reduction, typename N>
__global__ void __launch_bounds__(N::kThreadsOfBlock, N::kFast ? 1 : 2)
    combine_tokens(const __grid_constant__ epcy_low_latency_combine a) {
  using Rows = Format<Dtype>;
  using By = Reduction<Dtype, Rows, N>;
  __shared__ typename Rows::Shared shared;
  __shared__ List all_lists[N::kThreadsOfBlock / 32][N::kFew ? 2 : 1];
  constexpr bool by_source = By::kHeader != 0;
  const epcy_low_latency_call &c = a.call;
  const int lane = threadIdx.x & 31, R = N::ranks(c), T = c.num_tokens;
  const bool sends = N::kFast || c.phases & EPCY_LOW_LATENCY_SEND;
  const bool receives = N::kFast || c.phases & EPCY_LOW_LATENCY_RECEIVE;
  const bool keeps = sends && receives; // else this rank's own rows take the wire too, so that x may change in between
  const float *weights = N::kFast ? nullptr : weights_given(a);
  List *lists = all_lists[threadIdx.x >> 5];

  // What needs nobody's data comes first: the kernel before this one may still run.
  const Tour tour(c);
  Rows::prepare(shared);
  const Rows rows(c, tour.part, shared);
  // The first token's lanes, those of the next source and of this rank, are loaded before anything is known of them.
  LowLatency s(c, EPCY_LOW_LATENCY_COMBINE, sends ? nullptr : c.sent);
  const bool speaks = s.is_clerk() && threadIdx.x < 32; // the warp that speaks for this rank
  const int first_turn = keeps ? 1 : 0, first = tour.token < c.max_tokens ? tour.token : 0;
  Lanes to_send, to_sum;
  if (sends) to_send.load<N>(c, s.after(R == 1 ? 0 : first_turn), first);
  int tokens = sends && lane < R ? load_early(c.handle.tokens + lane) : 0;
  const uint64_t acks = sends ? s.look_for_acks() : 0;
  const uint2 state = load_local_pair(c.broken); // broken, masked
  uint2 held = make_uint2(0, 0);
  if (speaks) held = s.look_for_held();
  if (receives) to_sum.load_own<N, by_source>(c, weights, first);
  uint32_t others = receives ? Lanes::load_others<N, by_source>(c, first) : 0;
  int verdict = state.x ? EPCY_VERDICT_BROKEN : EPCY_VERDICT_OK, ignored;
  const bool follows = N::kSpecial && c.peers.goes_on && !speaks; // what the clerk finds
  s.peers &= ~state.y;
  __syncthreads(); // everybody has read the epoch
  // All know, or wait to be told, who takes part.
  auto meet = [&](int what) {
    if (follows && !s.wait_for_go(what)) return (int)EPCY_VERDICT_BROKEN;
    const int met = s.gather_all(&ignored, speaks && what == s.kToReceive);
    if (N::kSpecial && c.peers.goes_on && speaks && met != EPCY_VERDICT_BROKEN) s.give_go(what);
    return met;
  };
  By by;
  if (sends) {
    if (speaks) s.acknowledge(held);
    if (verdict != EPCY_VERDICT_OK || !(follows ? s.wait_for_go(s.kToSend) : s.wait_for_acks(acks)))
      verdict = EPCY_VERDICT_BROKEN;
    else if (speaks) s.announce(T, c.header);
    if (N::kSpecial && c.peers.goes_on && speaks && verdict == EPCY_VERDICT_OK) s.give_go(s.kToSend);
    if (N::kSpecial && renormalizes(a) && verdict == EPCY_VERDICT_OK) {
      verdict = meet(s.kToWeigh); // whose lanes are missing decides about the weights of the others
      if (tour.token < T) to_sum.weight = made_up_for(a, s.peers, tour.token);
      if (!by_source && verdict == EPCY_VERDICT_OK) ByRank<Dtype, Rows, N>::send_weights(s, a);
    } else if (!N::kFast && !by_source && gives_weights(a) &&
               verdict == EPCY_VERDICT_OK) { // a flight more: the experts wait for weights
      ByRank<Dtype, Rows, N>::send_weights(s, a);
      if constexpr (N::kSpecial) {
        verdict = meet(s.kToWeigh);
      } else {
        Patience patience;
        while ((verdict = s.gather(s.look_for_headers(), &ignored, false, patience)) == kAgain) s.excuse(true);
      }
    }
    if (EPCY_RARELY(s.missing()) && !s.takes_part(lane)) tokens = 0;
    const int most = verdict == EPCY_VERDICT_OK ? __reduce_max_sync(~0u, tokens) : 0;
    bool ok = true;
    if (tour.token < most)
      ok = by.template send<false>(s, a, to_send, to_sum, lists, tour.token, tokens, first_turn, rows);
    if (EPCY_RARELY(ok && tour.token + tour.step < most))
      ok = send_more<By, Rows, N>(s, a, lists, shared, tokens, first_turn, tour.token + tour.step, tour.step);
    if (!ok) verdict = EPCY_VERDICT_BROKEN;
  }
  if (sends) stamp(EPCY_SPAN_SEND, s.notes());
  if (N::kSpecial && receives && (speaks || follows) && verdict == EPCY_VERDICT_OK) verdict = meet(s.kToReceive);
  if (N::kSpecial && !sends && renormalizes(a) && by_source && tour.token < T)
    to_sum.weight = made_up_for(a, s.peers, tour.token);
  const int end = receives && verdict == EPCY_VERDICT_OK ? T : 0;
  if (tour.token < end) {
    uint4 sum;
    if (EPCY_RARELY(s.missing())) others = Lanes::of_those<by_source>(s, others);
    const bool ok = by.receive(s, a, to_sum, others, tour.token, rows, keeps, &sum);
    stamp(EPCY_SPAN_WAIT, s.notes());
    if (ok && rows.has_data()) *(uint4 *)(a.out + (int64_t)tour.token * c.row_bytes + rows.offset()) = sum;
    int next = tour.token + tour.step;
    if (EPCY_RARELY(!ok) && may_go_on(s)) { // once more
      next = tour.token;
      if (keeps) by.leave_own(a, next, rows);
    } else if (!ok) {
      next = end;
    }
    if (EPCY_RARELY(next < end)) receive_more<By, Rows, N>(s, a, shared, keeps, next, tour.step);
  }
  if (speaks) { // it has no tokens, so this delays none; nor does it take registers from sums
    if (!N::kSpecial && receives && verdict == EPCY_VERDICT_OK) verdict = s.gather_all(&ignored, true);
    if (receives && verdict == EPCY_VERDICT_OK) tell_missing(s);
    if (lane == 0 && EPCY_RARELY(verdict != EPCY_VERDICT_OK)) report(c, s.kind, s.epoch, verdict);
  }
  s.leave(N::kFast ? kBoth : c.phases, c.sent);
}

using Kernel = void (*)(epcy_low_latency_combine);

template <typename N, template <int> class Format, template <int, typename, typename> class Reduction>
Kernel kernel_of(int dtype) {
  return dtype == kBf16   ? combine_tokens<kBf16, Format, Reduction, N>
         : dtype == kFp16 ? combine_tokens<kFp16, Format, Reduction, N>
                          : combine_tokens<kFp32, Format, Reduction, N>;
}
template <typename N> Kernel kernel_of(int dtype, uint32_t header) {
  return header & EPCY_LOW_LATENCY_SOURCE ? kernel_of<N, PlainRows, BySource>(dtype)
                                          : kernel_of<N, PlainRows, ByRank>(dtype);
}
using Any = Made<AnySizes, false, false>;
using Special = Made<AnySizes, false, false, true>;
enum Speed { kSpecial, kAny, kFew, kMany };
template <typename N> Kernel kernel_of_all(int dtype, uint32_t header) {
  if (!(header & EPCY_LOW_LATENCY_LOGFMT)) return kernel_of<N>(dtype, header);
  return header & EPCY_LOW_LATENCY_SOURCE ? kernel_of<N, LogRows, BySource>(dtype)
                                          : kernel_of<N, LogRows, ByRank>(dtype);
}
Kernel kernel_of(int dtype, uint32_t header, Speed speed) {
  return speed == kSpecial ? kernel_of_all<Special>(dtype, header)
         : speed == kAny   ? kernel_of_all<Any>(dtype, header)
         : speed == kFew   ? kernel_of<Made<UsualSizes, true, true>>(dtype, header)
                           : kernel_of<Made<UsualSizes, true, false>>(dtype, header);
}

} // namespace

// The fast kernels have a block on each multiprocessor, the others two at least.
extern "C" int epcy_cuda_low_latency_combine_blocks(const epcy_shape *, int *blocks) {
  int error = 0, any = EPCY_LOW_LATENCY_MAX_BLOCKS, fast = EPCY_LOW_LATENCY_MAX_BLOCKS / 2;
  for (int i = 0; i < 12 && !error; i++) {
    const int dtype = i / 4;
    const uint32_t header = (i & 1 ? EPCY_LOW_LATENCY_SOURCE : 0) | (i & 2 ? EPCY_LOW_LATENCY_LOGFMT : 0);
    error = resident_blocks(kernel_of(dtype, header, kAny), kThreads, 0, &any);
    if (!error) error = resident_blocks(kernel_of(dtype, header, kSpecial), kThreads, 0, &any);
    if (!error)
      error = resident_blocks(kernel_of(dtype, i & 1 ? EPCY_LOW_LATENCY_SOURCE : 0, i & 2 ? kFew : kMany),
                              i & 2 ? kThreads : 2 * kThreads, 0, &fast);
  }
  *blocks = any < 2 * fast ? any : 2 * fast;
  return error;
}

extern "C" int epcy_cuda_launch_low_latency_combine(const epcy_low_latency_combine *given, void *stream) {
  epcy_low_latency_combine a = *given;
  epcy_low_latency_call &c = a.call;
  constexpr uint32_t special = EPCY_LOW_LATENCY_WEIGHTS | EPCY_LOW_LATENCY_LOGFMT | EPCY_LOW_LATENCY_RENORMALIZE;
  Speed speed = c.header & EPCY_LOW_LATENCY_RENORMALIZE || c.peers.goes_on ? kSpecial : kAny;
  int threads = kThreads;
  if (is_usual(c) && c.phases == kBoth && !(c.header & special)) {
    c.max_blocks /= 2;
    speed = c.num_tokens * (int)c.num_parts.by < c.max_blocks ? kFew : kMany;
    if (speed == kMany)
      threads *= 2, c.num_parts = epcy_divide_by((c.num_lines + 2 * EPCY_PART_LINES - 1) / (2 * EPCY_PART_LINES));
  }
  return launch_together<true>(kernel_of(c.dtype, c.header, speed), low_latency_grid(c), threads, 0, stream, a);
}
