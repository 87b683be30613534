/* Which instruction set is used, and the floating-point state around the kernels. */
#include "simd.h"

#include <stdatomic.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

static _Atomic int limit = 2; /* 0 portable, 1 avx2, 2 avx512 */

static int supported(void) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return 1;
#endif
  return 0;
}

int epcy_simd_level(void) {
  const int most = atomic_load_explicit(&limit, memory_order_relaxed), have = supported();
  return most < have ? most : have;
}

int epcy_simd_limit(int level) {
  atomic_store_explicit(&limit, level, memory_order_relaxed);
  return epcy_simd_level();
}

const epcy_simd *epcy_simd_table(void) {
#if defined(__x86_64__)
  const int level = epcy_simd_level();
  if (level == 2) return &epcy_simd_avx512;
  if (level == 1) return &epcy_simd_avx2;
#endif
  return &epcy_simd_portable;
}

void epcy_stream_fence(void) {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

unsigned epcy_float_begin(void) {
#if defined(__x86_64__)
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(0x1F80); /* round to nearest even, nothing flushed, all exceptions masked */
  return saved;
#elif defined(__aarch64__)
  uint64_t saved;
  __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
  __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)0));
  return (unsigned)saved;
#else
  return 0;
#endif
}

void epcy_float_end(unsigned saved) {
#if defined(__x86_64__)
  _mm_setcsr(saved);
#elif defined(__aarch64__)
  __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)saved));
#else
  (void)saved;
#endif
}

static int64_t item_bytes(int dtype) { return dtype == EPCY_FP32 ? 4 : 2; }

void epcy_cast_to_fp8(const void *x, int dtype, int64_t num_rows, int64_t hidden, int power_of_two, uint8_t *payload,
                      float *scales) {
  const epcy_simd *simd = epcy_simd_table();
  const unsigned saved = epcy_float_begin();
  for (int64_t i = 0; i < num_rows; i++)
    simd->to_fp8((const char *)x + i * hidden * item_bytes(dtype), dtype, hidden, power_of_two, payload + i * hidden,
                 scales + i * epcy_num_scales(hidden));
  epcy_float_end(saved);
}

void epcy_cast_from_fp8(const uint8_t *payload, const float *scales, int64_t num_rows, int64_t hidden, int dtype,
                        void *out) {
  const epcy_simd *simd = epcy_simd_table();
  const unsigned saved = epcy_float_begin();
  for (int64_t i = 0; i < num_rows; i++)
    simd->from_fp8(payload + i * hidden, scales + i * epcy_num_scales(hidden), hidden, dtype,
                   (char *)out + i * hidden * item_bytes(dtype));
  epcy_float_end(saved);
}
