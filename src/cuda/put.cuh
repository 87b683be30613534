// NVSHMEM's put as the kernels use it, and all that is included of its device headers.
#pragma once
#ifdef EPCY_EMULATED // tests/emulator has these functions for a CPU
#include "emulated_put.h"
#else
#include <nvshmem.h>
#include <nvshmemx.h>

#include "ptx.cuh"

// All threads of a block: copy bytes to a rank, and raise its flag behind them; addresses are this rank's names for it.
// The source must stay as it is until the other side has told that it has come.
EPCY_DEVICE void put_block(char *to, const char *from, size_t bytes, uint64_t *flag, uint64_t value, int pe) {
  nvshmemx_putmem_signal_nbi_block(to, from, bytes, flag, value, NVSHMEM_SIGNAL_SET, pe);
}
// The same without a flag; and one thread: wait until all that this one's block has put has come.
EPCY_DEVICE void put_plain(char *to, const char *from, size_t bytes, int pe) {
  nvshmemx_putmem_nbi_block(to, from, bytes, pe);
}
EPCY_DEVICE void put_quiet() { nvshmem_quiet(); }
// One thread.
EPCY_DEVICE void put_word(uint64_t *to, uint64_t value, int pe) { nvshmem_uint64_p(to, value, pe); }
EPCY_DEVICE void put_half_word(uint32_t *to, uint32_t value, int pe) { nvshmem_uint32_p(to, value, pe); }
// One thread: what is put from here on comes to a rank after what this rank has put there before.
EPCY_DEVICE void put_fence() { nvshmem_fence(); }
// Whether a flag has this value; what came before it can be read then, by this thread and those that it meets.
EPCY_DEVICE bool has_come(uint64_t *flag, uint64_t value) {
  if (load_word_acquire(flag) != value) return false;
  return nvshmem_uint64_test(flag, NVSHMEM_CMP_EQ, value);
}
#endif
