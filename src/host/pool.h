/* A few threads that share one call's tokens. */
#ifndef EPCY_POOL_H
#define EPCY_POOL_H

#include <stdint.h>

typedef void (*epcy_task)(const void *context, int64_t begin, int64_t end);
typedef struct epcy_pool epcy_pool;

/* num_threads counts the caller. Returns 0 or an errno. */
int epcy_pool_open(epcy_pool **pool, int num_threads);
void epcy_pool_close(epcy_pool *pool);
/* Let no more than num_threads, the caller among them, work from now on; the others keep sleeping. */
void epcy_pool_limit(epcy_pool *pool, int num_threads);
/* Run task over [0, count) in pieces of `grain`; returns when all are done. A NULL pool, or less work than two grains,
 * runs in the caller alone. */
void epcy_pool_run(epcy_pool *pool, epcy_task task, const void *context, int64_t count, int64_t grain);

#endif
