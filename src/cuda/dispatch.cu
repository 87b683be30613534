// Dispatch in the rank layout: one kernel counts, exchanges counts, and moves every row once to its final place.
#include "count.cuh"
#include "row_mover.cuh"

namespace {

constexpr int kOthers = kThreads - 32 * kRowWarps;

// Whether vectors of 16 bytes fit the lanes of a token, everywhere they lie.
EPCY_DEVICE bool lanes_in_vectors(const epcy_cuda_dispatch &a) {
  return a.peers.shape.num_topk % 4 == 0 && ((uintptr_t)a.topk_weights & 15) == 0;
}

// The warps from kRowWarps on: ids, weights and scales of rows base + i at the destination, i < n.
template <typename Id>
EPCY_DEVICE void write_lanes(const Step &s, const epcy_cuda_dispatch &a, int d, const int32_t *list, int base, int n,
                             char *area) {
  const int K = (int)s.p.shape.num_topk, me = threadIdx.x - 32 * kRowWarps;
  int64_t *idx = (int64_t *)(area + s.p.area.topk_idx);
  float *weights = (float *)(area + s.p.area.topk_weights), *scales = (float *)(area + s.p.area.scales);
  const bool vectors = lanes_in_vectors(a);
  const int step = vectors ? 4 : 1, per_row = K / step;
#pragma unroll 2
  for (int q = me; q < n * per_row; q += kOthers) {
    const int i = q / per_row, k = (q - i * per_row) * step;
    const int64_t from = (int64_t)list[i] * K + k, to = (int64_t)(base + i) * K + k;
    int64_t local[4];
#pragma unroll
    for (int v = 0; v < 4; v++) local[v] = v < step ? local_id<Id>(s, a, from + v, d) : 0;
    if (vectors) {
      *(longlong2 *)(idx + to) = make_longlong2(local[0], local[1]);
      *(longlong2 *)(idx + to + 2) = make_longlong2(local[2], local[3]);
      if (!a.topk_weights) continue;
      const float4 w = *(const float4 *)(a.topk_weights + from);
      *(float4 *)(weights + to) = make_float4(local[0] < 0 ? 0.0f : w.x, local[1] < 0 ? 0.0f : w.y,
                                              local[2] < 0 ? 0.0f : w.z, local[3] < 0 ? 0.0f : w.w);
    } else {
      idx[to] = local[0];
      if (a.topk_weights) weights[to] = local[0] < 0 ? 0.0f : a.topk_weights[from];
    }
  }
  if (a.num_scales && a.num_scales % 4 == 0) {
    const int each = a.num_scales / 4;
#pragma unroll 4
    for (int q = me; q < n * each; q += kOthers) {
      const int i = q / each, v = q - i * each;
      ((float4 *)scales)[(int64_t)(base + i) * each + v] = ((const float4 *)a.scales)[(int64_t)list[i] * each + v];
    }
  } else if (a.num_scales) {
#pragma unroll 1
    for (int q = me; q < n * a.num_scales; q += kOthers) {
      const int i = q / a.num_scales, v = q - i * a.num_scales;
      scales[(int64_t)(base + i) * a.num_scales + v] = ((const float *)a.scales)[(int64_t)list[i] * a.num_scales + v];
    }
  }
}

EPCY_DEVICE void others_together() { named_barrier<1, kOthers>(); }

// The same warps, uncached: keep the handle's positions and ids, and count the lanes for each of the destination's
// experts.
template <typename Id>
EPCY_DEVICE void keep_routing(const Step &s, const epcy_cuda_dispatch &a, const Role &role, const int32_t *list,
                              int base, int n, uint32_t limit, int *hist) {
  const int K = (int)s.p.shape.num_topk, L = s.p.num_local, R = s.num_ranks;
  const int me = threadIdx.x - 32 * kRowWarps, t0 = first_token(a, role.j, role.g),
            t1 = first_token(a, role.j + 1, role.g);
#pragma unroll 1
  for (int e = me; e < L; e += kOthers) hist[e] = 0;
#pragma unroll 1
  for (int t = t0 + me; t < t1; t += kOthers) a.routing.pos[(int64_t)t * R + role.d] = -1;
  others_together();
#pragma unroll 1
  for (int i = me; i < n; i += kOthers)
    if ((uint32_t)(base + i) < limit) a.routing.pos[(int64_t)list[i] * R + role.d] = base + i;
#pragma unroll 1
  for (int64_t q = (int64_t)t0 * K + me; q < (int64_t)t1 * K; q += kOthers) {
    const int64_t id = read_id<Id>(a, q), local = id - (int64_t)role.d * L;
    if (role.d == s.me) a.lane_ids_out[q] = id < -1 || id >= s.p.shape.num_experts ? -1 : id;
    if (id >= 0 && local >= 0 && local < L) atomicAdd(&hist[local], 1);
  }
  others_together();
#pragma unroll 1
  for (int e = me; e < L; e += kOthers) store_word(s.experts(role.d, s.me, role.j) + e, s.word(hist[e]));
}

// The same warps of this rank's own blocks: sum everybody's lanes for each local expert; a warp an expert.
EPCY_DEVICE void sum_experts(const Step &s, const epcy_cuda_dispatch &a, const Role &role) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) - kRowWarps, warps = kOthers / 32;
  const int64_t L = s.p.num_local;
  uint64_t *reported = (uint64_t *)(s.p.report + 1);
