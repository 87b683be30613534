/* Inside the wire region of a rank: headers [kind][slot], then slots of the dispatches. */
#ifndef EPCY_LOW_LATENCY_SLOTS_H
#define EPCY_LOW_LATENCY_SLOTS_H

#include "epcy/host.h"

/* In a slot: */
typedef struct slot_layout {
  int64_t firsts; /* int32 (E + 1): where an expert's tokens begin in `tokens` */
  int64_t tokens; /* int32 (M' * K) */
  int64_t rows, scales, bytes;
} slot_layout;

slot_layout epcy_slot_layout(const epcy_shape *shape);
char *epcy_slot_at(const epcy_host *h, int64_t rank, int slot);
int64_t epcy_low_latency_header_bytes(const epcy_shape *shape); /* with its bases */

#endif
