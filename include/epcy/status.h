/* The status page of a rank: a small file that says where it is, for other ranks' error texts and for `python -m epcy`. Its
 * readers are epcy/status.py. */
#ifndef EPCY_STATUS_H
#define EPCY_STATUS_H

#include <stdint.h>

enum epcy_op { /* OPERATIONS in epcy/status.py */
               EPCY_OP_NONE,
               EPCY_OP_DISPATCH,
               EPCY_OP_COMBINE,
               EPCY_OP_BARRIER,
               EPCY_OP_FREE,
               EPCY_OP_LOW_LATENCY_DISPATCH,
               EPCY_OP_LOW_LATENCY_COMBINE,
               EPCY_NUM_OPS
};
enum epcy_phase { EPCY_PHASE_IDLE, EPCY_PHASE_ARRIVAL, EPCY_PHASE_DATA, EPCY_PHASE_COMPLETION };

typedef struct epcy_status {
  uint64_t magic;
  int32_t version, pid, rank, size;
  int32_t op, phase;
  uint64_t epoch;
  int64_t since_ns; /* CLOCK_MONOTONIC */
  int64_t num_calls[EPCY_NUM_OPS];
  int64_t
      watched_ns; /* written by who looks on, `python -m epcy top`: when; sums that lie on a GPU are fetched only then */
} epcy_status;
#define EPCY_STATUS_MAGIC 0x7375746174737965ull
#define EPCY_STATUS_VERSION 4 /* 3: with epcy_gauges at EPCY_GAUGES_AT; 4: watched_ns */

#endif
