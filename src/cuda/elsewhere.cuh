// Ranks that wait for each other in different calls: what a rank's own memory tells of where the others are.
//
// Calls of the two modes, and of the two kinds of low-latency calls, have epochs and headers of their own, so a rank that
// came to another call than this one sends no word that is waited for here. But its header lies in this rank's memory all
// the same: of the next call of its kind, which this rank has not begun. Calls of a Buffer run in one order. So if the
// header that is waited for is not there after that one was seen, it was not sent before it: the ranks disagree.
// Looked at only by waits that take long, as is what their host wants.
#pragma once
#include "epcy/low_latency.h"
#include "ptx.cuh"

// Whether this rank's host wants waits to end. Its memory is far: to be asked now and then.
EPCY_DEVICE bool is_stopped(const epcy_peers &p) { return *(const volatile uint32_t *)&p.report->stop != 0; }

enum { kStepCalls = 2 }; // beside the two kinds of low-latency calls: dispatch, combine, barriers

struct Elsewhere {
  const epcy_peers &p;
  const epcy_low_latency_wire &wire;

  // The epoch of this rank's last call of a kind.
  EPCY_DEVICE uint32_t last(int kind) const {
    const char *own = p.base[p.rank];
    return load_local(kind == kStepCalls ? &((const epcy_local *)(own + p.control.local))->epoch[0]
                                         : &((const epcy_low_latency_local *)(own + wire.local))->epoch[kind][0]);
  }
  // The first word of a rank's header of the call with this epoch, and the one that names the operation.
  EPCY_DEVICE uint64_t header(int kind, uint32_t epoch, int rank, bool names) const {
    const int R = (int)p.shape.num_ranks, half = epoch & 1;
    const char *own = p.base[p.rank];
    if (kind == kStepCalls)
      return load_word_acquire((const uint64_t *)(own + p.control.headers) + (half * R + rank) * EPCY_NUM_HEADERS);
    return load_word_acquire((const uint64_t *)(own + wire.headers) + ((kind * 2 + half) * R + rank) * 2 + names);
  }
  // What a rank does in the next call of a kind that this one has not begun; 0: nothing yet.
  EPCY_DEVICE uint32_t next_call(int kind, int rank) const {
    if (kind != kStepCalls && !wire.bytes) return 0;
    const uint32_t before = last(kind), next = before == 0xFFFFFFFFu ? 2u : before + 1;
    const uint64_t seen = header(kind, next, rank, true);
    return (uint32_t)(seen >> 32) == next ? (uint32_t)seen : 0;
  }
  // The same of all kinds but this call's own.
  EPCY_DEVICE uint32_t other_call(int kind, int rank) const {
    uint32_t found = 0;
#pragma unroll 1
    for (int other = 0; other <= kStepCalls && !found; other++)
      if (other != kind) found = next_call(other, rank);
    return found;
  }
};

// Any threads, now and then in a wait for headers of a call of this kind and epoch: whether `rank` has come to another one
// instead. Then this Buffer is broken, and the host is told who is where; all waits end.
static __device__ __noinline__ bool is_elsewhere(const epcy_peers &p, const epcy_low_latency_wire &wire, int kind,
                                                 uint32_t epoch, int rank, uint32_t mine) {
  const Elsewhere look = {p, wire};
  if (!look.other_call(kind, rank) || (uint32_t)(look.header(kind, epoch, rank, false) >> 32) == epoch) return false;
  epcy_local *local = (epcy_local *)(p.base[p.rank] + p.control.local);
  if (atomicCAS(&local->broken, 0u, 1u) != 0) return true; // somebody else has told
  epcy_report *r = p.report;
  uint32_t *headers = (uint32_t *)r->late_text;
  const int R = (int)p.shape.num_ranks;
  const uint64_t start = global_time_ns();
#pragma unroll 1
  for (int q = 0; q < R;) { // those that are not anywhere yet may come in a moment
    uint32_t found = q == p.rank ? mine : 0;
    if (!found && (uint32_t)(look.header(kind, epoch, q, false) >> 32) == epoch)
      found = (uint32_t)look.header(kind, epoch, q, true);
    if (!found) found = look.other_call(kind, q);
    if (!found && global_time_ns() - start < 50000000) continue;
    headers[q++] = found;
  }
  headers[R] = epoch;
  r->gone = 0, r->phase = EPCY_CUDA_ELSEWHERE, r->peer = rank, r->epoch = epoch, r->operation = p.operation;
  __threadfence_system();
  *(volatile uint32_t *)&r->expired = 1;
  return true;
}
