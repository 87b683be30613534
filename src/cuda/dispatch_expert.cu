// Dispatch in the expert layout: a row for each lane, grouped by local expert.
//
// Ranks count lanes by (chunk, expert); the experts' rank answers with the first row of each chunk at each expert, so a
// lane's row is that start plus its ordinal. A token crosses a link once, to the row of its first lane at that rank;
// when everything has come, the receiver copies it to its other rows along the chains of links.cuh, and fills padding.
#include "links.cuh"
#include "place.cuh"

namespace {

struct Own {
  int d, j, g; // destination, which of its blocks, how many; a block that only copies has no chunk: j is C
};

// The warps that do not move rows: ids, weights, links and scales of chunk c's rows at rank d.
template <typename Id>
EPCY_DEVICE void write_lanes(const Step &s, const epcy_cuda_dispatch &a, int c, int d, char *area) {
  const int K = (int)a.peers.shape.num_topk, me = threadIdx.x - 32 * kMoverWarps, n = a.routing.chunk_count[d * C + c];
  const int32_t *list = a.routing.list + (int64_t)d * a.num_tokens + first_token(a, c);
  int64_t *idx = (int64_t *)(area + a.peers.area.topk_idx);
  float *weights = (float *)(area + a.peers.area.topk_weights), *scales = (float *)(area + a.peers.area.scales);
  int32_t *links = a.cached ? nullptr : links_of(a.peers, area);
  for (int i = me; i < n; i += kOthers) {
    int before = -1;
    uint32_t flag = 0;
    for (int k = 0; k < K; k++) {
      const int64_t at = (int64_t)list[i] * K + k;
      const int local = local_id<Id>(s, a, at, d), row = local < 0 ? -1 : a.routing.lane_row[at];
      if (row < 0) continue;
      idx[row] = local;
      if (a.topk_weights) weights[row] = a.topk_weights[at];
      if (links && before >= 0) links[before] = (int)((uint32_t)(row + 1) | flag), flag = kNotFirst;
      before = row;
    }
    if (links && before >= 0) links[before] = (int)flag;
  }
  for (int q = me; a.scales && q < n * a.num_scales; q += kOthers) {
    const int i = q / a.num_scales, v = q - i * a.num_scales, row = a.routing.pos[(int64_t)list[i] * s.num_ranks + d];
    if (row >= 0)
      scales[(int64_t)row * a.num_scales + v] = ((const float *)a.scales)[(int64_t)list[i] * a.num_scales + v];
  }
}

// All blocks, when all rows have come: keep the links, and copy each token's first row to its others. A warp a token.
EPCY_DEVICE void copy_rows(const epcy_cuda_dispatch &a, char *area, int64_t num_rows) {
  const int lane = threadIdx.x & 31, all = gridDim.x * kWarps;
  const int32_t *links = a.cached ? a.routing.links : links_of(a.peers, area);
  char *x = area + a.peers.area.payload;
  float *scales = (float *)(area + a.peers.area.scales);
  for (int64_t begin = ((int64_t)blockIdx.x * kWarps + (threadIdx.x >> 5)) * kBatch; links && begin < num_rows;
       begin += (int64_t)all * kBatch) {
    const int at = lane < kBatch && begin + lane < num_rows ? (int)begin + lane : -1;
    const Chain mine(links, at);
    if (!a.cached && at >= 0) a.routing.links[at] = mine.link;
    for (unsigned heads = __ballot_sync(~0u, mine.row[1] >= 0); heads; heads &= heads - 1) {
      const Chain chain(mine, __ffs(heads) - 1);
      const char *from = x + chain.row[0] * a.row_bytes;
      for (int64_t b = lane * 16; b < a.row_bytes; b += 4 * 512) {
        uint4 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (b + i * 512 < a.row_bytes) v[i] = __ldcg((const uint4 *)(from + b + i * 512));
        auto store = [&](int row) {
#pragma unroll
          for (int i = 0; i < 4; i++)
            if (b + i * 512 < a.row_bytes) *(uint4 *)(x + row * a.row_bytes + b + i * 512) = v[i];
        };
#pragma unroll
        for (int j = 1; j < kChain; j++)
          if (chain.row[j] >= 0) store(chain.row[j]);
        for (int row = chain.rest; row >= 0; row = next_row(load_link(links, row))) store(row);
      }
      for (int v = lane; v < a.num_scales; v += 32) {
        const float scale = __ldcg(scales + (int64_t)chain.row[0] * a.num_scales + v);
#pragma unroll
        for (int j = 1; j < kChain; j++)
          if (chain.row[j] >= 0) scales[(int64_t)chain.row[j] * a.num_scales + v] = scale;
        for (int row = chain.rest; row >= 0; row = next_row(load_link(links, row)))
          scales[(int64_t)row * a.num_scales + v] = scale;
      }
    }
  }
}

// All threads of one block, before others copy: padding is in no chain.
EPCY_DEVICE void unlink_padding(const epcy_cuda_dispatch &a, char *area) {
  const int64_t L = epcy_num_local_experts(&a.peers.shape);
  int32_t *links = links_of(a.peers, area);
  for (int64_t e = 0; links && a.alignment > 1 && e < L; e++) {
    const int64_t end = a.routing.offsets[e + 1];
    for (int64_t row = a.routing.offsets[e] + a.routing.experts[e] + threadIdx.x; row < end && row < a.limit;
         row += kThreads)
      links[row] = (int32_t)kNotFirst;
  }
}

// All blocks: zero the padding of every group below row num_rows, and say that rows from `tail` on hold nothing.
EPCY_DEVICE void fill_rows(const epcy_cuda_dispatch &a, char *area, int64_t num_rows, int64_t tail) {
  const int64_t L = epcy_num_local_experts(&a.peers.shape);
  int64_t *idx = (int64_t *)(area + a.peers.area.topk_idx);
  float *weights = (float *)(area + a.peers.area.topk_weights), *scales = (float *)(area + a.peers.area.scales);
  for (int64_t e = 0; num_rows && a.alignment > 1 && e < L; e++) {
    const int64_t from = __ldcg(a.routing.offsets + e) + __ldcg(a.routing.experts + e),
                  end = __ldcg(a.routing.offsets + e + 1);
    const int64_t to = end < num_rows ? end : num_rows;
    for (int64_t row = from + (blockIdx.x + e) % gridDim.x; row < to; row += gridDim.x) {
      uint4 *payload = (uint4 *)(area + a.peers.area.payload + row * a.row_bytes);
      for (int64_t v = threadIdx.x; v < a.row_bytes / 16; v += kThreads) payload[v] = make_uint4(0, 0, 0, 0);
      for (int v = threadIdx.x; v < a.num_scales; v += kThreads) scales[row * a.num_scales + v] = 0.0f;
      if (threadIdx.x == 0) idx[row] = -1, weights[row] = 0.0f;
    }
  }
  for (int64_t row = tail + blockIdx.x * kThreads + threadIdx.x; row < a.fill_to; row += (int64_t)gridDim.x * kThreads)
    idx[row] = -1, weights[row] = 0.0f;
}

template <typename Id>
__global__ void __launch_bounds__(kThreads, 1)
    dispatch_lanes(const __grid_constant__ epcy_cuda_dispatch a, const MoverShape shape, int segments) {
  extern __shared__ char unaligned[];
  char *dynamic = aligned_shared(unaligned);
  __shared__ Own b;
  __shared__ int verdict, lower, total, own[C], warp_total[kThreads / 32];
  __shared__ unsigned long long first_bad;
  int *table = (int *)(dynamic + shape.bytes());
  const Step s(a.peers);
  if (s.broken()) return s.report_broken();
  const int R = s.num_ranks, block = blockIdx.x, to_peers = a.num_peer_blocks * (R - 1),
            senders = to_peers + a.num_own_blocks;
  if (block == 0) s.announce(a.header, a.limit, 0);
  if (threadIdx.x == 0) {
    if (block < to_peers)
      b = {(s.me + 1 + block / a.num_peer_blocks) % R, block % a.num_peer_blocks, a.num_peer_blocks};
    else if (block < senders) b = {s.me, block - to_peers, a.num_own_blocks};
    else b = {s.me, C, 1};
    verdict = EPCY_VERDICT_OK, lower = total = 0;
  }
  Mover mover(dynamic, shape);
  __syncthreads();

  if (!a.cached)
    for (int c = b.j; c < C; c += b.g) {
      const int n = count_chunk<Id>(s, a, c, b.d, table, warp_total, &first_bad);
      if (threadIdx.x == 0) a.routing.chunk_count[b.d * C + c] = n;
      order_lanes<Id>(s, a, c, b.d, table, segments);
    }
  s.gather(a.header, &verdict);
  if (!a.cached && verdict == EPCY_VERDICT_OK) find_bases(s, b.d, &verdict, &lower, &total, own); // for bad ids
  __syncthreads();
  const bool agreed = verdict == EPCY_VERDICT_OK, first_of_own = b.j == 0 && b.d == s.me; // agreed: on all ranks
  __syncthreads();
  char *own_area = a.peers.base[s.me] + a.peers.heap.receive[EPCY_HEADER_AREA((uint32_t)a.header)];
  if (!a.cached && agreed && first_of_own) {
    place_experts(s, a, table, &verdict);
    unlink_padding(a, own_area);
  }
  if (!a.cached && !agreed && first_of_own)
    for (int64_t e = threadIdx.x; e <= epcy_num_local_experts(&a.peers.shape); e += kThreads) {
      a.routing.offsets[e] = 0;
      if (e == 0) *a.routing.num_recv = 0;
      else a.routing.experts[e - 1] = 0;
    }
  const uint32_t theirs = s.header_value(b.d, 0), limit = s.header_value(b.d, 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    bool ok = true;
    const uint32_t rows =
        a.cached || !agreed ? 0 : s.wait(s.mark(s.me, b.d, EPCY_MARK_ROWS), EPCY_CUDA_STARTS, b.d, &ok);
    if (!ok) atomicMax(&verdict, (int)EPCY_VERDICT_BROKEN);
    if (verdict == EPCY_VERDICT_OK && (theirs & EPCY_HEADER_WAITS) && rows > limit) verdict = EPCY_VERDICT_OVERFLOW;
    if (b.j == 0) s.report(b.d, verdict);
  }
  for (int c = b.j; !a.cached && c < C; c += b.g) place_chunk<Id>(s, a, c, b.d, limit, table, &verdict);
  __syncthreads();

  char *const area = a.peers.base[b.d] + a.peers.heap.receive[EPCY_HEADER_AREA(theirs)];
  if (verdict == EPCY_VERDICT_OK)
    for (int c = b.j; c < C; c += b.g) {
      const int32_t *list = a.routing.list + (int64_t)b.d * a.num_tokens + first_token(a, c),
                    *pos = a.routing.pos + b.d;
      if ((threadIdx.x >> 5) < kMoverWarps)
        mover.scatter(
            a.x, a.x_stride_bytes, list, a.routing.chunk_count[b.d * C + c],
            [pos, R](int, int token) { return pos[(int64_t)token * R]; }, area + a.peers.area.payload, a.row_bytes);
      else write_lanes<Id>(s, a, c, b.d, area);
    }
  if ((threadIdx.x >> 5) < kMoverWarps) mover.drain();
  if (agreed) s.together(0, &verdict);

  // The receiver's part: everybody's rows are here.
  if (verdict != EPCY_VERDICT_BROKEN) {
    const int64_t rows = agreed ? __ldcg(a.routing.num_recv) : 0;
    const bool refused = (a.header & EPCY_HEADER_WAITS) && rows > a.limit;
    const int64_t num_rows = refused ? 0 : rows < a.limit ? rows : a.limit;
    copy_rows(a, own_area, num_rows);
    fill_rows(a, own_area, num_rows, rows);
  }
  s.finish();
}

} // namespace

extern "C" int epcy_cuda_launch_dispatch_expert(const epcy_cuda_dispatch *call, void *stream) {
  const int64_t num_local = epcy_num_local_experts(&call->peers.shape);
  const int segments = num_local <= 1024 ? kWarps : 1;
  const int64_t table_bytes = segments * num_local * 4;
  const MoverShape shape = mover_shape(call->row_bytes, kMoverWarps, table_bytes);
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
