/* What the host backend does with the pages of its window. C11. */
#ifndef EPCY_WINDOW_H
#define EPCY_WINDOW_H

#include <stdint.h>

/* Keep the addresses of a freed window from becoming anything else's; 0, or an errno. */
int epcy_window_guard(void *address, int64_t bytes);
void epcy_window_unguard(void *address, int64_t bytes);

/* Bytes of shared memory that no rank has touched yet. */
int64_t epcy_window_untouched(void *address, int64_t bytes);

#endif
