/* The memory of a meter, and what is read from a histogram. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "epcy/meter.h"

epcy_meter *epcy_meter_open(int64_t num_ranks, int64_t first_expert, int64_t num_experts, int64_t num_events) {
  epcy_meter *m = calloc(1, sizeof *m);
  if (!m) return NULL;
  m->num_ranks = num_ranks;
  m->times = calloc(EPCY_METER_OPS, sizeof *m->times); /* pages of operations that are never called stay untouched */
  m->wait_ns = calloc((size_t)num_ranks * 3, 8);
  m->own_gauges = m->gauges = calloc(1, (size_t)epcy_gauges_bytes(num_experts));
  if (!m->times || !m->wait_ns || !m->gauges || epcy_meter_resize(m, num_events)) {
    epcy_meter_close(m);
    return NULL;
  }
  m->tokens_to = m->wait_ns + num_ranks;
  m->tokens_from = m->tokens_to + num_ranks;
  m->gauges->first_expert = first_expert;
  m->gauges->num_experts = num_experts;
  return m;
}

void epcy_meter_close(epcy_meter *m) {
  if (!m) return;
  free(m->times);
  free(m->wait_ns);
  free(m->own_gauges);
  free(m->ring);
  free(m);
}

int epcy_meter_resize(epcy_meter *m, int64_t num_events) {
  uint64_t capacity = 1;
  while (capacity < (uint64_t)num_events) capacity *= 2;
  epcy_event *ring = calloc(capacity, sizeof *ring);
  if (!ring) return ENOMEM;
  free(m->ring);
  m->ring = ring;
  m->capacity = capacity;
  m->num_events = 0;
  return 0;
}

void epcy_meter_attach(epcy_meter *m, char *page) {
  epcy_gauges *to = page ? (epcy_gauges *)(page + EPCY_GAUGES_AT) : m->own_gauges;
  if (to != m->gauges) memcpy(to, m->gauges, (size_t)epcy_gauges_bytes(m->gauges->num_experts));
  m->gauges = to;
}

void epcy_meter_reset(epcy_meter *m) {
  memset(m->times, 0, EPCY_METER_OPS * sizeof *m->times);
  memset(m->wait_ns, 0, (size_t)m->num_ranks * 3 * 8);
  memset(m->most_rows, 0, sizeof m->most_rows);
  memset(m->node_bytes, 0, sizeof m->node_bytes);
}

int64_t epcy_histogram_quantile(const epcy_histogram *h, double share) {
  const int64_t rank = (int64_t)(share * (double)(h->count - 1)); /* as many spans lie below it */
  int64_t seen = 0;
  for (int b = 0; b < EPCY_NUM_BUCKETS; b++) {
    seen += h->bucket[b];
    if (seen <= rank) continue;
    const int64_t start = epcy_bucket_start(b), middle = start + (epcy_bucket_start(b + 1) - start) / 2;
    return middle < h->min_ns ? h->min_ns : middle > h->max_ns ? h->max_ns : middle;
  }
  return h->max_ns;
}
