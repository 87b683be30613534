// Dispatch in the expert layout: a row for each lane, grouped by local expert.
//
// Ranks count lanes by (chunk, expert); the experts' rank answers with the first row of each chunk at each expert, so a
// lane's row is that start plus its ordinal. A token crosses a link once, to the row of its first lane at that rank; the
// receiver copies rows to their other places (fan.cuh) while more are on their way. A rank's own tokens go to all their
// rows at once.
#include "place.cuh"

namespace {

constexpr int kOthers = kThreads - 32 * kMoverWarps;
constexpr int kTell = 16; // rows after which a mover warp tells how far it has come
constexpr int kTake = 4;  // rows of such a warp that a copying warp takes at a time

// The warps that do not move rows: ids and weights of a share's rows, and scales: of all rows at this rank, of the first
// ones at another.
template <typename Id>
EPCY_DEVICE void write_lanes(const Step &s, const epcy_cuda_dispatch &a, int d, const int32_t *list, int n,
                             char *area) {
  const int K = (int)s.p.shape.num_topk, me = threadIdx.x - 32 * kMoverWarps;
  int64_t *idx = (int64_t *)(area + s.p.area.topk_idx);
  float *weights = (float *)(area + s.p.area.topk_weights), *scales = (float *)(area + s.p.area.scales);
#pragma unroll 2
  for (int q = me; q < n * K; q += kOthers) {
    const int i = q / K, k = q - i * K;
    const int64_t at = (int64_t)list[i] * K + k;
    const int local = local_id<Id>(s, a, at, d), row = local < 0 ? -1 : a.routing.lane_row[at];
    if (row < 0) continue;
    idx[row] = local;
    if (a.topk_weights) weights[row] = a.topk_weights[at];
  }
  if (!a.num_scales) return;
  const int lane = me & 31;
#pragma unroll 1
  for (int i = me >> 5; i < n; i += kOthers / 32) { // a warp a token
    const float *from = (const float *)a.scales + (int64_t)list[i] * a.num_scales;
    if (d != s.me) {
      const int row = a.routing.pos[(int64_t)list[i] * s.num_ranks + d];
#pragma unroll 1
      for (int v = lane; row >= 0 && v < a.num_scales; v += 32) scales[(int64_t)row * a.num_scales + v] = from[v];
    } else {
#pragma unroll 1
      for (int k = 0; k < K; k++) {
        const int64_t at = (int64_t)list[i] * K + k;
        const int row = local_id<Id>(s, a, at, d) < 0 ? -1 : a.routing.lane_row[at];
#pragma unroll 1
        for (int v = lane; row >= 0 && v < a.num_scales; v += 32) scales[(int64_t)row * a.num_scales + v] = from[v];
      }
    }
  }
}

// A share of threads, `at`-th of `all`: zero the padding of every group below row num_rows, and say that rows from `tail`
// on hold nothing.
EPCY_DEVICE void fill_rows(const Step &s, const epcy_cuda_dispatch &a, int at, int all, char *area, int64_t num_rows,
                           int64_t tail) {
  const int64_t L = s.p.num_local;
  const int lane = at & 31, warp = at >> 5, warps = all >> 5;
  int64_t *idx = (int64_t *)(area + s.p.area.topk_idx);
  float *weights = (float *)(area + s.p.area.topk_weights), *scales = (float *)(area + s.p.area.scales);
#pragma unroll 1
  for (int64_t e = 0, before = 0; num_rows && a.alignment > 1 && e < L; e++) {
    const int64_t from = __ldcg(a.routing.offsets + e) + __ldcg(a.routing.experts + e),
                  end = __ldcg(a.routing.offsets + e + 1), to = end < num_rows ? end : num_rows;
#pragma unroll 1
    for (int64_t row = from + (warp + warps - before % warps) % warps; row < to; row += warps) {
      uint4 *payload = (uint4 *)(area + s.p.area.payload + row * a.row_bytes);
#pragma unroll 1
      for (int64_t v = lane; v < a.row_bytes / 16; v += 32) payload[v] = make_uint4(0, 0, 0, 0);
#pragma unroll 1
      for (int v = lane; v < a.num_scales; v += 32) scales[row * a.num_scales + v] = 0.0f;
      if (lane == 0) idx[row] = -1, weights[row] = 0.0f;
    }
    before += to > from ? to - from : 0;
  }
#pragma unroll 1
  for (int64_t row = tail + at; row < a.fill_to; row += all) idx[row] = -1, weights[row] = 0.0f;
}

// The receiver's part of tokens that come from other ranks. Copying warps share the work in the order in which it comes:
// kTake rows at a time of each mover warp of each chunk.
struct Copier {
  const Step &s;
  const epcy_cuda_dispatch &a;
  const Counts &counts;
  const int32_t *fans; // where they are read: from the senders, or in the handle
  int units, turn, step, taken = 0, source = 0, chunk = 0, warp = 0, batch = 0, have = 0;
  bool ok = true;

