// src/cuda/put.cuh, function by function, on the emulated machine. Names of memory are its addresses.
#pragma once
#include "cuda_runtime.h"
#include "emulated_ptx.h"

inline void put_block(char *to, const char *from, size_t bytes, uint64_t *flag, uint64_t value, int) {
  __syncthreads();
  if (threadIdx.x == 0) emulated::network_put(to, from, bytes, flag, value);
  __syncthreads();
}
inline void put_plain(char *to, const char *from, size_t bytes, int) {
  if (threadIdx.x == 0) memcpy(to, from, bytes); // a yardstick, which nothing here measures
}
inline void put_quiet() {}
inline void put_word(uint64_t *to, uint64_t value, int) { emulated::network_store(to, value, sizeof value); }
inline void put_half_word(uint32_t *to, uint32_t value, int) { emulated::network_store(to, value, sizeof value); }
inline void put_fence() {
  while (!emulated::network_is_quiet()) emulated::yield();
}
inline bool has_come(uint64_t *flag, uint64_t value) { return load_word(flag) == value; }
