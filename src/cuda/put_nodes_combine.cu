// Combine between nodes: who hears from a rank sums the rows of its tokens in its own node, rounds, and puts the sums back;
// the source adds them to what it reads in its own node, in the order of nodes (hierarchical) or of ranks (direct).
//
// Why this ends: as in dispatch; the blocks that take sums need one chunk of each group at a time, never two.
#include "numeric.cuh"
#include "put_nodes.cuh"

namespace {

using namespace nodes;

// ---- expert layout: each token's rows here, weighted, in the order of lanes. A warp a token.
template <int Dtype> __global__ void __launch_bounds__(kBlock) sum_lanes(const __grid_constant__ epcy_nodes_call a) {
  const NodeCall s(a);
  if (s.judge() != EPCY_VERDICT_OK) return;
  const int lane = threadIdx.x & 31, K = s.K(), L = s.L(), M = s.M();
  for (int from = 0; from < s.num_ranks; from++) {
    const int T = __ldcg(a.nodes.tokens + from);
    const float *weights = s.weights(from);
    for (int t = blockIdx.x * kWarps + (threadIdx.x >> 5); t < T; t += gridDim.x * kWarps) {
      const int64_t token = (int64_t)from * M + t, head = __ldcg(a.nodes.first + token);
      if (head < 0) continue;
      for (int64_t at = lane * 16; at - lane * 16 < a.row_bytes; at += 512) {
        float acc[Vector<Dtype>::kElements] = {};
        for (int k = 0; k < K && at < a.row_bytes; k++) {
          const int id = __ldcg(a.nodes.ids + token * K + k);
          if (id < 0 || id / L != s.me) continue;
          const int64_t row = __ldcg(a.nodes.lane_rows + token * K + k);
          if (row < 0) continue;
          const float w = weights ? __ldcg(weights + (int64_t)t * K + k) : 1.0f;
          float x[Vector<Dtype>::kElements];
          Vector<Dtype>::load(*(const uint4 *)(a.x + row * a.x_stride_bytes + at), x);
#pragma unroll
          for (int i = 0; i < Vector<Dtype>::kElements; i++) acc[i] = __fadd_rn(acc[i], __fmul_rn(w, x[i]));
        }
        if (at < a.row_bytes) *(uint4 *)(s.own() + a.y_offset + head * a.row_bytes + at) = Vector<Dtype>::round(acc);
      }
    }
  }
}
// One block: all ranks of the node have made their sums.
__global__ void __launch_bounds__(32) meet_near(const __grid_constant__ epcy_nodes_call a) {
  const NodeCall s(a);
  if (s.judge() != EPCY_VERDICT_OK) return;
  const int r = threadIdx.x;
  if (r < s.num_ranks && s.is_near(r)) {
    __threadfence_system();
    store_word_release(s.mark(r, s.me, 0), s.word(0));
    bool ok = true;
    s.wait(s.mark(s.me, r, 0), EPCY_CUDA_DATA, r, &ok);
  }
  s.note(EPCY_SPAN_SEND);
}

// A rank's rows, and the weights beside them, of the own node.
struct Rows {
  const char *at;
  int64_t stride;
  EPCY_DEVICE Rows(const NodeCall &s, int r) {
    const bool apart = r == s.me && s.a.own_rows;
    at = apart ? s.a.own_rows : s.p.base[r] + (int64_t)__ldcg(&s.record(r)->y_at) * 128;
    stride = apart ? s.a.own_stride_bytes : s.a.row_bytes;
  }
};
EPCY_DEVICE float weight_of(const NodeCall &s, int r, int64_t row, int k) {
  return load_foreign((const float *)(s.p.base[r] + (int64_t)__ldcg(&s.record(r)->weights_at) * 128) + row * s.K() + k);
}

// A whole warp: the sum of rows of the own node, which lanes know by rank, from +0. False: there is none.
template <int Dtype> EPCY_DEVICE void sum_near(unsigned who, const char *mine, int64_t at, bool has, float *acc) {
#pragma unroll 1
  for (unsigned left = who; left; left &= left - 1) {
    const char *row = (const char *)__shfl_sync(~0u, (unsigned long long)mine, __ffs(left) - 1);
    if (has) Vector<Dtype>::add(acc, __ldcg((const uint4 *)(row + at)));
  }
}

// A whole warp: rows that it reads of other ranks of the own node, for the statistics.
EPCY_DEVICE void count_pulled(const NodeCall &s, unsigned rows) {
  if (rows && (threadIdx.x & 31) == 0) add_to(&counters_of(s.p)->bytes_moved, (int64_t)__popc(rows) * s.a.row_bytes);
}

// ---- to other nodes: sums of a group's rank's tokens
template <int Dtype> struct Relay {
  const NodeCall &s;
  const epcy_nodes_call &a;

  // This lane's rank of those that may hold rows, or -1.
  EPCY_DEVICE int holder() const {
    const int lane = threadIdx.x & 31;
    if (!a.map.hierarchical) return lane == 0 ? s.me : -1;
    unsigned left = a.map.near_ranks;
    for (int i = 0; i < lane && left; i++) left &= left - 1;
    return left ? __ffs(left) - 1 : -1;
  }
  EPCY_DEVICE bool channel(int group, int c, int r) const {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, K = s.K(), L = s.L();
    const int extra_bytes = a.out_weights || has_weights() ? K * 4 : 0;
    const Chunks chunks(s, group, c, __ldcg(a.nodes.feed_count + group * a.wire.num_channels + c), extra_bytes);
    const int targets = a.map.hierarchical ? a.map.num_near : 1, T = __ldcg(a.nodes.tokens + chunks.peer());
    const int64_t first = (int64_t)group * s.M(), source = (int64_t)chunks.peer() * s.M();
    const int32_t *list = a.nodes.feed_list + first + part_of(T, c, a.wire.num_channels);
#pragma unroll 1
    for (int k = 0; k < chunks.num_chunks(); k++) {
      const int n = chunks.size(k);
      if (!chunks.wait_free(k)) return false;
      char *stage = chunks.staged(k);
      for (int i = warp; i < n; i += kWarps) {
        const int64_t t = list[k * chunks.chunk_tokens + i];
        const int64_t row = r < 0 ? -1 : __ldcg(a.nodes.feed_rows + (first + t) * targets + lane);
        const unsigned who = __ballot_sync(~0u, row >= 0);
        const char *mine = nullptr;
        if (row >= 0) {
          const Rows rows(s, r);
          mine = rows.at + row * rows.stride;
        }
        if (a.map.hierarchical) {
          count_pulled(s, who & ~__ballot_sync(~0u, r == s.me));
          for (int64_t at = lane * 16; at - lane * 16 < a.row_bytes; at += 512) {
            float acc[Vector<Dtype>::kElements] = {};
            sum_near<Dtype>(who, mine, at, at < a.row_bytes, acc);
            if (at < a.row_bytes) *(uint4 *)(stage + i * chunks.row + at) = Vector<Dtype>::round(acc);
          }
        } else {
          copy_row((const char *)__shfl_sync(~0u, (unsigned long long)mine, 0), stage + i * chunks.row, a.row_bytes);
        }
        float *weights = (float *)(stage + n * chunks.row + i * chunks.extra);
        for (int k0 = 0; extra_bytes && k0 < K; k0 += 32) { // each lane's, from the rank that owns it
          const int lane_of = k0 + lane, id = lane_of < K ? __ldcg(a.nodes.ids + (source + t) * K + lane_of) : -1;
          const int owner = id < 0 ? -1 : id / L;
          const bool here = owner >= 0 && (a.map.hierarchical ? s.is_near(owner) : owner == s.me);
          const int seat = here && a.map.hierarchical ? __popc(a.map.near_ranks & ((1u << owner) - 1)) : 0;
          const int64_t at = __shfl_sync(~0u, (long long)row, seat);
          if (lane_of < K) weights[lane_of] = here && at >= 0 ? weight_of(s, owner, at, lane_of) : 0.0f;
        }
      }
      __threadfence_system();
      __syncthreads();
      chunks.put(k, 0, n * (chunks.row + chunks.extra));
    }
    if (chunks.num) chunks.count_bytes((int64_t)chunks.num * a.row_bytes, (int64_t)chunks.num * extra_bytes);
    return chunks.drain();
  }
  EPCY_DEVICE bool has_weights() const { return !s.by_expert() && EPCY_HEADER_WEIGHTS(a.header); }
};

// ---- at the source: a channel's tokens, as many at a time as need one chunk of each group
template <int Dtype> struct Taker {
  const NodeCall &s;
  const epcy_nodes_call &a;
  int *taken; // shared, by group: messages of the channel that have been used
  int extra_bytes;

  EPCY_DEVICE Chunks chunks(int g, int c) const {
    return Chunks(s, g, c, __ldcg(a.nodes.own_count + g * a.wire.num_channels + c), extra_bytes);
  }
  // A whole warp: how many tokens from `first` on.
  EPCY_DEVICE int batch(int first, int end) const {
    const int lane = threadIdx.x & 31, t = first + lane, N = a.wire.chunk_tokens;
    bool fits = t < end;
    for (int g = 0; g < a.wire.num_groups && fits; g++)
      fits = __ldcg(a.nodes.own_order + (int64_t)g * s.M() + t) < (taken[g] / N + 1) * N;
    const unsigned not_so = ~__ballot_sync(~0u, fits);
    return not_so ? __ffs(not_so) - 1 : 32;
  }
  EPCY_DEVICE bool channel(int c) const {
    const int warp = threadIdx.x >> 5, G = a.wire.num_groups, N = a.wire.chunk_tokens;
    const int begin = part_of(a.num_tokens, c, a.wire.num_channels),
              end = part_of(a.num_tokens, c + 1, a.wire.num_channels);
    __syncthreads();
    if ((int)threadIdx.x < G) taken[threadIdx.x] = 0;
    __syncthreads();
    for (int first = begin, n; first < end; first += n) {
      n = batch(first, end);
      bool ok = true;
      int uses = 0; // of this thread's group
      const int g = threadIdx.x;
      if (g < G) {
        for (int i = 0; i < n; i++) uses += __ldcg(a.nodes.own_order + (int64_t)g * s.M() + first + i) >= 0;
        const int chunk = taken[g] / N;
        if (uses)
          ok = s.wait_exact(a.wire.flags + s.slot(g, c, chunk) * 8, s.chunk_word(chunk), EPCY_CUDA_FORWARD,
                            a.map.peer[g]);
      }
      if (__syncthreads_or(!ok)) return false;
      for (int i = warp; i < n; i += kWarps) token(first + i, c);
      __syncthreads();
      if (uses) {
        taken[g] += uses;
        const Chunks all = chunks(g, c);
        if (taken[g] % N == 0 || taken[g] == all.num) all.give_credit((taken[g] - 1) / N);
      }
      __syncthreads();
    }
    return true;
  }
  // Where the message of a token is that came from a group; NULL: none. `weights`: what is beside it.
  EPCY_DEVICE const char *message(int g, int64_t t, int c, const float **weights) const {
    const int order = __ldcg(a.nodes.own_order + (int64_t)g * s.M() + t);
    if (order < 0) return nullptr;
    const Chunks all = chunks(g, c);
    const int chunk = order / all.chunk_tokens, i = order % all.chunk_tokens;
    const char *at = all.arrived(chunk);
    *weights = (const float *)(at + all.size(chunk) * all.row + i * all.extra);
    return at + i * all.row;
  }
  // A whole warp.
  EPCY_DEVICE void token(int64_t t, int c) const {
    const int lane = threadIdx.x & 31, R = s.num_ranks, K = s.K();
    const int64_t row = lane < R && s.is_near(lane) ? __ldcg(a.routing.pos + t * R + lane) : -1;
    const unsigned near = __ballot_sync(~0u, row >= 0);
    count_pulled(s, near & ~(1u << s.me));
    const char *mine = nullptr; // of rank `lane`, in the own node
    if (row >= 0) {
      const Rows rows(s, lane);
      mine = rows.at + row * rows.stride;
    }
    const float *weights = nullptr;
    const char *came = lane < a.wire.num_groups ? message(lane, t, c, &weights) : nullptr; // of group `lane`
    for (int64_t at = lane * 16; at - lane * 16 < a.row_bytes; at += 512) {
      const bool has = at < a.row_bytes;
      float acc[Vector<Dtype>::kElements] = {};
      for (int b = 0; b < 2 && has; b++)
        if (a.bias[b]) Vector<Dtype>::add(acc, *(const uint4 *)(a.bias[b] + t * a.row_bytes + at));
      for (int i = 0; i < a.map.num_steps; i++) {
        const int step = a.map.order[i];
        if (step >= 0) {
          const char *from = (const char *)__shfl_sync(~0u, (unsigned long long)came, step);
          if (from && has) Vector<Dtype>::add(acc, __ldcg((const uint4 *)(from + at)));
        } else if (step != EPCY_NODES_OWN_NODE) {
          sum_near<Dtype>(near & 1u << (-2 - step), mine, at, has, acc);
        } else if (near) {
          float sum[Vector<Dtype>::kElements] = {};
          sum_near<Dtype>(near, mine, at, has, sum);
          if (has) Vector<Dtype>::add(acc, Vector<Dtype>::round(sum));
        }
      }
      if (has) *(uint4 *)(a.out + t * a.row_bytes + at) = Vector<Dtype>::round(acc);
    }
    for (int k0 = 0; a.out_weights && k0 < K; k0 += 32) {
      const int k = k0 + lane;
      const int64_t id = k < K ? a.lane_ids[t * K + k] : -1;
      const int owner = id < 0 ? -1 : (int)id / s.L(), group = owner < 0 ? -1 : a.map.group_of[owner];
      const int64_t at = __shfl_sync(~0u, (long long)row, owner < 0 ? 0 : owner);
      const float *beside = (const float *)__shfl_sync(~0u, (unsigned long long)weights, group < 0 ? 0 : group);
      float w = 0.0f;
      if (owner >= 0 && group < 0 && at >= 0) w = weight_of(s, owner, at, k);
      if (group >= 0 && beside) w = __ldcg(beside + k);
      if (k < K) a.out_weights[t * K + k] = w;
    }
  }
};

template <int Dtype>
__global__ void __launch_bounds__(kBlock, 2) bring_back(const __grid_constant__ epcy_nodes_call a) {
  __shared__ int taken[EPCY_MAX_RANKS];
  const NodeCall s(a);
  const int verdict = s.judge();
  if (verdict != EPCY_VERDICT_OK) return;
  const Part part(a);
  const Relay<Dtype> relay = {s, a};
  const Taker<Dtype> taker = {s, a, taken, relay.has_weights() ? s.K() * 4 : 0};
  const int r = relay.holder();
  bool ok = true;
  if (part.sends)
    for (int c = part.turn; c < a.wire.num_channels && ok; c += a.num_blocks) ok = relay.channel(part.group, c, r);
  else // the blocks that receive in a dispatch take sums too
    for (int c = part.turn + a.num_blocks * (part.receives ? 1 + part.group : 0); c < a.wire.num_channels && ok;
         c += a.num_blocks * (1 + a.wire.num_groups))
      ok = taker.channel(c);
  if (ok) s.finish_near();
  s.note(EPCY_SPAN_REDUCE);
}

template <typename Kernel> Kernel kernel_of(int dtype, Kernel bf16, Kernel fp16, Kernel fp32) {
  return dtype == kBf16 ? bf16 : dtype == kFp16 ? fp16 : fp32;
}

} // namespace

