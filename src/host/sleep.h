/* Sleeping until another rank has stored a word. */
#ifndef EPCY_SLEEP_H
#define EPCY_SLEEP_H

#include <stdatomic.h>
#include <stdint.h>

/* A rank's bell: others ring it while `asleep` says that somebody may be waiting for it. */
typedef struct epcy_bell {
  _Atomic uint32_t rung, asleep;
} epcy_bell;

/* The waiter: say so, look again at what is waited for, and only then sleep. */
uint32_t epcy_bell_begin(epcy_bell *bell); /* what `rung` was */
void epcy_bell_sleep(epcy_bell *bell, uint32_t rung, int64_t at_most_ns);
void epcy_bell_end(epcy_bell *bell);
/* The others, after their store: a fence, then a ring for each bell whose owner may be asleep. */
void epcy_bell_fence(void);
void epcy_bell_ring(epcy_bell *bell);

#endif
