// The GPU's clock beside the host's.
#include <time.h>

#include "launch.cuh"
#include "stamp.cuh"

namespace {

__global__ void read_clock(volatile uint64_t *out) { *out = global_time_ns(); }

int64_t monotonic_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

} // namespace

// A kernel reads its clock between two readings of the host's: the shortest round is believed, half of it is the error.
extern "C" int epcy_cuda_compare_clocks(int num_rounds, int64_t *ahead_ns, int64_t *error_ns) {
  volatile uint64_t *word = nullptr;
  uint64_t *device = nullptr;
  cudaStream_t stream;
  cudaError_t e = cudaHostAlloc((void **)&word, 8, cudaHostAllocMapped);
  if (e != cudaSuccess) return e;
  e = cudaHostGetDevicePointer((void **)&device, (void *)word, 0);
  if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (e == cudaSuccess) {
    *error_ns = INT64_MAX;
    for (int i = 0; i < num_rounds && e == cudaSuccess; i++) {
      *word = 0;
      const int64_t before = monotonic_ns();
      read_clock<<<1, 1, 0, stream>>>(device);
      e = cudaStreamSynchronize(stream);
      const int64_t after = monotonic_ns();
      if (e != cudaSuccess || (after - before) / 2 >= *error_ns) continue;
      *error_ns = (after - before + 1) / 2;
      *ahead_ns = (int64_t)*word - (before + after) / 2;
    }
    cudaStreamDestroy(stream);
  }
  cudaFreeHost((void *)word);
  return e;
}
