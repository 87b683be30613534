// Low-latency combine: the experts' rows go back in lines, summed for each source rank first or row by row, and are
// summed at home.
//
// Every warp works for itself: it sends its part of each token's line, then receives the same part of its own tokens.
// There is no barrier; what a warp sends comes before everything it waits for.
#include "low_latency_sums.cuh"

namespace {

// A warp's way through what it sends: its items of every source in turn, the next one's lanes loaded ahead.
struct Sources {
  int item, turn, source;
  const int first_turn;
  EPCY_DEVICE Sources(const LowLatency &s, int begin) : item(blockIdx.x), turn(begin - 1), first_turn(begin) {
    next(s);
  }
  EPCY_DEVICE void next(const LowLatency &s) {
    if (++turn == s.num_ranks) turn = first_turn, item += gridDim.x;
    source = s.me + turn < s.num_ranks ? s.me + turn : s.me + turn - s.num_ranks;
  }
};

template <int Dtype, template <int> class Format, template <int, typename> class Reduction>
__global__ void __launch_bounds__(kThreads, 2) combine_tokens(const __grid_constant__ epcy_low_latency_combine a) {
  using Rows = Format<Dtype>;
  using By = Reduction<Dtype, Rows>;
  __shared__ typename Rows::Shared shared;
  constexpr bool by_source = By::kHeader != 0;
  const epcy_low_latency_call &c = a.call;
  const int lane = threadIdx.x & 31, b = blockIdx.x, G = gridDim.x, P = c.num_parts, R = (int)c.peers.shape.num_ranks;
  const int room = (int)c.peers.shape.num_low_latency_tokens * P; // items that a source may have
  const bool sends = c.phases & EPCY_LOW_LATENCY_SEND, receives = c.phases & EPCY_LOW_LATENCY_RECEIVE;
  const bool keeps = sends && receives; // else this rank's own rows take the wire too, so that x may change in between
  const bool first_warp = b == 0 && threadIdx.x < 32;

  const LowLatency s(c.peers, c.wire, EPCY_LOW_LATENCY_COMBINE, sends ? nullptr : c.sent);
  int verdict = EPCY_VERDICT_OK, ignored;
  Rows::prepare(shared);
  if (sends) {
    const uint64_t acks = s.look_for_acks();
    const int tokens = lane < R ? c.handle.tokens[lane] : 0;
    Sources at(s, keeps && R > 1 ? 1 : 0);
    Lanes ahead(a, at.source, at.item < room ? at.item / P : 0);
    if (first_warp) s.acknowledge();
    if (__any_sync(~0u, s.broken()) || !s.wait_for_acks(acks)) verdict = EPCY_VERDICT_BROKEN;
    else if (first_warp) s.announce(c.num_tokens, c.header);
    if (!by_source && gives_weights(a) && verdict == EPCY_VERDICT_OK) { // a flight more: the experts wait for weights
      By::send_weights(s, a);
      verdict = s.gather(c.header, c.num_tokens, &ignored);
    }
    const int items = __reduce_max_sync(~0u, tokens) * P;
    while (at.item < items && at.item < room && verdict == EPCY_VERDICT_OK && !(keeps && R == 1)) {
      const int item = at.item, source = at.source;
      Lanes l = ahead;
      at.next(s);
      if (at.item < room) ahead.load(a, at.source, at.item / P);
      if (item >= __shfl_sync(~0u, tokens, source) * P) continue;
      l.split(c);
      if (l.here && !By::send(s, a, l, source, item / P, Rows(c, item % P, shared))) verdict = EPCY_VERDICT_BROKEN;
    }
  } else if (__any_sync(~0u, s.broken())) {
    verdict = EPCY_VERDICT_BROKEN;
  }

  if (receives && verdict != EPCY_VERDICT_BROKEN) {
    const int items = c.num_tokens * P;
    bool gathered = false;
    for (int item = b; item < items || (!gathered && first_warp); item += G) {
      const bool real = item < items;
      const int t = real ? item / P : 0;
      const Rows rows(c, item % P, shared);
      const unsigned ranks = real ? c.handle.ranks[t] & (0xFFFFFFFFu >> (32 - R)) : 0;
      uint4 own = nothing();
      Lanes l(a, s.me, t);
      l.split(c);
      if (!by_source && keeps && ranks >> s.me & 1) {
        if (gives_weights(a) && lane < (int)c.peers.shape.num_topk)
          l.weight = a.topk_weights[(int64_t)t * c.peers.shape.num_topk + lane];
        own = sum_rows<Dtype>(a, l, rows);
      }
      if (!gathered) {
        verdict = s.gather(c.header, c.num_tokens, &ignored);
        gathered = true;
        if (first_warp && lane == 0) s.report(verdict, c.header);
        if (verdict != EPCY_VERDICT_OK) break;
      }
      if (!real) break;
      uint4 out = nothing();
      bool ok;
      if constexpr (by_source) ok = !ranks || By::receive(s, a, t, rows, keeps, l, &out);
      else ok = By::receive(s, a, ranks, t, rows, keeps, own, &out);
      if (!ok) break;
      if (rows.has_data()) *(uint4 *)(a.out + t * c.row_bytes + rows.offset()) = out;
    }
  }
  s.leave(c.phases, c.sent);
}

template <template <int> class Format, template <int, typename> class Reduction> auto kernel_of(int dtype) {
  return dtype == kBf16   ? combine_tokens<kBf16, Format, Reduction>
         : dtype == kFp16 ? combine_tokens<kFp16, Format, Reduction>
                          : combine_tokens<kFp32, Format, Reduction>;
}
auto kernel_of(int dtype, uint32_t header) {
  const bool by_source = header & EPCY_LOW_LATENCY_SOURCE;
  if (header & EPCY_LOW_LATENCY_LOGFMT)
    return by_source ? kernel_of<LogRows, BySource>(dtype) : kernel_of<LogRows, ByRank>(dtype);
  return by_source ? kernel_of<PlainRows, BySource>(dtype) : kernel_of<PlainRows, ByRank>(dtype);
}

} // namespace

extern "C" int epcy_cuda_low_latency_combine_blocks(const epcy_shape *, int *blocks) {
  *blocks = EPCY_LOW_LATENCY_MAX_BLOCKS;
  int error = 0;
  for (int i = 0; i < 12 && !error; i++)
    error = resident_blocks(
        kernel_of(i / 4, (i & 1 ? EPCY_LOW_LATENCY_SOURCE : 0) | (i & 2 ? EPCY_LOW_LATENCY_LOGFMT : 0)), 0, blocks);
  return error;
}

extern "C" int epcy_cuda_launch_low_latency_combine(const epcy_low_latency_combine *a, void *stream) {
  return launch_together(kernel_of(a->call.dtype, a->call.header), low_latency_grid(a->call), kThreads, 0, stream, *a);
}
