// Low-latency combine: the experts' rows go back in lines, summed for each source rank first or row by row, and are
// summed at home.
//
// Every warp works for itself: it sends its part of each token's line, then receives the same part of its own tokens.
// There is no barrier but one at the start; what a warp sends comes before everything it waits for.
#include "low_latency_sums.cuh"

namespace {

// `Fast`: a call that sends and receives, without weights; reduction="rank": of two ranks.
template <int Dtype, template <int> class Format, template <int, typename, bool> class Reduction, bool Fast>
__global__ void __launch_bounds__(kThreads, 2) combine_tokens(const __grid_constant__ epcy_low_latency_combine a) {
  using Rows = Format<Dtype>;
  using By = Reduction<Dtype, Rows, Fast>;
  __shared__ typename Rows::Shared shared;
  __shared__ List lists[kWarps];
  constexpr bool by_source = By::kHeader != 0, pair = Fast && !by_source;
  const epcy_low_latency_call &c = a.call;
  const int lane = threadIdx.x & 31, b = blockIdx.x, G = gridDim.x, P = (int)c.num_parts.by;
  const int R = pair ? 2 : c.num_ranks;
  const bool sends = Fast || c.phases & EPCY_LOW_LATENCY_SEND, receives = Fast || c.phases & EPCY_LOW_LATENCY_RECEIVE;
  const bool keeps = sends && receives; // else this rank's own rows take the wire too, so that x may change in between
  const bool given = !Fast && gives_weights(a);
  const float *weights = given ? a.topk_weights : nullptr;
  List &list = lists[threadIdx.x >> 5];
  auto after = [&](const LowLatency &s, int turn) { return pair ? c.rank ^ 1 : s.after(turn); };

  // The first item's lanes, those of the next source and of this rank, are loaded before anything is known of them.
  const LowLatency s(c, EPCY_LOW_LATENCY_COMBINE, sends ? nullptr : c.sent);
  const bool head = s.is_head() && threadIdx.x < 32; // the warp that speaks for this rank
  const int first_turn = keeps ? 1 : 0, begin = quotient(b, c.num_parts), first = begin < c.max_tokens ? begin : 0;
  Lanes to_send, to_sum;
  to_send.load(c, after(s, R == 1 ? 0 : first_turn), first);
  const int tokens = sends && lane < R ? load_early(c.handle.tokens + lane) : 0;
  const uint64_t acks = sends ? s.look_for_acks() : 0;
  const uint32_t broken = load_local(c.broken);
  uint2 held = make_uint2(0, 0);
  if (head) held = s.look_for_held();
  to_sum.load_own<by_source>(c, weights, first);
  int verdict = broken ? EPCY_VERDICT_BROKEN : EPCY_VERDICT_OK, ignored;
  Rows::prepare(shared);
  __syncthreads(); // everybody has read the epoch
  if (sends) {
    if (head) s.acknowledge(held);
    if (verdict != EPCY_VERDICT_OK || !s.wait_for_acks(acks)) verdict = EPCY_VERDICT_BROKEN;
    else if (head) s.announce(c.num_tokens, c.header);
    if (!by_source && given && verdict == EPCY_VERDICT_OK) { // a flight more: the experts wait for weights
      ByRank<Dtype, Rows, Fast>::send_weights(s, a);
      verdict = s.gather(s.look_for_headers(), &ignored);
      if (EPCY_RARELY(verdict != EPCY_VERDICT_OK) && head && lane == 0) report(c, s.kind, s.epoch, verdict);
    }
    const int items = verdict == EPCY_VERDICT_OK ? __reduce_max_sync(~0u, tokens) * P : 0;
#pragma unroll 1
    for (int item = b, turn = first_turn; item < items && turn < R;) {
      const int source = after(s, turn), t = quotient(item, c.num_parts), part = item - t * P;
      const bool real = item < __shfl_sync(~0u, tokens, source) * P;
      if (++turn == R) turn = first_turn, item += G;
      auto next = [&] {
        if (EPCY_RARELY(item < items)) to_send.load(c, after(s, turn), quotient(item, c.num_parts));
      };
      to_send.split(c);
      if (!real || !to_send.here) {
        next();
      } else if (!By::send(s, a, to_send, list, source, t, Rows(c, part, shared), next)) {
        verdict = EPCY_VERDICT_BROKEN;
        break;
      }
    }
  }

  const int items = receives && verdict == EPCY_VERDICT_OK ? c.num_tokens * P : 0;
  bool gathered = !receives || verdict != EPCY_VERDICT_OK;
#pragma unroll 1
  for (int item = b; item < items || (head && !gathered); item += G) {
    const bool real = item < items;
    const int t = real ? quotient(item, c.num_parts) : 0;
    const Rows rows(c, item - t * P, shared);
    By by;
    uint4 sum = nothing();
    auto next = [&] {
      if (EPCY_RARELY(item + G < items)) to_sum.load_own<by_source>(c, weights, quotient(item + G, c.num_parts));
    };
    to_sum.split(c);
    if (real) by.split(s, to_sum);
    if (!by_source && keeps && real) sum = sum_rows<Dtype>(a, to_sum, list, rows, next);
    ulonglong2 headers;
    if (!gathered) headers = s.look_for_headers();
    if (real) by.look(s, rows, t);
    if (!gathered) {
      verdict = s.gather(headers, &ignored);
      gathered = true;
      if (EPCY_RARELY(verdict != EPCY_VERDICT_OK)) {
        if (head && lane == 0) report(c, s.kind, s.epoch, verdict);
        break;
      }
    }
    if (!real || !by.receive(s, a, to_sum, t, rows, keeps, sum, &sum)) break;
    if (rows.has_data()) *(uint4 *)(a.out + (int64_t)t * c.row_bytes + rows.offset()) = sum;
    if (by_source || !keeps) next();
  }
  s.leave(Fast ? EPCY_LOW_LATENCY_SEND | EPCY_LOW_LATENCY_RECEIVE : c.phases, c.sent);
}

template <bool Fast, template <int> class Format, template <int, typename, bool> class Reduction>
auto kernel_of(int dtype) {
  return dtype == kBf16   ? combine_tokens<kBf16, Format, Reduction, Fast>
         : dtype == kFp16 ? combine_tokens<kFp16, Format, Reduction, Fast>
                          : combine_tokens<kFp32, Format, Reduction, Fast>;
}
auto kernel_of(int dtype, int phases, int num_ranks, uint32_t header) {
  const bool fast =
      phases == (EPCY_LOW_LATENCY_SEND | EPCY_LOW_LATENCY_RECEIVE) && !(header & EPCY_LOW_LATENCY_WEIGHTS);
  const bool by_source = header & EPCY_LOW_LATENCY_SOURCE;
  if (header & EPCY_LOW_LATENCY_LOGFMT)
    return by_source ? kernel_of<false, LogRows, BySource>(dtype) : kernel_of<false, LogRows, ByRank>(dtype);
  if (by_source)
    return fast ? kernel_of<true, PlainRows, BySource>(dtype) : kernel_of<false, PlainRows, BySource>(dtype);
  return fast && num_ranks == 2 ? kernel_of<true, PlainRows, ByRank>(dtype)
                                : kernel_of<false, PlainRows, ByRank>(dtype);
}

} // namespace

extern "C" int epcy_cuda_low_latency_combine_blocks(const epcy_shape *, int *blocks) {
  *blocks = EPCY_LOW_LATENCY_MAX_BLOCKS;
  int error = 0;
  for (int i = 0; i < 24 && !error; i++)
    error = resident_blocks(kernel_of(i / 8, i & 4 ? 3 : 1, 2,
                                      (i & 1 ? EPCY_LOW_LATENCY_SOURCE : 0) | (i & 2 ? EPCY_LOW_LATENCY_LOGFMT : 0)),
                            0, blocks);
  return error;
}

extern "C" int epcy_cuda_launch_low_latency_combine(const epcy_low_latency_combine *a, void *stream) {
  const epcy_low_latency_call &c = a->call;
  return launch_together(kernel_of(c.dtype, c.phases, c.num_ranks, c.header), low_latency_grid(c), kThreads, 0, stream,
                         *a);
}
