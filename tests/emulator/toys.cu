// Kernels that do one thing each, right or wrong: to see that the emulated machine notices.
#include "launch.cuh"

namespace {

struct Toy {
  uint64_t *flag; // of another rank, or of this one
  uint32_t *data;
  uint32_t *out;
  int wrong;
};
constexpr int kWords = 32, kRounds = 8;

__device__ void wait_for(const uint64_t *flag, uint64_t value) {
  while (load_word_acquire(flag) != value) {
  }
}

// Rank 0 stores data, then says so; rank 1 waits and reads.
__global__ void send(const Toy t) {
  const int i = threadIdx.x;
  t.data[i] = 1000 + i;
  if (t.wrong != 1) __syncthreads(); // 1: the threads have not met
  if (i == 0 && t.wrong != 2) store_word_release(t.flag, 1);
  if (i == 0 && t.wrong == 2) store_word(t.flag, 1); // 2: the word does not order them
}
__global__ void receive(const Toy t) {
  if (threadIdx.x == 0) wait_for(t.flag, 1);
  __syncthreads();
  t.out[threadIdx.x] = t.data[threadIdx.x];
}

#ifdef EPCY_HAS_BULK
// One warp copies rows through one stage of shared memory, and then says so.
__global__ void copy_rows(const Toy t) {
  __shared__ __align__(128) uint32_t stage[kWords];
  __shared__ uint64_t full;
  if (threadIdx.x == 0) barrier_init(&full, 1);
  __syncthreads();
  if (threadIdx.x) return;
  for (int round = 0; round < kRounds; round++) {
    if (round && t.wrong != 1) bulk_wait_read<0>(); // 1: the stage is still read
    barrier_expect(&full, sizeof stage);
    bulk_load(stage, t.data + round * kWords, sizeof stage, &full);
    if (t.wrong != 2) barrier_wait(&full, round & 1); // 2: it has not come
    bulk_store(t.out + round * kWords, stage, sizeof stage);
    bulk_commit();
  }
  if (t.wrong != 3) bulk_wait<0>(); // 3: it has not been written
  else bulk_wait_read<0>();
  if (t.wrong != 4) proxy_fence(); // 4: a release does not see what copies wrote
  store_word_release(t.flag, 1);
}
#endif

__global__ void look(const Toy t) { // at rows, once all are there
  if (threadIdx.x == 0) wait_for(t.flag, 1);
  __syncthreads();
  for (int i = threadIdx.x; i < kWords * kRounds; i += blockDim.x) t.data[i] = t.out[i];
}

// Each block has shared memory of its own; a barrier that some threads miss, a shuffle that they do, a store too far.
__global__ void own_memory(const Toy t) {
  __shared__ unsigned mine;
  if (threadIdx.x == 0) mine = blockIdx.x;
  __syncthreads();
  for (int i = 0; i < 100; i++) load_word(t.flag);
  if (threadIdx.x == 0) t.out[blockIdx.x] = mine;
}
__global__ void odd(const Toy t) {
  if (t.wrong == 1 && threadIdx.x < 16) return;
  if (t.wrong == 2) {
    if (threadIdx.x < 16) __syncwarp();
    else __shfl_sync(~0u, 1, 0);
  }
  if (t.wrong == 3) t.out[kWords * kRounds + threadIdx.x] = 1;
  if (t.wrong == 4 && threadIdx.x < 32) __syncthreads();
  if (t.wrong == 4) named_barrier<1, 64>();
  __syncwarp();
}

} // namespace

#pragma GCC visibility push(default)
extern "C" int toy_launch(const char *name, uint64_t *flag, uint32_t *data, uint32_t *out, int wrong, void *stream) {
  const Toy t = {flag, data, out, wrong};
  switch (name[0]) {
    case 's': return launch_apart(send, 1, 128, stream, t);
    case 'r': return launch_apart(receive, 1, 128, stream, t);
    case 'l': return launch_apart(look, 1, 64, stream, t);
    case 'm': return launch_apart(own_memory, 5, 64, stream, t);
    case 'o': return launch_apart(odd, 1, 64, stream, t);
#ifdef EPCY_HAS_BULK
    case 'c': return launch_apart(copy_rows, 1, 32, stream, t);
#endif
  }
  return 1;
}
#pragma GCC visibility pop
