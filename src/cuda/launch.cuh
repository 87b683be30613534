// Launching kernels whose blocks wait for each other.
#pragma once
#include <cuda_runtime.h>

#include "ptx.cuh"

constexpr int kSharedBytes = 224 * 1024; // of the 227 KB that a block of sm_90 may have
constexpr int kSharedAlignment = 128;    // bulk copies from or to less aligned shared memory take twice the time

// Where a block's dynamic shared memory begins to be aligned: the compiler keeps the alignment of `extern __shared__`
// only relative to the static part.
EPCY_DEVICE char *aligned_shared() {
  char *dynamic = dynamic_shared();
  const unsigned at = (unsigned)__cvta_generic_to_shared(dynamic);
  return dynamic + ((kSharedAlignment - at % kSharedAlignment) % kSharedAlignment);
}

// Once a kernel and device: raise the limit, and load the code.
template <typename Kernel> int allow_shared(Kernel kernel) {
  int device = 0, most = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaFuncAttributes attributes;
  if (e == cudaSuccess) e = cudaFuncGetAttributes(&attributes, kernel);
  most -= (int)attributes.sharedSizeBytes;
  if (e == cudaSuccess)
    e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             most < kSharedBytes ? most : kSharedBytes);
  return e;
}

// Whether this process's device, asked once, has what came with sm_90.
inline bool is_sm_90() {
  static int major = 0; // threads that ask at once find the same
  if (!major) {
    int device = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  return major >= 9;
}
inline bool has_bulk_copies() { return is_sm_90(); } // and so needs their shared memory

// Blocks that do not wait for each other.
template <typename... Args, typename... Given>
int launch_apart(void (*kernel)(Args...), int grid, int block, void *stream, Given... given) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid), config.blockDim = dim3(block), config.stream = (cudaStream_t)stream;
  return cudaLaunchKernelEx(&config, kernel, Args(given)...);
}

// All blocks are resident at once, or the launch fails: they may wait for each other. `Early`: the kernel begins with
// after_others(), and may be brought to the multiprocessors while what came before it in the stream ends.
template <bool Early = false, typename... Args, typename... Given>
int launch_together(void (*kernel)(Args...), int grid, int block, size_t shared, void *stream, Given... given) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid), config.blockDim = dim3(block),
  config.dynamicSmemBytes = shared ? shared + kSharedAlignment : 0, config.stream = (cudaStream_t)stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeCooperative, attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes, config.numAttrs = Early && is_sm_90() ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, Args(given)...);
}
