// The words of CUDA that src/cuda uses, for g++. As with nvcc, every source includes this first.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "machine.h"

#define __CUDACC__ 1
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static thread_local // of a block: the machine says where thread_local variables lie (fibers.cpp)

// ---- vectors
struct uint2 {
  unsigned x, y;
};
struct float2 {
  float x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) longlong2 {
  long long x, y;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
inline uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }
inline float2 make_float2(float a, float b) { return {a, b}; }
inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
inline longlong2 make_longlong2(long long a, long long b) { return {a, b}; }
inline ulonglong2 make_ulonglong2(unsigned long long a, unsigned long long b) { return {a, b}; }

namespace emulated {
template <typename T> inline uint64_t to_bits(T v) {
  uint64_t bits = 0;
  static_assert(sizeof v <= sizeof bits, "a shuffle moves up to 64 bits");
  memcpy(&bits, &v, sizeof v);
  return bits;
}
template <typename T> inline T from_bits(uint64_t bits) {
  T v;
  memcpy(&v, &bits, sizeof v);
  return v;
}
// A store that the machine has been told of already.
template <typename T> __attribute__((no_sanitize("thread"), noinline)) void put(T *p, T v) { *p = v; }
inline int lane() { return threadIdx.x & 31; }
template <typename T, typename F> inline T reduce(const char *what, unsigned mask, T v, F f) {
  const uint64_t *all = exchange(what, mask, to_bits(v));
  T r = from_bits<T>(all[0]);
  for (int i = 1; i < 32; i++) r = f(r, from_bits<T>(all[i]));
  return r;
}
template <typename T> inline T swap(T *p, T v) {
  const T old = *p;
  put(p, v);
  return old;
}
} // namespace emulated

