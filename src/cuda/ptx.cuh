// Small wrappers of PTX instructions, and all inline assembly. Each says which threads take part and what is ordered.
#pragma once
#ifdef EPCY_EMULATED // tests/emulator has these functions for a CPU
#include "emulated_ptx.h"
#else
#include <cstdint>

#define EPCY_DEVICE __device__ __forceinline__
#define EPCY_RARELY(condition) __builtin_expect(condition, 0) // what follows it moves out of the way

// ---- words that ranks exchange: one thread; relaxed unless named otherwise; 8-byte aligned
EPCY_DEVICE uint64_t load_word(const uint64_t *p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
EPCY_DEVICE uint64_t load_word_acquire(const uint64_t *p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
EPCY_DEVICE void store_word(uint64_t *p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// Everything this thread wrote, or has seen written, before is visible to who acquires the word.
EPCY_DEVICE void store_word_release(uint64_t *p, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
EPCY_DEVICE void prefetch(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
EPCY_DEVICE uint64_t global_time_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
EPCY_DEVICE uint32_t load_local(const uint32_t *p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
EPCY_DEVICE uint2 load_local_pair(const uint32_t *p) { // 8-byte aligned
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
EPCY_DEVICE float load_foreign(const float *p) { // a peer wrote or will write it: never from a cache of this SM
  float v;
  asm volatile("ld.relaxed.sys.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
// 16 bytes, which arrive together.
EPCY_DEVICE uint4 load_unit(const uint4 *p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
EPCY_DEVICE void store_unit(uint4 *p, const uint4 &v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
// Two words at once; each carries its own epoch.
EPCY_DEVICE ulonglong2 load_words(const ulonglong2 *p) {
  ulonglong2 v;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
  return v;
}
EPCY_DEVICE void store_words(ulonglong2 *p, uint64_t first, uint64_t second) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};" ::"l"(p), "l"(first), "l"(second) : "memory");
}

// ---- rounding of two numbers at once, to nearest even; NaN becomes 0x7FFF
EPCY_DEVICE uint32_t bf16_pair(float low, float high) {
  uint32_t v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
EPCY_DEVICE uint32_t fp16_pair(float low, float high) {
  uint32_t v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

// ---- of a block: a barrier of some of its warps, and its dynamic shared memory
template <int Id, int Threads> EPCY_DEVICE void named_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(Id), "n"(Threads) : "memory");
}
EPCY_DEVICE char *dynamic_shared() {
  extern __shared__ __align__(16) char memory[];
  return memory;
}

// All threads: wait for all that came before this kernel in its stream, and let the next one be made ready.
EPCY_DEVICE void after_others() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Loads of what is written before after_others(), issued where they stand: the compiler would move them to their first
// use, behind another load that is waited for. Not of the non-coherent path, which wants memory that nobody writes while
// the kernel is there: it may be there before the one that writes has ended.
EPCY_DEVICE uint4 load_early(const uint4 *p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// Without a branch: anything unless `wanted`. In a loop that anything would be what was there before, and keep its
// registers from turn to turn: clear it first.
EPCY_DEVICE void load_early_if(bool wanted, const uint4 *p, uint4 *v) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(v->x), "+r"(v->y), "+r"(v->z), "+r"(v->w)
               : "l"(p), "r"((uint32_t)wanted));
}
EPCY_DEVICE uint4 clear() {
  uint4 v;
  asm volatile("mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w));
  return v;
}
// Have an address in registers from here on, instead of computing it again at every use.
template <typename T> EPCY_DEVICE void keep(T *&p) { asm("" : "+l"(p)); }
// 0, which the compiler does not know: what depends on it is not computed before it is asked for.
EPCY_DEVICE int opaque_zero() {
  int zero;
  asm volatile("mov.u32 %0, 0;" : "=r"(zero));
  return zero;
}
// One word, or two; nothing is done with them yet, which would wait for them.
EPCY_DEVICE void load_early(bool two, const void *p, int32_t *low, int32_t *high) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.v2.s32 {%0,%1}, [%2]; @!p ld.global.s32 %0, [%2];}"
               : "=r"(*low), "=r"(*high)
               : "l"(p), "r"((uint32_t)two));
}
EPCY_DEVICE int32_t load_early(const int32_t *p) {
  int32_t v;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
EPCY_DEVICE uint32_t load_early(const uint32_t *p) { return (uint32_t)load_early((const int32_t *)p); }
EPCY_DEVICE float load_early(const float *p) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define EPCY_HAS_BULK 1
#endif

#ifdef EPCY_HAS_BULK
// ---- bulk copies between shared and global memory (TMA): one thread; addresses and sizes multiples of 16
EPCY_DEVICE uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
EPCY_DEVICE void barrier_init(uint64_t *bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
}
EPCY_DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
EPCY_DEVICE void barrier_expect(uint64_t *bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes)
               : "memory");
}
EPCY_DEVICE void barrier_arrive(uint64_t *bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
EPCY_DEVICE bool barrier_try(uint64_t *bar, uint32_t parity) {
  uint32_t ok;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(ok)
               : "r"(shared_address(bar)), "r"(parity)
               : "memory");
  return ok;
}
// Bulk loads always end (they touch only mapped memory), so this wait needs no limit.
EPCY_DEVICE void barrier_wait(uint64_t *bar, uint32_t parity) {
  while (!barrier_try(bar, parity)) {
  }
}
EPCY_DEVICE void bulk_load(void *shared, const void *global, uint32_t bytes, uint64_t *bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(bar))
               : "memory");
}
EPCY_DEVICE void bulk_store(void *global, const void *shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
}
EPCY_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> EPCY_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
template <int N> EPCY_DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }
// Orders this thread's generic accesses with its asynchronous ones, both ways.
EPCY_DEVICE void proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }
#endif
#endif // EPCY_EMULATED