#pragma unroll 1
  for (int64_t e = role.j * warps + warp; e < L; e += role.g * warps) {
    uint32_t sum = 0;
#pragma unroll 1
    for (int source = 0; source < s.num_ranks; source++) {
      const int chunks = s.num_chunks(source, s.me);
      bool ok = true;
      if (lane < chunks) sum += s.wait(s.experts(s.me, source, lane) + e, EPCY_CUDA_COUNTS, source, &ok);
    }
    sum = __reduce_add_sync(~0u, sum);
    if (lane == 0) {
      a.routing.experts[e] = sum;
      add_to((uint64_t *)(counters_of(s.p) + 1) + e, sum);
      if (s.p.ticket) s.tell(&reported[e], sum);
    }
  }
}

// Worst case: rows past the count say so.
EPCY_DEVICE void fill_rows(const Step &s, const epcy_cuda_dispatch &a, const Role &role, char *area, int64_t rows) {
  const int K = (int)s.p.shape.num_topk, me = threadIdx.x - 32 * kRowWarps;
  int64_t *idx = (int64_t *)(area + s.p.area.topk_idx);
  float *weights = (float *)(area + s.p.area.topk_weights);
#pragma unroll 1
  for (int64_t i = rows * K + role.j * kOthers + me; i < (int64_t)a.fill_to * K; i += role.g * kOthers)
    idx[i] = -1, weights[i] = 0.0f;
}

// One thread of the first block for a destination: what became of the call there, for the host and for the handle. The
// host is far: no mover may wait for this.
EPCY_DEVICE void tell_host(const Step &s, const epcy_cuda_dispatch &a, const Role &role, const Counts &counts,
                           uint32_t limit, int verdict) {
  if (role.d == s.me && !a.cached) {
    const int rows = verdict == EPCY_VERDICT_OK || verdict == EPCY_VERDICT_OVERFLOW ? counts.total : 0;
    *a.routing.num_recv = rows;
    const int own = counts.base[s.me * C], end = s.me + 1 < s.num_ranks ? counts.base[(s.me + 1) * C] : counts.total;
    if (s.p.ticket) s.p.report->own_base = own, s.p.report->own_count = end - own, s.tell(&s.p.report->num_rows, rows);
    else if ((uint32_t)rows > limit) s.p.report->late_rows = rows, s.p.report->late_limit = limit;
  }
  if (!s.p.ticket && verdict == EPCY_VERDICT_OVERFLOW)
    s.p.report->late_rank = role.d, s.p.report->late_rows = counts.total, s.p.report->late_limit = limit;
  s.report(role.d, verdict);
}

