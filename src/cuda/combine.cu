// Combine in the rank layout: the experts' rows are pulled as they are, and the lanes' weights come back with them.
#include "pull.cuh"

namespace {

// All threads: each lane's weight comes back from the rank that owns the lane.
EPCY_DEVICE void pull_weights(const Step &s, const epcy_cuda_combine &a) {
  const int K = (int)a.peers.shape.num_topk;
  const int64_t L = a.peers.num_local, lanes = (int64_t)a.num_tokens * K;
  for (int64_t q = (int64_t)blockIdx.x * kThreads + threadIdx.x; q < lanes; q += (int64_t)gridDim.x * kThreads) {
    const int64_t id = a.lane_ids[q], token = q / K;
    const int owner = id < 0 ? -1 : (int)id / (int)L;
    const int row = owner < 0 ? -1 : a.pos[token * s.num_ranks + owner];
    float w = 0.0f;
    if (row >= 0)
      w = load_foreign((const float *)(a.peers.base[owner] + (int64_t)s.header_value(owner, 2) * 128) +
                       (int64_t)row * K + (q - token * K));
    a.out_weights[q] = w;
  }
}

template <int Dtype>
__global__ void __launch_bounds__(kThreads, 1) combine_rows(const __grid_constant__ epcy_cuda_combine a) {
  combine<Dtype>(a, aligned_shared(), [&a](const Step &s, int *) {
    if (a.out_weights) pull_weights(s, a);
  });
}

// Copy to where other ranks can pull them the rows that they will pull: all that came but this rank's own.
__global__ void __launch_bounds__(1024, 1) stage_rows(const __grid_constant__ epcy_cuda_staging a) {
  constexpr int kAtOnce = 4;
  __shared__ int own, num_own;
  if (threadIdx.x < 32) {
    const int n = __reduce_add_sync(~0u, a.own_count[threadIdx.x]);
    if (threadIdx.x == 0) own = a.own_base[0], num_own = n;
  }
  __syncthreads();
  const int64_t came = *a.num_recv, rows = (came < a.num_rows ? came : a.num_rows);
  const int64_t first = own < rows ? own : rows, second = own + num_own < rows ? own + num_own : rows;
  const int64_t per_row = a.row_bytes / 16, all = (rows - (second - first)) * per_row;
  const int64_t step = (int64_t)gridDim.x * blockDim.x;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += kAtOnce * step) {
    uint4 v[kAtOnce];
    int64_t row[kAtOnce], at[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      const int64_t q = i + j * step;
      row[j] = q / per_row, at[j] = (q - row[j] * per_row) * 16;
      if (row[j] >= first) row[j] += second - first;
      if (q < all) v[j] = __ldcs((const uint4 *)(a.from + row[j] * a.stride_bytes + at[j]));
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; j++)
      if (i + j * step < all) *(uint4 *)(a.to + row[j] * a.row_bytes + at[j]) = v[j];
  }
}

} // namespace

extern "C" int epcy_cuda_launch_staging(const epcy_cuda_staging *call, int num_sms, void *stream) {
  return launch_apart(stage_rows, num_sms, 1024, stream, *call);
}

extern "C" int epcy_cuda_launch_combine(const epcy_cuda_combine *call, int num_sms, void *stream) {
  return launch_combine(combine_rows<kBf16>, combine_rows<kFp16>, combine_rows<kFp32>, call, num_sms, stream);
}

int epcy_cuda_load_combine() {
  cudaFuncAttributes attributes;
  const int error = cudaFuncGetAttributes(&attributes, stage_rows); // its code too
  return error ? error : allow_combine(combine_rows<kBf16>, combine_rows<kFp16>, combine_rows<kFp32>);
}