  EPCY_DEVICE Copier(const Step &s, const epcy_cuda_dispatch &a, const Counts &counts, int turn, int step)
      : s(s), a(a), counts(counts), fans(a.cached ? a.routing.fans : s.fans(s.me)), units(0), turn(turn), step(step) {
#pragma unroll 1
    for (int q = 0; q < s.num_ranks; q++) units += q == s.me ? 0 : s.num_chunks(q, s.me) * kMoverWarps;
  }
  // A whole warp: how many tokens the warp-th mover warp of the chunk sends.
  EPCY_DEVICE int sent() const {
    const int n = counts.n[source * C + chunk] - warp;
    return n > 0 ? (n + kMoverWarps - 1) / kMoverWarps : 0;
  }
  // Find the unit of this turn; false when no unit has a batch of that number any more.
  EPCY_DEVICE bool take(int most_batches) {
#pragma unroll 1
    for (; units; turn += step) {
      batch = turn / units;
      if (batch >= most_batches || !ok) return false;
      int unit = turn - batch * units;
#pragma unroll 1
      for (source = 0;; source++) {
        const int here = source == s.me ? 0 : s.num_chunks(source, s.me) * kMoverWarps;
        if (unit < here) break;
        unit -= here;
      }
      chunk = unit / kMoverWarps, warp = unit % kMoverWarps;
      const int left = sent() - batch * kTake;
      if (left > 0) {
        have = left < kTake ? left : kTake, taken = 0, turn += step;
        s.wait_for(s.progress(s.me, source, chunk) + warp, batch * kTake + have, EPCY_CUDA_DATA, source, &ok);
#ifdef EPCY_HAS_BULK
        proxy_fence();
#endif
        __syncwarp();
        return ok;
      }
    }
    return false;
  }
  // The next token: where its first row lies, and this lane's entry of its fan.
  EPCY_DEVICE bool next(int most_batches, int lane0, const char *payload, const char **row, int *mine) {
    const int K = (int)s.p.shape.num_topk, k = lane0 + (int)(threadIdx.x & 31);
    if (taken == have && !take(most_batches)) return false;
    const int64_t i = counts.base[source * C + chunk] + warp + (batch * kTake + taken++) * kMoverWarps;
    const int32_t *fan = fans + i * K;
    *mine = k < K ? __ldcg(fan + k) : -1;
    const int first = __ldcg(fan);
    *row = payload + (first < 0 ? 0 : first) * a.row_bytes;
    return true;
  }
};

// The most batches that any mover warp of another rank sends.
EPCY_DEVICE int most_batches(const Step &s, const Counts &counts) {
  int most = 0;
#pragma unroll 1
  for (int q = 0; q < s.num_ranks * C; q++)
    if (q / C != s.me && counts.n[q] > most) most = counts.n[q];
  return ((most + kMoverWarps - 1) / kMoverWarps + kTake - 1) / kTake;
}

// All threads of a copying block, when its rows are copied: the scales of other ranks' tokens. Scales do not count in the
// movers' progress: wait for the blocks that wrote them.
EPCY_DEVICE void copy_scales(const Step &s, const epcy_cuda_dispatch &a, const Counts &counts, int at, int all,
                             char *area, int *verdict) {
  const int32_t *fans = a.cached ? a.routing.fans : s.fans(s.me);
  const int K = (int)s.p.shape.num_topk, R = s.num_ranks;
#pragma unroll 1
  for (int q = threadIdx.x; q < R * C; q += kThreads) {
    const int source = q / C, c = q % C, blocks = source == s.me ? 0 : s.num_chunks(source, s.me);
    if (c >= blocks) continue;
    bool ok = true;
    s.wait(s.done(s.me, source) + ((s.me - source - 1 + R) % R) * blocks + c, EPCY_CUDA_DATA, source, &ok);
    if (!ok) atomicMax(verdict, (int)EPCY_VERDICT_BROKEN);
  }
  __syncthreads();
  const int own = counts.base[s.me * C],
            own_end = own + (s.me + 1 < R ? counts.base[(s.me + 1) * C] : counts.total) - own;
  float *scales = (float *)(area + s.p.area.scales);
  const int lane = at & 31;
#pragma unroll 1
  for (int i = at >> 5; i < counts.total; i += all >> 5) {
    if (i >= own && i < own_end) continue;
    const int32_t *fan = fans + (int64_t)i * K;
    const int first = __ldcg(fan);
#pragma unroll 1
    for (int v = lane; first >= 0 && v < a.num_scales; v += 32) {
      const float scale = __ldcg(scales + (int64_t)first * a.num_scales + v);
#pragma unroll 1
      for (int k = 1; k < K; k++) {
        const int row = __ldcg(fan + k);
        if (row < 0) break;
        scales[(int64_t)row * a.num_scales + v] = scale;
      }
    }
  }
}

template <typename Id>
__global__ void __launch_bounds__(kThreads, 1)
    dispatch_lanes(const __grid_constant__ epcy_cuda_dispatch a, const MoverShape shape, int segments) {
  char *dynamic = aligned_shared();
  __shared__ Counts counts;
  __shared__ Share share;
  __shared__ FanRows fan_rows;
  __shared__ int verdict, warp_total[kWarps];
  __shared__ unsigned long long first_bad;
  int *table = (int *)(dynamic + shape.bytes());
  const Step s(a.peers);
  if (__syncthreads_or(s.broken())) return s.report_broken();
  const Role role(a, s.me, s.num_ranks);
  const int R = s.num_ranks, K = (int)s.p.shape.num_topk, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const bool sends = role.sends(), own = role.d == s.me;
  if (blockIdx.x == 0) s.announce(a.header, a.limit, 0, EPCY_GRID(gridDim.x, a.num_peer_blocks, a.num_own_blocks));
  if (threadIdx.x == 0) verdict = EPCY_VERDICT_OK, first_bad = ~0ull;
  if (warp == kWarps - 1 && a.cached && sends) share_evenly(s, a, role, &share);
  Mover mover(dynamic, shape);
  __syncthreads();

  if (!a.cached && sends) {
    const int n = list_tokens<Id>(s, a, role, warp_total, &first_bad);
    publish_count<Id>(s, a, role, n, first_bad);
    if (threadIdx.x == 0) share_chunk(a, role, n, &share);
    order_lanes<Id>(s, a, role, table, segments);
  }
  s.gather(a.header, &verdict);
  const bool seen = verdict != EPCY_VERDICT_BROKEN;
  if (verdict == EPCY_VERDICT_OK) {
    if (!a.cached) gather_counts(s, role.d, &verdict, &counts);
    else if (own) read_counts(s, a.routing.recv_count, &counts);
  }
  __syncthreads();
  const bool agreed = verdict == EPCY_VERDICT_OK; // on all ranks
  __syncthreads();
  if (warp == 0 && agreed && (own || !a.cached)) add_up(s, &counts);
  __syncthreads();
  if (!a.cached && own && role.j == 0) {
    if (agreed) {
      place_experts(s, a, counts.total, table, &verdict);
#pragma unroll 1
      for (int q = threadIdx.x; q < R * C; q += kThreads) a.routing.recv_count[q] = counts.n[q];
    } else {
#pragma unroll 1
      for (int64_t e = threadIdx.x; e <= s.p.num_local; e += kThreads) {
        a.routing.offsets[e] = 0;
        if (e == 0) a.routing.num_recv[0] = a.routing.num_recv[1] = 0;
        else a.routing.experts[e - 1] = 0;
      }
    }
  }
  const uint32_t theirs = s.header_value(role.d, 0), limit = s.header_value(role.d, 1);
  if (threadIdx.x == 0) {
    bool ok = true;
    const uint32_t rows =
        a.cached || !agreed ? 0 : s.wait(s.mark(s.me, role.d, EPCY_MARK_ROWS), EPCY_CUDA_STARTS, role.d, &ok);
    if (!ok) atomicMax(&verdict, (int)EPCY_VERDICT_BROKEN);
    if (verdict == EPCY_VERDICT_OK && (theirs & EPCY_HEADER_WAITS) && rows > limit) {
      verdict = EPCY_VERDICT_OVERFLOW;
      if (!s.p.ticket && role.j == 0)
        s.p.report->late_rank = role.d, s.p.report->late_rows = rows, s.p.report->late_limit = limit;
    }
  }
  __syncthreads();
  stamp(EPCY_SPAN_EXCHANGE); // that of the counts and starts too
  if (role.j == 0 && threadIdx.x == 32 * kMoverWarps) s.report(role.d, verdict);
  if (!a.cached && sends) {
    place_lanes<Id>(s, a, role, share, agreed ? counts.base[s.me * C + role.j] : 0, limit, table, &verdict);
    if (role.j == 0)
#pragma unroll 1
      for (int c = threadIdx.x; c < C; c += kThreads)
        a.routing.chunk_count[role.d * C + c] = agreed ? counts.n[s.me * C + c] : 0,
                                           a.routing.chunk_base[role.d * C + c] =
                                               agreed ? counts.base[s.me * C + c] : 0;
    if (threadIdx.x == 0 && agreed) share.base = counts.base[s.me * C + role.j];
  }
  __syncthreads();

  const bool moves = verdict == EPCY_VERDICT_OK;
  char *const area = a.peers.base[role.d] + a.peers.heap.receive[EPCY_HEADER_AREA(theirs)];
  char *const payload = area + a.peers.area.payload;
  const bool copies = own && moves && (role.j >= role.g || a.num_copy_blocks == 0);
  const int copier = role.j >= role.g ? role.j - role.g : role.j,
            copiers = a.num_copy_blocks ? a.num_copy_blocks : a.num_own_blocks;
  if (warp < kMoverWarps) {
    auto token_of = [](int i) { return share.token(i); };
    if (moves && sends && !own) { // to another rank: once, to the token's first row
      const int32_t *pos = a.routing.pos + role.d;
      Walk tokens(share.total, warp, kMoverWarps, a.row_bytes, shape.stage_bytes, token_of);
      Walk rows(share.total, warp, kMoverWarps, a.row_bytes, shape.stage_bytes,
                [pos, R](int i) { return pos[(int64_t)share.token(i) * R]; });
      const int pieces = (int)((a.row_bytes + shape.stage_bytes - 1) / shape.stage_bytes);
      uint64_t *word = s.progress(role.d, s.me, role.j) + warp;
      mover.run<true>(
          [&](const char **from, uint32_t *bytes) {
            int token;
            int64_t offset;
            if (!tokens.next(&token, &offset, bytes)) return false;
            *from = a.x + token * a.x_stride_bytes + offset;
            return true;
          },
          [&](uint32_t *bytes) {
            int row;
            int64_t offset;
            rows.next(&row, &offset, bytes);
            return row >= 0 && lane == 0 ? payload + row * a.row_bytes + offset : nullptr;
          },
          [&] {
            if (mover.stored % (kTell * pieces)) return;
            mover.arrived<Mover::kLag>();
            if (lane == 0) store_word_release(word, s.word((mover.stored - Mover::kLag) / pieces));
          });
      mover.arrived<0>();
      if (lane == 0) store_word_release(word, s.word(mover.stored / pieces));
    }
    if (moves && sends && own) // at home: to all its rows
#pragma unroll 1
      for (int lane0 = 0; lane0 < K; lane0 += 32) {
        Walk tokens(share.total, warp, kMoverWarps, 1, 1, token_of);
        Walk fans(share.total, warp, kMoverWarps, 1, 1, [](int i) { return share.base + i; });
        fan_out(mover, fan_rows, payload, a.row_bytes, 0, [&](const char **row, int *mine) {
          int token, fan;
          int64_t offset;
          uint32_t bytes;
          if (!tokens.next(&token, &offset, &bytes)) return false;
          fans.next(&fan, &offset, &bytes);
          *row = a.x + token * a.x_stride_bytes;
          *mine = lane0 + lane < K ? a.routing.fans[(int64_t)fan * K + lane0 + lane] : -1;
          return true;
        });
      }
    if (copies)
#pragma unroll 1
      for (int lane0 = 0; lane0 < K && K > 1; lane0 += 32) {
        Copier copy(s, a, counts, copier * kMoverWarps + warp, copiers * kMoverWarps);
        const int most = copy.units ? most_batches(s, counts) : 0;
        fan_out(mover, fan_rows, payload, a.row_bytes, lane0 ? 0 : 1,
                [&](const char **row, int *mine) { return copy.next(most, lane0, payload, row, mine); });
        if (!copy.ok) atomicMax(&verdict, (int)EPCY_VERDICT_BROKEN);
      }
  } else {
    const int me = threadIdx.x - 32 * kMoverWarps;
#pragma unroll 1
    for (int k = 0; moves && sends && k < share.num_pieces; k++)
      write_lanes<Id>(s, a, role.d, share.list[k], share.n[k], area);
    const int64_t rows = agreed && own ? __ldcg(a.routing.num_recv) : 0;
    const bool refused = (a.header & EPCY_HEADER_WAITS) && rows > a.limit;
    if (moves && sends && me == 0) count_sent(s, a, role, share);
    if (moves && own && role.j == 0)
      count_received(s, a.routing, (int)rows, EPCY_HEADER_AREA((uint32_t)a.header), true, me, kOthers);
    const int64_t num_rows = refused ? 0 : rows < a.limit ? rows : a.limit;
    if (own && seen && (role.j >= role.g || a.num_copy_blocks == 0))
      fill_rows(s, a, copier * kOthers + me, copiers * kOthers, area, num_rows, rows);
    if (copies && !a.cached) { // keep the fans of other ranks' tokens
      const int64_t own_from = (int64_t)counts.base[s.me * C] * K,
                    own_to = (int64_t)(s.me + 1 < R ? counts.base[(s.me + 1) * C] : counts.total) * K;
      bool ok = true;
#pragma unroll 1
      for (int q = me; q < R * C * kMoverWarps; q += kOthers) { // written before the rows: wait for the last of them
        const int source = q / (C * kMoverWarps), c = q / kMoverWarps % C, w = q % kMoverWarps;
        const int n = source == s.me ? 0 : counts.n[source * C + c] - w;
        if (n > 0)
          s.wait_for(s.progress(s.me, source, c) + w, (n + kMoverWarps - 1) / kMoverWarps, EPCY_CUDA_DATA, source, &ok);
      }
      if (!ok) atomicMax(&verdict, (int)EPCY_VERDICT_BROKEN);
      named_barrier<1, kOthers>();
      const int32_t *fans = s.fans(s.me);
#pragma unroll 1
      for (int64_t i = copier * kOthers + me; i < (int64_t)counts.total * K; i += copiers * kOthers)
        if (i < own_from || i >= own_to) a.routing.fans[i] = __ldcg(fans + i);
    }
  }
  if (copies && a.num_scales && K > 1) { // not a.scales: without tokens that may be no address
    __syncthreads();
    copy_scales(s, a, counts, copier * kThreads + threadIdx.x, copiers * kThreads, area, &verdict);
  }
  s.finish(&verdict);
}

} // namespace

extern "C" int epcy_cuda_launch_dispatch_expert(const epcy_cuda_dispatch *call, void *stream) {
  const int64_t num_local = call->peers.num_local;
  const int segments = num_local <= 1024 ? kWarps : 1;
  const int64_t table_bytes = segments * num_local * 4;
  const MoverShape shape = mover_shape(call->row_bytes, table_bytes + (int64_t)sizeof(FanRows));
  const int grid =
      call->num_peer_blocks * ((int)call->peers.shape.num_ranks - 1) + call->num_own_blocks + call->num_copy_blocks;
  const size_t bytes = shape.bytes() + table_bytes;
  return call->is_int64
             ? launch_together(dispatch_lanes<int64_t>, grid, kThreads, bytes, stream, *call, shape, segments)
             : launch_together(dispatch_lanes<int32_t>, grid, kThreads, bytes, stream, *call, shape, segments);
}

int epcy_cuda_load_dispatch_expert() {
  const int error = allow_shared(dispatch_lanes<int64_t>);
  return error ? error : allow_shared(dispatch_lanes<int32_t>);
}
