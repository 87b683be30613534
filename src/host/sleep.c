#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "sleep.h"

#include <limits.h>
#include <time.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Nobody is missed: the waiter's `asleep` and its second look stand in one order with the others' store and their look
 * at `asleep`, by the two sequentially consistent fences. Either the second look sees the store, or they see `asleep`. */

uint32_t epcy_bell_begin(epcy_bell *bell) {
  const uint32_t rung = atomic_load_explicit(&bell->rung, memory_order_relaxed);
  atomic_store_explicit(&bell->asleep, 1, memory_order_relaxed);
  atomic_thread_fence(memory_order_seq_cst);
  return rung;
}

void epcy_bell_sleep(epcy_bell *bell, uint32_t rung, int64_t at_most_ns) {
  const struct timespec limit = {at_most_ns / 1000000000, at_most_ns % 1000000000};
#if defined(__linux__)
  syscall(SYS_futex, &bell->rung, FUTEX_WAIT, rung, &limit, NULL, 0); /* returns at once if it rang since */
#else
  (void)bell, (void)rung;
  const struct timespec nap = {0, limit.tv_nsec < 100000 && !limit.tv_sec ? limit.tv_nsec : 100000};
  nanosleep(&nap, NULL);
#endif
}

void epcy_bell_end(epcy_bell *bell) { atomic_store_explicit(&bell->asleep, 0, memory_order_relaxed); }

void epcy_bell_fence(void) { atomic_thread_fence(memory_order_seq_cst); }

void epcy_bell_ring(epcy_bell *bell) {
  if (!atomic_load_explicit(&bell->asleep, memory_order_relaxed)) return;
  atomic_fetch_add_explicit(&bell->rung, 1, memory_order_relaxed);
#if defined(__linux__)
  syscall(SYS_futex, &bell->rung, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
#endif
}