template <typename Id>
__global__ void __launch_bounds__(kThreads, 1)
    dispatch_rows(const __grid_constant__ epcy_cuda_dispatch a, const RowShape shape) {
  char *dynamic = aligned_shared();
  __shared__ Counts counts;
  __shared__ Share share;
  __shared__ int verdict, warp_total[kWarps];
  __shared__ int32_t tokens[kRowWarps][2 * kRowBatch];
  __shared__ unsigned long long first_bad;
  int *hist = (int *)(dynamic + shape.bytes());
  const Step s(a.peers);
  if (__syncthreads_or(s.broken())) return s.report_broken();
  const Role role(a, s.me, s.num_ranks);
  const int warp = threadIdx.x >> 5;
  if (blockIdx.x == 0) s.announce(a.header, a.limit, 0, EPCY_GRID(gridDim.x, a.num_peer_blocks, a.num_own_blocks));
  if (threadIdx.x == 0) verdict = EPCY_VERDICT_OK, first_bad = ~0ull;
  if (warp == kWarps - 1 && a.cached) share_evenly(s, a, role, &share);
  RowMover mover(dynamic, shape, tokens[0]);
  __syncthreads();

  if (!a.cached) {
    const int n = list_tokens<Id>(s, a, role, warp_total, &first_bad);
    publish_count<Id>(s, a, role, n, first_bad);
    if (threadIdx.x == 0) share_chunk(a, role, n, &share);
    __syncthreads();
  }
  // Rows are on their way into the ring while counts and headers are.
  const RowPath rows = {share.total, a.row_bytes, a.x, a.x_stride_bytes};
  auto token_of = [](int i) { return share.token(i); };
  if (mover.moves()) mover.prime(rows, token_of);
  s.gather(a.header, &verdict);
  const bool agreed = verdict != EPCY_VERDICT_BROKEN;
  if (!a.cached && verdict == EPCY_VERDICT_OK) gather_counts(s, role.d, &verdict, &counts);
  if (!a.cached) stamp(EPCY_SPAN_EXCHANGE); // that of the counts too
  const uint32_t theirs = s.header_value(role.d, 0), limit = s.header_value(role.d, 1);
  __syncthreads();
  if (warp == 0) {
    if (!a.cached && verdict == EPCY_VERDICT_OK) add_up(s, &counts);
    __syncwarp();
    if (threadIdx.x == 0 && !a.cached && verdict == EPCY_VERDICT_OK) {
      share.base = counts.base[s.me * C + role.j];
      if ((theirs & EPCY_HEADER_WAITS) && (uint32_t)counts.total > limit) verdict = EPCY_VERDICT_OVERFLOW;
    }
  }
  __syncthreads();
  const bool moves = verdict == EPCY_VERDICT_OK;
  char *area = a.peers.base[role.d] + a.peers.heap.receive[EPCY_HEADER_AREA(theirs)];
  if (mover.moves()) {
    const int64_t room = (int64_t)limit - share.base;
    const int num_fitting = room < 0 ? 0 : room < share.total ? (int)room : share.total;
    if (moves) mover.run(rows, token_of, area + a.peers.area.payload + share.base * a.row_bytes, num_fitting);
    else mover.give_up();
  } else if (warp >= kRowWarps) {
    const int me = threadIdx.x - 32 * kRowWarps;
    if (role.j == 0 && me == 0) tell_host(s, a, role, counts, limit, verdict);
    if (moves && me == 0) count_sent(s, a, role, share);
    if (!a.cached) {
      if (role.j == 0)
#pragma unroll 1
        for (int c = me; c < C; c += kOthers)
          a.routing.chunk_count[role.d * C + c] = moves ? counts.n[s.me * C + c] : 0,
                                             a.routing.chunk_base[role.d * C + c] =
                                                 moves ? counts.base[s.me * C + c] : 0;
      keep_routing<Id>(s, a, role, share.list[0], share.base, share.total, moves ? limit : 0, hist);
      if (role.d == s.me && moves) {
        for (int q = me; role.j == 0 && q < s.num_ranks * C; q += kOthers) a.routing.recv_count[q] = counts.n[q];
        sum_experts(s, a, role);
      }
    }
    if (role.d == s.me && role.j == 0 && moves)
      count_received(s, a.routing, a.cached ? (int)*a.routing.num_recv : counts.total,
                     EPCY_HEADER_AREA((uint32_t)a.header), a.cached, me, kOthers);
#pragma unroll 1
    for (int k = 0, base = share.base; moves && k < share.num_pieces; base += share.n[k++]) {
      const int room = (int)limit - base, n = share.n[k] < room ? share.n[k] : room > 0 ? room : 0;
      write_lanes<Id>(s, a, role.d, share.list[k], base, n, area);
    }
    if (role.d == s.me && agreed)
      fill_rows(s, a, role, area, !moves ? 0 : a.cached ? *a.routing.num_recv : counts.total);
  }
  s.finish(&verdict);
}

} // namespace

extern "C" int epcy_cuda_launch_dispatch(const epcy_cuda_dispatch *call, void *stream) {
  const int64_t hist_bytes = call->peers.num_local * 4;
  const RowShape shape = row_shape(call->row_bytes, hist_bytes);
  const int grid = call->num_peer_blocks * ((int)call->peers.shape.num_ranks - 1) + call->num_own_blocks;
  const size_t bytes = shape.bytes() + hist_bytes;
  return call->is_int64 ? launch_together(dispatch_rows<int64_t>, grid, kThreads, bytes, stream, *call, shape)
                        : launch_together(dispatch_rows<int32_t>, grid, kThreads, bytes, stream, *call, shape);
}

int epcy_cuda_load_dispatch() {
  const int error = allow_shared(dispatch_rows<int64_t>);
  return error ? error : allow_shared(dispatch_rows<int32_t>);
}
