// Dispatch in the rank layout: one kernel counts, exchanges counts, and moves every row once to its final place.
#include "count.cuh"

namespace {

// The warps that do not move rows: ids, weights, scales and the handle's positions of this block's rows.
EPCY_DEVICE void write_lanes(const Step &s, const epcy_cuda_dispatch &a, const Place &pl, char *area, bool moves) {
  const int K = (int)a.peers.shape.num_topk, me = threadIdx.x - 32 * kMoverWarps;
  const int64_t L = epcy_num_local_experts(&a.peers.shape);
  int64_t *idx = (int64_t *)(area + a.peers.area.topk_idx);
  float *weights = (float *)(area + a.peers.area.topk_weights), *scales = (float *)(area + a.peers.area.scales);
  for (int k = 0, c = pl.j; c < C; c += pl.g, k++) {
    const int32_t *list = a.routing.list + (int64_t)pl.d * a.num_tokens + first_token(a, c);
    const int n = pl.n[k];
    if (!a.cached) {
      const int listed = a.routing.chunk_count[pl.d * C + c];
      for (int i = me; i < listed; i += kOthers)
        a.routing.pos[(int64_t)list[i] * s.num_ranks + pl.d] = i < n ? pl.base[k] + i : -1;
    }
    if (!moves) continue;
    for (int q = me; q < n * K; q += kOthers) {
      const int i = q / K, lane = q - i * K;
      const int64_t at = (int64_t)list[i] * K + lane, row = pl.base[k] + i;
      int64_t id = -1;
      if (a.cached) id = a.lane_ids[at];
      else id = a.is_int64 ? ((const int64_t *)a.topk_idx)[at] : ((const int32_t *)a.topk_idx)[at];
      const int64_t local = id - pl.d * L;
      const bool here = id >= 0 && local >= 0 && local < L;
      idx[row * K + lane] = here ? local : -1;
      if (a.topk_weights) weights[row * K + lane] = here ? a.topk_weights[at] : 0.0f;
    }
    if (a.scales && a.num_scales % 4 == 0) {
      const int per_row = a.num_scales / 4;
      for (int q = me; q < n * per_row; q += kOthers) {
        const int i = q / per_row, v = q - i * per_row;
        ((float4 *)scales)[(int64_t)(pl.base[k] + i) * per_row + v] =
            ((const float4 *)a.scales)[(int64_t)list[i] * per_row + v];
      }
    } else if (a.scales) {
      for (int q = me; q < n * a.num_scales; q += kOthers) {
        const int i = q / a.num_scales, v = q - i * a.num_scales;
        scales[(int64_t)(pl.base[k] + i) * a.num_scales + v] =
            ((const float *)a.scales)[(int64_t)list[i] * a.num_scales + v];
      }
    }
  }
}

// The same warps of this rank's own blocks: sum everybody's lanes for each local expert; a warp an expert.
EPCY_DEVICE void sum_experts(const Step &s, const epcy_cuda_dispatch &a, const Place &pl) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) - kMoverWarps, warps = kOthers / 32;
  const int64_t L = epcy_num_local_experts(&a.peers.shape);
  uint64_t *reported = (uint64_t *)(a.peers.report + 1);
  for (int64_t e = pl.j * warps + warp; e < L; e += pl.g * warps) {
    uint32_t sum = 0;
    for (int source = 0; source < s.num_ranks; source++) {
      bool ok = true;
      sum += s.wait(s.experts(s.me, source, lane) + e, EPCY_CUDA_COUNTS, source, &ok);
    }
    sum = __reduce_add_sync(~0u, sum);
    if (lane == 0) {
      a.routing.experts[e] = sum;
      if (a.peers.ticket) s.tell(&reported[e], sum);
    }
  }
}
static_assert(C == 32, "a lane a chunk");

// Worst case: rows past the count say so.
EPCY_DEVICE void fill_rows(const epcy_cuda_dispatch &a, const Place &pl, char *area, int64_t rows) {
  const int K = (int)a.peers.shape.num_topk, me = threadIdx.x - 32 * kMoverWarps;
  int64_t *idx = (int64_t *)(area + a.peers.area.topk_idx);
  float *weights = (float *)(area + a.peers.area.topk_weights);
  for (int64_t i = rows * K + pl.j * kOthers + me; i < (int64_t)a.fill_to * K; i += pl.g * kOthers)
    idx[i] = -1, weights[i] = 0.0f;
}

