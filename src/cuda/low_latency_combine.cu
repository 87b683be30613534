// Low-latency combine: the experts' rows go back in lines, summed for each source rank first or row by row, and are
// summed at home.
//
// Every warp works for itself: it sends its part of each token's line, then receives the same part of its own tokens.
// There is no barrier but one; what a warp sends comes before everything it waits for. Lines say themselves that they have
// come: headers are for the clerk, who tells of calls that differ, and for those who have waited long.
#include "low_latency_sums.cuh"

namespace {

// `Fast`: a call that sends and receives, without weights.
template <int Dtype, template <int> class Format, template <int, typename, typename> class Reduction, typename N, bool Fast>
__global__ void __launch_bounds__(kThreads, 2) combine_tokens(const __grid_constant__ epcy_low_latency_combine a) {
  using Rows = Format<Dtype>;
  using By = Reduction<Dtype, Rows, N>;
  __shared__ typename Rows::Shared shared;
  __shared__ List lists[kWarps];
  constexpr bool by_source = By::kHeader != 0;
  const epcy_low_latency_call &c = a.call;
  const int lane = threadIdx.x & 31, R = N::ranks(c), T = c.num_tokens;
  const bool sends = Fast || c.phases & EPCY_LOW_LATENCY_SEND, receives = Fast || c.phases & EPCY_LOW_LATENCY_RECEIVE;
  const bool keeps = sends && receives; // else this rank's own rows take the wire too, so that x may change in between
  const bool given = !Fast && gives_weights(a);
  const float *weights = given ? a.topk_weights : nullptr;
  List &list = lists[threadIdx.x >> 5];

  // The first token's lanes, those of the next source and of this rank, are loaded before anything is known of them.
  const LowLatency s(c, EPCY_LOW_LATENCY_COMBINE, sends ? nullptr : c.sent);
  const Tour tour(s);
  const bool speaks = s.is_clerk() && threadIdx.x < 32; // the warp that speaks for this rank
  const int first_turn = keeps ? 1 : 0, first = tour.token < c.max_tokens ? tour.token : 0;
  Lanes to_send, to_sum;
  if (sends) to_send.load<N>(c, s.after(R == 1 ? 0 : first_turn), first);
  const int tokens = sends && lane < R ? load_early(c.handle.tokens + lane) : 0;
  const uint64_t acks = sends ? s.look_for_acks() : 0;
  const uint32_t broken = load_local(c.broken);
  uint2 held = make_uint2(0, 0);
  if (speaks) held = s.look_for_held();
  if (receives) to_sum.load_own<N, by_source>(c, weights, first);
  int verdict = broken ? EPCY_VERDICT_BROKEN : EPCY_VERDICT_OK, ignored;
  Rows::prepare(shared);
  const Rows rows(c, tour.part, shared);
  __syncthreads(); // everybody has read the epoch
  if (sends) {
    if (speaks) s.acknowledge(held);
    if (verdict != EPCY_VERDICT_OK || !s.wait_for_acks(acks)) verdict = EPCY_VERDICT_BROKEN;
    else if (speaks) s.announce(T, c.header);
    if (!by_source && given && verdict == EPCY_VERDICT_OK) { // a flight more: the experts wait for weights
      ByRank<Dtype, Rows, N>::send_weights(s, a);
      verdict = s.gather(s.look_for_headers(), &ignored);
    }
    const int most = verdict == EPCY_VERDICT_OK ? __reduce_max_sync(~0u, tokens) : 0;
#pragma unroll 1
    for (int t = tour.token, turn = first_turn; t < most && turn < R;) {
      const int source = s.after(turn), of = t;
      const bool real = t < __shfl_sync(~0u, tokens, source);
      if (++turn == R) turn = first_turn, t += tour.step;
      auto next = [&] {
        if (EPCY_RARELY(t < most)) to_send.load<N>(c, s.after(turn), t);
      };
      if (!real) {
        next();
      } else if (!By::send(s, a, to_send, list, source, of, rows, next)) {
        verdict = EPCY_VERDICT_BROKEN;
        break;
      }
    }
  }
  if (speaks && receives && verdict == EPCY_VERDICT_OK) verdict = s.gather(s.look_for_headers(), &ignored);
  if (speaks && lane == 0 && EPCY_RARELY(verdict != EPCY_VERDICT_OK)) report(c, s.kind, s.epoch, verdict);

  const int end = receives && verdict == EPCY_VERDICT_OK ? T : 0;
#pragma unroll 1
  for (int t = tour.token; t < end; t += tour.step) {
    By by;
    uint4 sum;
    auto next = [&] {
      if (EPCY_RARELY(t + tour.step < end)) to_sum.load_own<N, by_source>(c, weights, t + tour.step);
    };
    if (!by.receive(s, a, to_sum, list, t, rows, keeps, next, &sum)) break;
    if (rows.has_data()) *(uint4 *)(a.out + (int64_t)t * c.row_bytes + rows.offset()) = sum;
  }
  s.leave(Fast ? EPCY_LOW_LATENCY_SEND | EPCY_LOW_LATENCY_RECEIVE : c.phases, c.sent);
}

template <typename N, bool Fast, template <int> class Format, template <int, typename, typename> class Reduction>
auto kernel_of(int dtype) {
  return dtype == kBf16   ? combine_tokens<kBf16, Format, Reduction, N, Fast>
         : dtype == kFp16 ? combine_tokens<kFp16, Format, Reduction, N, Fast>
                          : combine_tokens<kFp32, Format, Reduction, N, Fast>;
}
auto kernel_of(int dtype, bool fast, uint32_t header) {
  const bool by_source = header & EPCY_LOW_LATENCY_SOURCE;
  if (header & EPCY_LOW_LATENCY_LOGFMT)
    return by_source ? kernel_of<AnySizes, false, LogRows, BySource>(dtype)
                     : kernel_of<AnySizes, false, LogRows, ByRank>(dtype);
  if (by_source)
    return fast ? kernel_of<UsualSizes, true, PlainRows, BySource>(dtype)
                : kernel_of<AnySizes, false, PlainRows, BySource>(dtype);
  return fast ? kernel_of<UsualSizes, true, PlainRows, ByRank>(dtype)
              : kernel_of<AnySizes, false, PlainRows, ByRank>(dtype);
}

} // namespace

extern "C" int epcy_cuda_low_latency_combine_blocks(const epcy_shape *, int *blocks) {
  *blocks = EPCY_LOW_LATENCY_MAX_BLOCKS;
  int error = 0;
  for (int i = 0; i < 24 && !error; i++)
    error = resident_blocks(kernel_of(i / 8, i & 4, (i & 1 ? EPCY_LOW_LATENCY_SOURCE : 0) |
                                                        (i & 2 ? EPCY_LOW_LATENCY_LOGFMT : 0)),
                            0, blocks);
  return error;
}

extern "C" int epcy_cuda_launch_low_latency_combine(const epcy_low_latency_combine *a, void *stream) {
  const epcy_low_latency_call &c = a->call;
  const bool fast = is_usual(c) && c.phases == (EPCY_LOW_LATENCY_SEND | EPCY_LOW_LATENCY_RECEIVE) &&
                    !(c.header & EPCY_LOW_LATENCY_WEIGHTS);
  return launch_together(kernel_of(c.dtype, fast, c.header), low_latency_grid(c), kThreads, 0, stream, *a);
}
