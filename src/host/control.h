/* What is inside a control block, for those who copy it. */
#ifndef EPCY_CONTROL_H
#define EPCY_CONTROL_H

#include "epcy/host.h"

int64_t epcy_record_bytes(const epcy_shape *shape); /* with its counts */
/* Set a word in the copy of another node's rank. */
void epcy_host_copy_word(epcy_host *h, int64_t rank, int word, uint64_t value);

#endif
