// Dispatch between nodes: each token goes once to each rank of the own node by stores, and to other nodes by puts.
//
// Hierarchical: chunks of tokens go through a ring to the rank of the same place in the other node, which stores them to
// their final rows there. Direct: rows go to their final places, each with a flag, and the ring carries scales alone. In
// both a credit answers each chunk. Blocks that send, that receive and that store at home run side by side.
//
// Why this ends: a block that sends waits for credits of its channel alone, a block that receives for chunks of its, and
// both take their channels in ascending order. Of the lowest channel that is not done between two ranks, both blocks are at
// work on it: its next chunk is sent as soon as its slot is free, and a slot becomes free without waiting for anybody.
#include "put_nodes.cuh"

namespace {

using namespace nodes;

// Several rows' numbers, one for each chunk: what has to be waited for and done for each group and channel.
struct Sender {
  const NodeCall &s;
  const epcy_nodes_call &a;
  int warp, lane;
  EPCY_DEVICE explicit Sender(const NodeCall &s) : s(s), a(s.a), warp(threadIdx.x >> 5), lane(threadIdx.x & 31) {}

  EPCY_DEVICE bool channel(int group, int c) const {
    const Chunks chunks(s, group, c, __ldcg(a.nodes.own_count + group * a.wire.num_channels + c), a.num_scales * 4);
    const int32_t *list = a.nodes.own_list + (int64_t)group * s.M() + part_of(a.num_tokens, c, a.wire.num_channels);
#pragma unroll 1
    for (int k = 0; k < chunks.num_chunks(); k++) {
      const int n = chunks.size(k), first = k * chunks.chunk_tokens;
      if (!chunks.wait_free(k)) return false;
      char *stage = chunks.staged(k), *extra = stage + n * chunks.row;
      for (int i = warp; i < n; i += kWarps) {
        const int64_t t = list[first + i];
        copy_row(a.x + t * a.x_stride_bytes, stage + i * chunks.row, chunks.row);
        copy_numbers(a.scales + t * a.num_scales, a.num_scales, 1u, (float *)(extra + i * chunks.extra));
      }
      __threadfence_system(); // whoever carries it out reads it from memory
      __syncthreads();
      if (a.map.hierarchical) {
        chunks.put(k, 0, n * (chunks.row + chunks.extra));
      } else {
        for (int i = 0; i < n; i++) put_row(chunks, k, i, list[first + i]);
        if (a.num_scales) chunks.put(k, n * chunks.row, n * chunks.extra);
      }
    }
    const int64_t rows = (int64_t)chunks.num * (a.row_bytes + a.num_scales * 4);
    if (chunks.num) chunks.count_bytes(rows, 0);
    return chunks.drain();
  }
  EPCY_DEVICE void put_row(const Chunks &chunks, int k, int i, int t) const {
    const int to = chunks.peer();
    const int64_t row = __ldcg(a.routing.pos + (int64_t)t * s.num_ranks + to);
    char *const name = a.map.name[to];
    uint64_t *flag = (uint64_t *)(name + a.wire.row_flags) + chunks.there(k) * a.wire.chunk_tokens + i;
    put_block(name + s.area_at(to) + s.p.area.payload + row * a.row_bytes, chunks.staged(k) + i * chunks.row,
              a.row_bytes, flag, s.chunk_word(k), a.map.pe[to]);
  }
};

// What comes from a group's rank, to its final rows.
struct Receiver {
  const NodeCall &s;
  const epcy_nodes_call &a;
  int warp, lane;
  EPCY_DEVICE explicit Receiver(const NodeCall &s) : s(s), a(s.a), warp(threadIdx.x >> 5), lane(threadIdx.x & 31) {}

