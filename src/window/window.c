/* The addresses of a freed window, and how much of a window is in use. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "epcy/layout.h"
#include "epcy/window.h"

/* Arrays of the user may still look at memory that MPI has unmapped: give those addresses empty pages, so that reading
 * them gives zeros and not a crash. Nothing happens where something else lies there by now. */
int epcy_window_guard(void *address, int64_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  void *got = mmap(address, (size_t)bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (got == MAP_FAILED) return errno;
  if (got != address) { /* a kernel that does not know MAP_FIXED_NOREPLACE */
    munmap(got, (size_t)bytes);
    return EEXIST;
  }
  return 0;
}

void epcy_window_unguard(void *address, int64_t bytes) { munmap(address, (size_t)bytes); }

int64_t epcy_window_untouched(void *address, int64_t bytes) {
  enum { CHUNK = 1 << 16 };
  unsigned char seen[CHUNK / 8];
  const int64_t step = (int64_t)sizeof seen * EPCY_PAGE_BYTES;
  int64_t untouched = 0;
  for (int64_t at = 0; at < bytes; at += step) {
    const int64_t part = bytes - at < step ? bytes - at : step;
    if (mincore((char *)address + at, (size_t)part, seen)) return 0;
    for (int64_t i = 0; i < (part + EPCY_PAGE_BYTES - 1) / EPCY_PAGE_BYTES; i++)
      if (!(seen[i] & 1)) untouched += EPCY_PAGE_BYTES;
  }
  return untouched;
}
