// Combine in the expert layout: the weights of lanes go to the experts' rank, which sums each token's rows there in lane
// order and rounds once; these sums are pulled as rows are in the rank layout.
//
// A token's sum lies at its first row's place in a combine area (or over the rows themselves: a row belongs to one token).
#include "links.cuh"
#include "pull.cuh"

namespace {

// Whether ranks have weights: not whether this one has an array, which without tokens may be at no address.
EPCY_DEVICE bool has_weights(const epcy_cuda_combine &a) { return EPCY_HEADER_WEIGHTS((uint32_t)a.header); }

// All blocks: store each lane's weight at its row on the experts' rank.
EPCY_DEVICE void push_weights(const Step &s, const epcy_cuda_combine &a) {
  const int64_t K = a.peers.shape.num_topk, L = epcy_num_local_experts(&a.peers.shape), lanes = a.num_tokens * K;
  for (int64_t q = (int64_t)blockIdx.x * kThreads + threadIdx.x; q < lanes; q += (int64_t)gridDim.x * kThreads) {
    const int row = a.routing.lane_row[q];
    if (row < 0) continue;
    const int owner = (int)epcy_rank_of_expert(a.lane_ids[q], L);
    ((float *)(a.peers.base[owner] + (int64_t)s.header_value(owner, 2) * 128))[row] = a.topk_weights[q];
  }
}

template <int Dtype> EPCY_DEVICE void add_row(float *acc, const uint4 &v, float w) {
  float x[Vector<Dtype>::kElements];
  Vector<Dtype>::load(v, x);
#pragma unroll
  for (int i = 0; i < Vector<Dtype>::kElements; i++) acc[i] = __fadd_rn(acc[i], __fmul_rn(w, x[i]));
}

// All blocks: sum the rows of each chain. A warp a token.
template <int Dtype> EPCY_DEVICE void sum_chains(const Step &s, const epcy_cuda_combine &a) {
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x & 31;
  const int64_t due = *a.routing.num_recv, num_rows = due < a.num_rows ? due : a.num_rows;
  const float *weights = has_weights(a) ? (const float *)(a.peers.base[s.me] + a.weights_offset) : nullptr;
  char *out = a.peers.base[s.me] + a.y_offset;
  for (int64_t begin = ((int64_t)blockIdx.x * kWarps + (threadIdx.x >> 5)) * kBatch; begin < num_rows;
       begin += (int64_t)gridDim.x * kWarps * kBatch) {
    const Chain mine(a.routing.links, lane < kBatch && begin + lane < num_rows ? (int)begin + lane : -1);
    float my_weight[kChain];
#pragma unroll
    for (int j = 0; j < kChain; j++)
      my_weight[j] = weights && mine.row[j] >= 0 ? load_foreign(weights + mine.row[j]) : 1.0f;
    for (unsigned heads = __ballot_sync(~0u, mine.row[0] >= 0); heads; heads &= heads - 1) {
      const int head = __ffs(heads) - 1;
      const Chain chain(mine, head);
      float weight[kChain];
#pragma unroll
      for (int j = 0; j < kChain; j++) weight[j] = __shfl_sync(~0u, my_weight[j], head);
      for (int64_t at = lane * 16; at < a.row_bytes; at += 512) {
        uint4 v[kChain];
        float acc[Vector<Dtype>::kElements] = {};
#pragma unroll
        for (int j = 0; j < kChain; j++)
          if (chain.row[j] >= 0) v[j] = *(const uint4 *)(a.x + chain.row[j] * a.x_stride_bytes + at);
#pragma unroll
        for (int j = 0; j < kChain; j++)
          if (chain.row[j] >= 0) add_row<Dtype>(acc, v[j], weight[j]);
        for (int row = chain.rest; row >= 0; row = next_row(load_link(a.routing.links, row)))
          add_row<Dtype>(acc, *(const uint4 *)(a.x + row * a.x_stride_bytes + at),
                         weights ? load_foreign(weights + row) : 1.0f);
        *(uint4 *)(out + chain.row[0] * a.row_bytes + at) = Vector<Dtype>::round(acc);
      }
    }
  }
}

template <int Dtype>
__global__ void __launch_bounds__(kThreads, 1)
    combine_lanes(const __grid_constant__ epcy_cuda_combine a, int num_stages) {
  extern __shared__ char unaligned[];
  char *ring = aligned_shared(unaligned);
  combine<Dtype>(a, num_stages, ring, [&a](const Step &s, int *verdict) {
    int turn = 0;
    if (has_weights(a)) {
      push_weights(s, a);
      s.together(turn++, verdict);
    }
    sum_chains<Dtype>(s, a);
    s.together(turn, verdict);
  });
}

} // namespace

extern "C" int epcy_cuda_launch_combine_expert(const epcy_cuda_combine *call, int num_sms, void *stream) {
  return launch_combine(combine_lanes<kBf16>, combine_lanes<kFp16>, combine_lanes<kFp32>, call, num_sms, stream);
}

int epcy_cuda_load_combine_expert() {
  return allow_combine(combine_lanes<kBf16>, combine_lanes<kFp16>, combine_lanes<kFp32>);
}