extern "C" int epcy_nodes_launch_sums(const epcy_nodes_call *a, void *stream) {
  const auto kernel = kernel_of(a->dtype, sum_lanes<kBf16>, sum_lanes<kFp16>, sum_lanes<kFp32>);
  const int error = launch_apart(kernel, EPCY_NODES_USUAL_BLOCKS, kBlock, stream, *a);
  return error ? error : launch_apart(meet_near, 1, 32, stream, *a);
}
extern "C" int epcy_nodes_launch_combine(const epcy_nodes_call *a, void *stream) {
  const auto kernel = kernel_of(a->dtype, bring_back<kBf16>, bring_back<kFp16>, bring_back<kFp32>);
  return launch_together(kernel, num_parts(*a), kBlock, 0, stream, *a);
}

int epcy_nodes_dispatch_resident(int *each);
extern "C" int epcy_nodes_resident(int *each) {
  int e = epcy_nodes_dispatch_resident(each);
  for (auto kernel : {bring_back<kBf16>, bring_back<kFp16>, bring_back<kFp32>}) {
    int most = 0;
    if (!e) e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&most, kernel, kBlock, 0);
    if (!e && most < *each) *each = most;
  }
  return e;
}

int epcy_nodes_load_record();
int epcy_nodes_load_plan();
int epcy_nodes_load_dispatch();
extern "C" int epcy_nodes_load(void) {
  cudaFuncAttributes ignored;
  int e = cudaFuncGetAttributes(&ignored, meet_near);
  for (auto kernel :
       {sum_lanes<kBf16>, sum_lanes<kFp16>, sum_lanes<kFp32>, bring_back<kBf16>, bring_back<kFp16>, bring_back<kFp32>})
    if (!e) e = cudaFuncGetAttributes(&ignored, kernel);
  if (!e) e = epcy_nodes_load_record();
  if (!e) e = epcy_nodes_load_plan();
  return e ? e : epcy_nodes_load_dispatch();
}