// ---- of a warp
template <typename T> inline T __shfl_sync(unsigned mask, T v, int from) {
  return emulated::from_bits<T>(emulated::exchange("shfl", mask, emulated::to_bits(v))[from & 31]);
}
template <typename T> inline T __shfl_xor_sync(unsigned mask, T v, int with) {
  return emulated::from_bits<T>(emulated::exchange("shfl_xor", mask, emulated::to_bits(v))[emulated::lane() ^ with]);
}
template <typename T> inline T __shfl_up_sync(unsigned mask, T v, unsigned by) {
  const uint64_t *all = emulated::exchange("shfl_up", mask, emulated::to_bits(v));
  return emulated::lane() < (int)by ? v : emulated::from_bits<T>(all[emulated::lane() - by]);
}
template <typename T> inline T __shfl_down_sync(unsigned mask, T v, unsigned by) {
  const uint64_t *all = emulated::exchange("shfl_down", mask, emulated::to_bits(v));
  return emulated::lane() + by > 31 ? v : emulated::from_bits<T>(all[emulated::lane() + by]);
}
inline unsigned __ballot_sync(unsigned mask, bool p) {
  const uint64_t *all = emulated::exchange("ballot", mask, p);
  unsigned votes = 0;
  for (int i = 0; i < 32; i++) votes |= (unsigned)(all[i] & 1) << i;
  return votes;
}
inline bool __any_sync(unsigned mask, bool p) { return __ballot_sync(mask, p) != 0; }
inline bool __all_sync(unsigned mask, bool p) { return __ballot_sync(mask, p) == ~0u; }
template <typename T> inline unsigned __match_any_sync(unsigned mask, T v) {
  const uint64_t *all = emulated::exchange("match_any", mask, emulated::to_bits(v));
  unsigned same = 0;
  for (int i = 0; i < 32; i++) same |= (unsigned)(all[i] == emulated::to_bits(v)) << i;
  return same;
}
template <typename T> inline T __reduce_add_sync(unsigned mask, T v) {
  return emulated::reduce("reduce_add", mask, v, [](T a, T b) { return a + b; });
}
template <typename T> inline T __reduce_max_sync(unsigned mask, T v) {
  return emulated::reduce("reduce_max", mask, v, [](T a, T b) { return a > b ? a : b; });
}
template <typename T> inline T __reduce_min_sync(unsigned mask, T v) {
  return emulated::reduce("reduce_min", mask, v, [](T a, T b) { return a < b ? a : b; });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned v) {
  return emulated::reduce("reduce_or", mask, v, [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned v) {
  return emulated::reduce("reduce_and", mask, v, [](unsigned a, unsigned b) { return a & b; });
}
inline void __syncwarp(unsigned mask = ~0u) { emulated::warp_barrier(mask); }

// ---- of a block
inline void __syncthreads() { emulated::block_barrier(0, 0, false); }
inline int __syncthreads_or(int p) { return emulated::block_barrier(0, 0, p); }
inline int __syncthreads_and(int p) { return !emulated::block_barrier(0, 0, !p); }
inline void __threadfence() { emulated::fence(false); }
inline void __threadfence_system() { emulated::fence(true); }
inline size_t __cvta_generic_to_shared(const void *p) { return emulated::shared_offset(p); }

// ---- memory
template <typename T> inline T __ldg(const T *p) { return *p; }
template <typename T> inline T __ldcg(const T *p) { return *p; }
template <typename T> inline T __ldcs(const T *p) { return *p; }
template <typename T> struct Operand { // deduced from the pointer alone, as CUDA's overloads are
  typedef T type;
};
#define EMULATED_ATOMIC(name, ...)                                         \
  template <typename T> inline T name(T *p, typename Operand<T>::type v) { \
    emulated::before_atomic(p, sizeof *p);                                 \
    const T old = *p;                                                      \
    return emulated::swap(p, (T)(__VA_ARGS__));                            \
  }
EMULATED_ATOMIC(atomicAdd, old + v)
EMULATED_ATOMIC(atomicMin, old < v ? old : v)
EMULATED_ATOMIC(atomicMax, old > v ? old : v)
EMULATED_ATOMIC(atomicOr, old | v)
EMULATED_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
EMULATED_ATOMIC(atomicExch, (old, v))
template <typename T> inline T atomicCAS(T *p, typename Operand<T>::type compare, typename Operand<T>::type v) {
  emulated::before_atomic(p, sizeof *p);
  return emulated::swap(p, *p == compare ? v : *p);
}
#define atomicCAS_system atomicCAS
#define atomicAdd_system atomicAdd

// ---- numbers
using std::max;
using std::min;
inline unsigned max(unsigned a, int b) { return a > (unsigned)b ? a : (unsigned)b; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline float __uint_as_float(unsigned u) { return emulated::from_bits<float>(u); }
inline float __int_as_float(int u) { return emulated::from_bits<float>((unsigned)u); }
inline unsigned __float_as_uint(float f) { return (unsigned)emulated::to_bits(f); }
inline float __fmul_rn(float a, float b) { return a * b; } // -ffp-contract=off
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline unsigned __vcmpeq4(unsigned a, unsigned b) {
  unsigned r = 0;
  for (int i = 0; i < 32; i += 8) r |= (a >> i & 255) == (b >> i & 255) ? 255u << i : 0;
  return r;
}
inline unsigned __vmins2(unsigned a, unsigned b) {
  auto least = [](unsigned x, unsigned y) { return (unsigned)(uint16_t)std::min((int16_t)x, (int16_t)y); };
  return least(a >> 16, b >> 16) << 16 | least(a, b);
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xFFFF, b & 0xFFFF);
}

// ---- the host's side: one device, as large as the kernels ask for
typedef int cudaError_t;
typedef void *cudaStream_t;
enum { cudaSuccess = 0 };
enum cudaDeviceAttr {
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrMultiProcessorCount
};
enum {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaLaunchAttributeCooperative,
  cudaLaunchAttributeProgrammaticStreamSerialization
};
struct cudaFuncAttributes {
  size_t sharedSizeBytes;
};
struct dim3 {
  unsigned x;
  dim3(unsigned n = 1) : x(n) {}
};
struct cudaLaunchAttribute {
  int id;
  struct {
    int cooperative, programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute *attrs;
  unsigned numAttrs;
};
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 227 * 1024
           : attribute == cudaDevAttrComputeCapabilityMajor     ? __CUDA_ARCH__ / 100
                                                                : 132;
  return cudaSuccess;
}
template <typename Kernel> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, Kernel) {
  return attributes->sharedSizeBytes = 0, cudaSuccess;
}
template <typename Kernel> cudaError_t cudaFuncSetAttribute(Kernel, int, int) { return cudaSuccess; }
template <typename Kernel> cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Kernel, int, size_t) {
  return *blocks = 1, cudaSuccess;
}
template <typename... Args, typename... Given>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Args...), Given... given) {
  return emulated::launch(
      config->stream, [=] { kernel(Args(given)...); }, config->gridDim.x, config->blockDim.x, config->dynamicSmemBytes);
}
