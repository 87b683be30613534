// NVSHMEM's own put by blocks, as a yardstick: rows from here to a rank, each by one block.
#include "launch.cuh"
#include "epcy/put_nodes.h"
#include "put.cuh"

namespace {

__global__ void __launch_bounds__(512) put_rows(char *to, const char *from, int num_rows, int64_t row_bytes, int pe) {
  for (int i = blockIdx.x; i < num_rows; i += gridDim.x)
    put_plain(to + i * row_bytes, from + i * row_bytes, row_bytes, pe);
  if (threadIdx.x == 0) put_quiet();
}

} // namespace

extern "C" int epcy_put_launch_rows(char *to, const char *from, int num_rows, int64_t row_bytes, int pe, int num_blocks,
                                    void *stream) {
  return launch_apart(put_rows, num_blocks, 512, stream, to, from, num_rows, row_bytes, pe);
}
