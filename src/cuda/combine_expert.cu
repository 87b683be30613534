// Combine in the expert layout: the weights of lanes go to the experts' rank, which sums each token's rows there in lane
// order and rounds once; these sums are pulled as rows are in the rank layout.
//
// A token's sum lies at its first row's place in a combine area (or over the rows themselves: a row belongs to one token).
#include "pull.cuh"

namespace {

// Whether ranks have weights: not whether this one has an array, which without tokens may be at no address.
EPCY_DEVICE bool has_weights(const epcy_cuda_combine &a) { return EPCY_HEADER_WEIGHTS((uint32_t)a.header); }

// All blocks: store each lane's weight at its row on the experts' rank.
EPCY_DEVICE void push_weights(const Step &s, const epcy_cuda_combine &a) {
  const int64_t K = a.peers.shape.num_topk, L = a.peers.num_local, lanes = a.num_tokens * K;
  for (int64_t q = (int64_t)blockIdx.x * kThreads + threadIdx.x; q < lanes; q += (int64_t)gridDim.x * kThreads) {
    const int row = a.routing.lane_row[q];
    if (row < 0) continue;
    const int owner = (int)a.lane_ids[q] / (int)L;
    ((float *)(a.peers.base[owner] + (int64_t)s.header_value(owner, 2) * 128))[row] = a.topk_weights[q];
  }
}

constexpr int kTogether = 8; // rows of a token whose loads are under way at once

// A whole warp: add num (at most kTogether) rows of a token to its sum; thread j knows the j-th row and its weight.
template <int Dtype>
EPCY_DEVICE void add_rows(const epcy_cuda_combine &a, int64_t at, int first, int num, int row, float weight,
                          float *acc) {
  uint4 v[kTogether];
#pragma unroll
  for (int j = 0; j < kTogether; j++) {
    const int64_t from = __shfl_sync(~0u, row, first + j);
    if (j < num) v[j] = *(const uint4 *)(a.x + from * a.x_stride_bytes + at);
  }
#pragma unroll
  for (int j = 0; j < kTogether; j++) {
    const float w = __shfl_sync(~0u, weight, first + j);
    if (j >= num) continue;
    float x[Vector<Dtype>::kElements];
    Vector<Dtype>::load(v[j], x);
#pragma unroll
    for (int i = 0; i < Vector<Dtype>::kElements; i++) acc[i] = __fadd_rn(acc[i], __fmul_rn(w, x[i]));
  }
}

// All blocks: sum the rows of each token that came here. A warp a token.
template <int Dtype> EPCY_DEVICE void sum_fans(const Step &s, const epcy_cuda_combine &a) {
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x & 31, K = (int)a.peers.shape.num_topk;
  const float *weights = has_weights(a) ? (const float *)(a.peers.base[s.me] + a.weights_offset) : nullptr;
  const int64_t num = a.routing.num_recv[1];
  char *out = a.peers.base[s.me] + a.y_offset;
  for (int64_t i = (int64_t)blockIdx.x * kWarps + (threadIdx.x >> 5); i < num; i += (int64_t)gridDim.x * kWarps) {
    const int32_t *fan = a.routing.fans + i * K;
    const int head = fan[0];
    if (head < 0) continue;
    // Thread `lane` sums the elements at 16 * lane, ...; rows beyond the 32nd are looked up again for each.
    const int row = lane < K ? fan[lane] : -1;
    const float weight = row >= 0 && weights ? load_foreign(weights + row) : 1.0f;
    const int known = __popc(__ballot_sync(~0u, row >= 0));
    for (int64_t begin = 0; begin < a.row_bytes; begin += 512) {
      const int64_t at = begin + lane * 16 < a.row_bytes ? begin + lane * 16 : 0; // all threads help with shuffles
      float acc[Vector<Dtype>::kElements] = {};
      for (int j = 0; j < known; j += kTogether)
        add_rows<Dtype>(a, at, j, known - j < kTogether ? known - j : kTogether, row, weight, acc);
      for (int k = 32; k < K && fan[k] >= 0; k++)
        add_rows<Dtype>(a, at, 0, 1, fan[k], weights ? load_foreign(weights + fan[k]) : 1.0f, acc);
      if (begin + lane * 16 < a.row_bytes) *(uint4 *)(out + head * a.row_bytes + at) = Vector<Dtype>::round(acc);
    }
  }
}

template <int Dtype>
__global__ void __launch_bounds__(kThreads, 1) combine_lanes(const __grid_constant__ epcy_cuda_combine a) {
  combine<Dtype>(a, aligned_shared(), [&a](const Step &s, int *verdict) {
    int turn = 0;
    if (has_weights(a)) {
      push_weights(s, a);
      s.together(turn++, verdict);
    }
    sum_fans<Dtype>(s, a);
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