  // This lane's rank among those that rows are passed to, or -1.
  EPCY_DEVICE int target() const {
    if (!a.map.hierarchical) return lane == 0 ? s.me : -1;
    unsigned left = a.map.near_ranks;
    for (int i = 0; i < lane && left; i++) left &= left - 1;
    return left ? __ffs(left) - 1 : -1;
  }
  EPCY_DEVICE bool channel(int group, int c, int d) const {
    const Chunks chunks(s, group, c, __ldcg(a.nodes.feed_count + group * a.wire.num_channels + c), a.num_scales * 4);
    const int targets = a.map.hierarchical ? a.map.num_near : 1;
    const int T = __ldcg(a.nodes.tokens + chunks.peer());
    const int64_t at = (int64_t)group * s.M();
    const int32_t *list = a.nodes.feed_list + at + part_of(T, c, a.wire.num_channels);
    char *const area = d < 0 ? nullptr : s.p.base[d] + s.area_at(d);
#pragma unroll 1
    for (int k = 0; k < chunks.num_chunks(); k++) {
      const int n = chunks.size(k);
      if (!a.map.hierarchical && !wait_rows(chunks, k, n)) return false;
      if ((a.map.hierarchical || a.num_scales) && !chunks.wait_arrival(k)) return false;
      const char *here = chunks.arrived(k), *extra = here + n * chunks.row;
      for (int i = warp; i < n && (a.map.hierarchical || a.num_scales); i += kWarps) {
        const int64_t t = list[k * chunks.chunk_tokens + i];
        const int64_t row = d < 0 ? -1 : __ldcg(a.nodes.feed_rows + (at + t) * targets + lane);
        const unsigned who = __ballot_sync(~0u, row >= 0);
        if (a.map.hierarchical)
          copy_row(here + i * chunks.row, chunks.row, who, area + s.p.area.payload + row * a.row_bytes);
        copy_numbers((const float *)(extra + i * chunks.extra), a.num_scales, who,
                     (float *)(area + s.p.area.scales) + row * a.num_scales);
      }
      __syncthreads();
      if (threadIdx.x == 0) chunks.give_credit(k);
    }
    return true;
  }
  EPCY_DEVICE bool wait_rows(const Chunks &chunks, int k, int n) const {
    bool ok = true;
    for (int i = threadIdx.x; i < n && ok; i += kBlock)
      ok = s.wait_exact(a.wire.row_flags + (s.slot(chunks.group, chunks.channel, k) * a.wire.chunk_tokens + i) * 8,
                        s.chunk_word(k), EPCY_CUDA_FORWARD, chunks.peer());
    return !__syncthreads_or(!ok);
  }
};

// All threads: a channel's tokens to the ranks of the own node, to their first rows.
EPCY_DEVICE void store_at_home(const NodeCall &s, int c) {
  const epcy_nodes_call &a = s.a;
  const int lane = threadIdx.x & 31, channels = a.wire.num_channels;
  const int begin = part_of(a.num_tokens, c, channels), end = part_of(a.num_tokens, c + 1, channels);
  const bool near = lane < s.num_ranks && s.is_near(lane);
  char *const area = near ? s.p.base[lane] + s.area_at(lane) : nullptr;
  uint64_t moved = 0;
  for (int64_t t = begin + (threadIdx.x >> 5); t < end; t += kWarps) {
    const int64_t row = near ? __ldcg(a.routing.pos + t * s.num_ranks + lane) : -1;
    const unsigned who = __ballot_sync(~0u, row >= 0);
    moved += row >= 0 && lane != s.me ? a.row_bytes + a.num_scales * 4 : 0;
    copy_row(a.x + t * a.x_stride_bytes, a.row_bytes, who, area + s.p.area.payload + row * a.row_bytes);
    copy_numbers(a.scales + t * a.num_scales, a.num_scales, who,
                 (float *)(area + s.p.area.scales) + row * a.num_scales);
  }
  if (moved) add_to(&counters_of(s.p)->bytes_moved, moved);
}

__global__ void __launch_bounds__(kBlock, 2) move_rows(const __grid_constant__ epcy_nodes_call a) {
  const NodeCall s(a);
  if (s.judge() != EPCY_VERDICT_OK) return;
  const Part part(a);
  const Sender sender(s);
  const Receiver receiver(s);
  const int d = receiver.target();
  bool ok = true;
  for (int c = part.turn; c < a.wire.num_channels && ok; c += a.num_blocks) {
    if (part.sends) ok = sender.channel(part.group, c);
    else if (part.receives) ok = receiver.channel(part.group, c, d);
    else store_at_home(s, c);
  }
  if (ok) s.finish_near();
  s.note(EPCY_SPAN_SEND);
}

// A share of warps, `at`-th of `all`, of a rank's own area: padding and rows past the count.
EPCY_DEVICE void fill_rows(const NodeCall &s, int at, int all, char *area, int64_t num_rows, int64_t came) {
  const epcy_nodes_call &a = s.a;
  const int lane = threadIdx.x & 31, lanes = s.by_expert() ? 1 : s.K();
  int64_t *idx = (int64_t *)(area + s.p.area.topk_idx);
  float *weights = (float *)(area + s.p.area.topk_weights), *scales = (float *)(area + s.p.area.scales);
  for (int e = 0; s.by_expert() && num_rows && a.alignment > 1 && e < s.L(); e++) {
    const int64_t from = __ldcg(a.routing.offsets + e) + __ldcg(a.routing.experts + e),
                  end = __ldcg(a.routing.offsets + e + 1);
    for (int64_t row = from + at; row < end && row < num_rows; row += all) {
      uint4 *payload = (uint4 *)(area + s.p.area.payload + row * a.row_bytes);
      for (int64_t v = lane; v < a.row_bytes / 16; v += 32) payload[v] = make_uint4(0, 0, 0, 0);
      for (int v = lane; v < a.num_scales; v += 32) scales[row * a.num_scales + v] = 0.0f;
      if (lane == 0) idx[row] = -1, weights[row] = 0.0f;
    }
  }
  for (int64_t q = came * lanes + at * 32 + lane; q < (int64_t)a.fill_to * lanes; q += (int64_t)all * 32)
    idx[q] = -1, weights[q] = 0.0f;
}

// When all rows have come: ids and weights beside them, and in the expert layout the other rows of each token. A warp a token.
__global__ void __launch_bounds__(kBlock) complete_rows(const __grid_constant__ epcy_nodes_call a) {
  const NodeCall s(a);
  const int verdict = s.judge(), lane = threadIdx.x & 31, R = s.num_ranks, K = s.K(), L = s.L(), M = s.M();
  if (verdict == EPCY_VERDICT_BROKEN) return;
  const bool good = verdict == EPCY_VERDICT_OK;
  char *area = s.own() + s.area_at(s.me);
  const int at = blockIdx.x * kWarps + (threadIdx.x >> 5), all = gridDim.x * kWarps;
  const int64_t came = good ? __ldcg(a.routing.num_recv) : 0;
  const bool refused = (a.header & EPCY_HEADER_WAITS) && came > (int)a.limit;
  fill_rows(s, at, all, area, refused ? 0 : came < (int)a.limit ? came : (int)a.limit, came);
  int64_t *idx = (int64_t *)(area + s.p.area.topk_idx);
  float *weights = (float *)(area + s.p.area.topk_weights), *scales = (float *)(area + s.p.area.scales);
  char *payload = area + s.p.area.payload;
  for (int from = 0; good && from < R; from++) {
    const int T = __ldcg(a.nodes.tokens + from);
    const float *given = s.weights(from);
    for (int t = at; t < T; t += all) {
      const int64_t token = (int64_t)from * M + t;
      const int64_t first = __ldcg(a.nodes.first + token);
      if (first < 0) continue;
      for (int k0 = 0; k0 < K; k0 += 32) {
        const int k = k0 + lane;
        const int id = k < K ? __ldcg(a.nodes.ids + token * K + k) : -1;
        const int local = id >= 0 && id / L == s.me ? id - s.me * L : -1;
        const float weight = local >= 0 && given ? __ldcg(given + (int64_t)t * K + k) : 0.0f;
        int row = -1;
        if (!s.by_expert()) {
          if (k < K) idx[first * K + k] = local;
          if (k < K && given) weights[first * K + k] = weight;
          continue;
        }
        if (local >= 0) row = __ldcg(a.nodes.lane_rows + token * K + k);
        if (row >= 0) idx[row] = local;
        if (row >= 0 && given) weights[row] = weight;
        const unsigned who = __ballot_sync(~0u, row >= 0 && row != first);
        copy_row(payload + first * a.row_bytes, a.row_bytes, who, payload + row * a.row_bytes);
        copy_numbers(scales + first * a.num_scales, a.num_scales, who, scales + (int64_t)row * a.num_scales);
      }
    }
  }
  s.note(EPCY_SPAN_FAN_OUT);
}

} // namespace

extern "C" int epcy_nodes_launch_dispatch(const epcy_nodes_call *a, void *stream) {
  const int error = launch_together(move_rows, num_parts(*a), kBlock, 0, stream, *a);
  return error ? error : launch_apart(complete_rows, EPCY_NODES_USUAL_BLOCKS, kBlock, stream, *a);
}

int epcy_nodes_dispatch_resident(int *each) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(each, move_rows, kBlock, 0);
}
int epcy_nodes_load_dispatch() {
  cudaFuncAttributes ignored;
  const int error = allow_shared(move_rows);
  return error ? error : cudaFuncGetAttributes(&ignored, complete_rows);
}
