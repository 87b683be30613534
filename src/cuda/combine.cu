// Combine in the rank layout: the experts' rows are pulled as they are, and the lanes' weights come back with them.
#include "pull.cuh"

namespace {

// All threads: each lane's weight comes back from the rank that owns the lane.
EPCY_DEVICE void pull_weights(const Step &s, const epcy_cuda_combine &a) {
  const int K = (int)a.peers.shape.num_topk;
  const int64_t L = epcy_num_local_experts(&a.peers.shape), lanes = (int64_t)a.num_tokens * K;
  for (int64_t q = (int64_t)blockIdx.x * kThreads + threadIdx.x; q < lanes; q += (int64_t)gridDim.x * kThreads) {
    const int64_t id = a.lane_ids[q], token = q / K;
    const int owner = id < 0 ? -1 : (int)epcy_rank_of_expert(id, L);
    const int row = owner < 0 ? -1 : a.pos[token * s.num_ranks + owner];
    float w = 0.0f;
    if (row >= 0)
      w = load_foreign((const float *)(a.peers.base[owner] + (int64_t)s.header_value(owner, 2) * 128) +
                       (int64_t)row * K + (q - token * K));
    a.out_weights[q] = w;
  }
}

template <int Dtype>
__global__ void __launch_bounds__(kThreads, 1)
    combine_rows(const __grid_constant__ epcy_cuda_combine a, int num_stages) {
  extern __shared__ char unaligned[];
  char *ring = aligned_shared(unaligned);
  combine<Dtype>(a, num_stages, ring, [&a](const Step &s, int *) {
    if (a.out_weights) pull_weights(s, a);
  });
}

} // namespace

extern "C" int epcy_cuda_launch_combine(const epcy_cuda_combine *call, int num_sms, void *stream) {
  return launch_combine(combine_rows<kBf16>, combine_rows<kFp16>, combine_rows<kFp32>, call, num_sms, stream);
}

int epcy_cuda_load_combine() { return allow_combine(combine_rows<kBf16>, combine_rows<kFp16>, combine_rows<kFp32>); }