template <typename Id>
__global__ void __launch_bounds__(kThreads, 1)
    dispatch_rows(const __grid_constant__ epcy_cuda_dispatch a, const MoverShape shape) {
  extern __shared__ char unaligned[];
  char *dynamic = aligned_shared(unaligned);
  __shared__ Place pl;
  __shared__ int verdict, lower, total, own[C], warp_total[kThreads / 32];
  __shared__ unsigned long long first_bad;
  int *hist = (int *)(dynamic + shape.bytes());
  const Step s(a.peers);
  if (s.broken()) return s.report_broken();
  const int R = s.num_ranks, b = blockIdx.x, to_peers = a.num_peer_blocks * (R - 1);
  if (b == 0) s.announce(a.header, a.limit, 0);
  if (threadIdx.x == 0) {
    const bool own_rows = b >= to_peers;
    pl.d = own_rows ? s.me : (s.me + 1 + b / a.num_peer_blocks) % R;
    pl.j = own_rows ? b - to_peers : b % a.num_peer_blocks;
    pl.g = own_rows ? a.num_own_blocks : a.num_peer_blocks;
    verdict = EPCY_VERDICT_OK, lower = total = 0;
  }
  Mover mover(dynamic, shape);
  __syncthreads();

  if (!a.cached)
    for (int c = pl.j; c < C; c += pl.g) {
      const int n = count_chunk<Id>(s, a, c, pl.d, hist, warp_total, &first_bad);
      if (threadIdx.x == 0) a.routing.chunk_count[pl.d * C + c] = n;
    }
  s.gather(a.header, &verdict);
  if (!a.cached && verdict == EPCY_VERDICT_OK) find_bases(s, pl.d, &verdict, &lower, &total, own);
  const uint32_t theirs = s.header_value(pl.d, 0), limit = s.header_value(pl.d, 1);
  if (threadIdx.x == 0 && !a.cached) {
    if (verdict == EPCY_VERDICT_OK && (theirs & EPCY_HEADER_WAITS) && (uint32_t)total > limit)
      verdict = EPCY_VERDICT_OVERFLOW;
    int base = lower;
    for (int c = 0, k = 0; c < C; c++) {
      const int n = verdict == EPCY_VERDICT_OK ? own[c] : 0, room = (int)limit - base;
      if (c % pl.g == pl.j) {
        pl.base[k] = base, pl.n[k] = n < room ? n : room > 0 ? room : 0;
        a.routing.chunk_base[pl.d * C + c] = base;
        k++;
      }
      base += n;
    }
    if (pl.j == 0 && pl.d == s.me) {
      const int rows = verdict == EPCY_VERDICT_OK || verdict == EPCY_VERDICT_OVERFLOW ? total : 0;
      *a.routing.num_recv = rows;
      if (a.peers.ticket) s.tell(&a.peers.report->num_rows, rows);
      else if ((uint32_t)rows > limit) a.peers.report->late_rows = rows, a.peers.report->late_limit = limit;
    }
    if (pl.j == 0) s.report(pl.d, verdict);
  }
  if (threadIdx.x == 0 && a.cached) {
    for (int k = 0, c = pl.j; c < C; c += pl.g, k++) {
      pl.base[k] = a.routing.chunk_base[pl.d * C + c];
      const int n = a.routing.chunk_count[pl.d * C + c], room = (int)limit - pl.base[k];
      pl.n[k] = verdict != EPCY_VERDICT_OK ? 0 : n < room ? n : room > 0 ? room : 0;
    }
    if (pl.j == 0) s.report(pl.d, verdict);
  }
  __syncthreads();

  const bool moves = verdict == EPCY_VERDICT_OK;
  char *area = a.peers.base[pl.d] + a.peers.heap.receive[EPCY_HEADER_AREA(theirs)];
  const int warp = threadIdx.x >> 5;
  if (warp < kMoverWarps) {
    if (moves)
      for (int k = 0, c = pl.j; c < C; c += pl.g, k++)
        mover.rows(a.x, a.x_stride_bytes, a.routing.list + (int64_t)pl.d * a.num_tokens + first_token(a, c), pl.n[k],
                   area + a.peers.area.payload + pl.base[k] * a.row_bytes, a.row_bytes);
    mover.drain();
  } else {
    if (pl.d == s.me && moves && !a.cached) sum_experts(s, a, pl);
    write_lanes(s, a, pl, area, moves);
    if (pl.d == s.me && verdict != EPCY_VERDICT_BROKEN)
      fill_rows(a, pl, area, !moves ? 0 : a.cached ? *a.routing.num_recv : total);
  }
  s.finish();
}

} // namespace

extern "C" int epcy_cuda_launch_dispatch(const epcy_cuda_dispatch *call, void *stream) {
  const int64_t hist_bytes = epcy_num_local_experts(&call->peers.shape) * 4;
  const MoverShape shape = mover_shape(call->row_bytes, kMoverWarps, hist_bytes);
  const int grid = call->num_peer_blocks * ((int)call->peers.shape.num_ranks - 1) + call->num_own_blocks;
  const size_t bytes = shape.bytes() + hist_bytes;
  return call->is_int64 ? launch_together(dispatch_rows<int64_t>, grid, kThreads, bytes, stream, *call, shape)
                        : launch_together(dispatch_rows<int32_t>, grid, kThreads, bytes, stream, *call, shape);
}

int epcy_cuda_load_dispatch() {
  const int error = allow_shared(dispatch_rows<int64_t>);
  return error ? error : allow_shared(dispatch_rows<int32_t>);
}
