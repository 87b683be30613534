// A machine that runs the blocks of CUDA kernels, all ranks' in one thread of one process: see ../README.md.
//
// This is what the emulated words of CUDA (cuda_runtime.h, emulated_ptx.h) need of it. Everything is called by threads of
// kernels, each of which is a fiber; nothing here runs at the same time as anything else.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

struct Index {
  unsigned x;
};
extern Index threadIdx, blockIdx, blockDim, gridDim; // of the thread that runs

namespace emulated {

// ---- fibers and meetings (fibers.cpp)
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
void yield();
// All 32 lanes of a warp: everybody's values. Every lane must name the same operation.
const uint64_t *exchange(const char *what, unsigned mask, uint64_t value);
void warp_barrier(unsigned mask);
// All threads of a block that have not ended, or `threads` of them at barrier `id`: whether any gave true.
bool block_barrier(int id, unsigned threads, bool value);
uint64_t clock_ns();
char *dynamic_shared();
size_t shared_offset(const void *p);

// ---- global memory (memory.cpp)
enum Order { kPlain, kRelaxed, kLine }; // kLine: the 16-byte stores of a warp to a line of 128 bytes arrive together
void before_store(void *p, size_t bytes, Order order);
void before_atomic(void *p, size_t bytes);
// What this thread has stored, and what threads stored that it has met at a barrier, becomes visible to this GPU or to all.
void fence(bool system);
const void *line_of(const void *p); // where to find 16 bytes as the warp's load of a line saw them

// ---- bulk copies (copies.cpp)
void barrier_init(uint64_t *bar, int count);
void barrier_arrive(uint64_t *bar, uint32_t expected_bytes);
bool barrier_try(uint64_t *bar, uint32_t parity);
void bulk_load(void *shared, const void *global, uint32_t bytes, uint64_t *bar);
void bulk_store(void *global, const void *shared, uint32_t bytes);
void bulk_commit();
void bulk_wait(int groups, bool read);
void proxy_fence();

// ---- a network (network.cpp)
void network_put(void *to, const void *from, size_t bytes, uint64_t *flag, uint64_t value); // then the flag
void network_store(void *to, uint64_t value, size_t bytes);
bool network_is_quiet(); // of this rank's

// ---- launches (machine.cpp)
struct Launch {
  std::function<void()> body;
  unsigned blocks = 0, threads = 0;
  size_t dynamic_bytes = 0;
};
int launch(void *stream, std::function<void()> body, unsigned blocks, unsigned threads, size_t dynamic_bytes);

} // namespace emulated
