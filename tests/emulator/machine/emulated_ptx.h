// src/cuda/ptx.cuh, function by function, on the emulated machine.
#pragma once
#include <cstring>

#include "cuda_runtime.h"

#define EPCY_DEVICE inline
#define EPCY_RARELY(condition) (condition)
#if __CUDA_ARCH__ >= 900
#define EPCY_HAS_BULK 1
#endif

// ---- words that ranks exchange. A wait looks at a word again and again: others run in between.
inline uint64_t load_word(const uint64_t *p) {
  emulated::yield();
  return *p;
}
inline uint64_t load_word_acquire(const uint64_t *p) { return load_word(p); }
inline void store_word(uint64_t *p, uint64_t v) {
  emulated::before_store(p, sizeof v, emulated::kRelaxed);
  emulated::put(p, v);
}
inline void store_word_release(uint64_t *p, uint64_t v) {
  emulated::fence(true);
  store_word(p, v);
}
inline void prefetch(const void *) {}
inline uint64_t global_time_ns() { return emulated::clock_ns(); }
inline uint32_t load_local(const uint32_t *p) {
  emulated::yield();
  return *p;
}
inline uint2 load_local_pair(const uint32_t *p) {
  emulated::yield();
  return make_uint2(p[0], p[1]);
}
inline unsigned rounded_to_bf16(float x) {
  if (x != x) return 0x7FFF;
  const unsigned u = __float_as_uint(x);
  return (u + 0x7FFF + (u >> 16 & 1)) >> 16;
}
inline unsigned rounded_to_fp16(float x) {
  if (x != x) return 0x7FFF;
  const unsigned sign = __float_as_uint(x) >> 16 & 0x8000u;
  const float a = fabsf(x);
  if (a >= 65520.0f) return sign | 0x7C00u;
  int e = -14; // of the unit 2^(e - 10)
  if (a >= 0x1p-14f) frexpf(a, &e), e -= 1;
  const unsigned units = (unsigned)nearbyintf(ldexpf(a, 10 - e)); // below 1024 only for subnormals
  return sign | (units + ((unsigned)(e + 14) << 10));
}
inline uint32_t bf16_pair(float low, float high) { return rounded_to_bf16(low) | rounded_to_bf16(high) << 16; }
inline uint32_t fp16_pair(float low, float high) { return rounded_to_fp16(low) | rounded_to_fp16(high) << 16; }
inline float load_foreign(const float *p) { return *p; }
inline uint4 load_unit(const uint4 *p) { return *(const uint4 *)emulated::line_of(p); }
inline void store_unit(uint4 *p, const uint4 &v) {
  emulated::before_store(p, sizeof v, emulated::kLine);
  emulated::put(p, v);
}
inline ulonglong2 load_words(const ulonglong2 *p) { return *p; }
inline void store_words(ulonglong2 *p, uint64_t first, uint64_t second) {
  emulated::before_store(p, 16, emulated::kRelaxed);
  emulated::put(p, make_ulonglong2(first, second));
}
template <typename T> inline T load_early(const T *p) { return *p; }
inline void load_early_if(bool wanted, const uint4 *p, uint4 *v) {
  *v = wanted ? *p : make_uint4(0x77, 0x77, 0x77, 0x77);
}
inline uint4 clear() { return make_uint4(0, 0, 0, 0); }
inline int opaque_zero() { return 0; }
inline void after_others() {}
inline void load_early(bool two, const void *p, int32_t *low, int32_t *high) {
  *low = ((const int32_t *)p)[0];
  if (two) *high = ((const int32_t *)p)[1];
}
template <typename T> inline void keep(T *&) {}

// ---- of a block
template <int Id, int Threads> inline void named_barrier() { emulated::block_barrier(Id, Threads, false); }
inline char *dynamic_shared() { return emulated::dynamic_shared(); }

#ifdef EPCY_HAS_BULK
inline void barrier_init(uint64_t *bar, int count) { emulated::barrier_init(bar, count); }
inline void barrier_init_fence() {}
inline void barrier_expect(uint64_t *bar, uint32_t bytes) { emulated::barrier_arrive(bar, bytes); }
inline void barrier_arrive(uint64_t *bar) { emulated::barrier_arrive(bar, 0); }
inline bool barrier_try(uint64_t *bar, uint32_t parity) { return emulated::barrier_try(bar, parity); }
inline void barrier_wait(uint64_t *bar, uint32_t parity) {
  while (!barrier_try(bar, parity)) {
  }
}
inline void bulk_load(void *shared, const void *global, uint32_t bytes, uint64_t *bar) {
  emulated::bulk_load(shared, global, bytes, bar);
}
inline void bulk_store(void *global, const void *shared, uint32_t bytes) {
  emulated::bulk_store(global, shared, bytes);
}
inline void bulk_commit() { emulated::bulk_commit(); }
template <int N> inline void bulk_wait_read() { emulated::bulk_wait(N, true); }
template <int N> inline void bulk_wait() { emulated::bulk_wait(N, false); }
inline void proxy_fence() { emulated::proxy_fence(); }
#endif
