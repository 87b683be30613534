/* Combine: each rank pulls the rows of its tokens from where the experts left them, and sums them in rank order. */
#include <stddef.h>

#include "combine.h"
#include "epcy/host.h"
#include "pool.h"
#include "simd.h"

void epcy_combine_weights(const combine_context *c, const epcy_route *routes, float *out) {
  const epcy_host *h = c->h;
  const int64_t num_topk = h->shape.num_topk;
  for (int64_t k = 0; k < num_topk; k++) out[k] = 0.0f;
  for (int64_t i = 0; i < num_topk && routes[i].rank >= 0; i++) {
    if (routes[i].row < 0) continue;
    const epcy_record *owner = epcy_host_record(h, routes[i].rank, h->epoch);
    const float *weights = (const float *)(h->base[routes[i].rank] + owner->weights_offset);
    out[routes[i].lane] = weights[routes[i].row * num_topk + routes[i].lane];
  }
}

/* Lanes in ascending order; `sum` has room for K. */
static void add_lanes(const combine_context *c, const epcy_route *routes, const float *topk_weights, int64_t row_bytes,
                      const char **lanes, float *weights, epcy_sum *sum) {
  const int64_t num_topk = c->h->shape.num_topk;
  for (int64_t k = 0; k < num_topk; k++) lanes[k] = NULL;
  for (int64_t i = 0; i < num_topk && routes[i].rank >= 0; i++)
    if (routes[i].row >= 0) lanes[routes[i].lane] = c->rows[routes[i].rank] + routes[i].row * row_bytes;
  for (int64_t k = 0; k < num_topk; k++) {
    if (!lanes[k]) continue;
    lanes[sum->num_direct] = lanes[k];
    weights[sum->num_direct++] = topk_weights ? topk_weights[k] : 1.0f;
  }
}

void epcy_combine_token(const combine_context *c, int64_t t, const char **plain, const char **lanes, float *weights,
                        int *group_end) {
  const epcy_host_combine *call = c->call;
  const int64_t num_topk = c->h->shape.num_topk, hidden = c->h->shape.hidden;
  const int64_t row_bytes = hidden * (call->dtype == EPCY_FP32 ? 4 : 2);
  const epcy_route *routes = call->routes + t * num_topk;
  const float *topk_weights = call->topk_weights ? call->topk_weights + t * num_topk : NULL;
  epcy_sum sum = {plain, 0, lanes, weights, group_end, 0, 0};
  for (int b = 0; b < 2; b++)
    if (call->bias[b]) plain[sum.num_plain++] = call->bias[b] + t * row_bytes;
  if (c->order == ORDER_LANES) add_lanes(c, routes, topk_weights, row_bytes, lanes, weights, &sum);
  int num_lanes = 0;
  for (int64_t i = 0, next; c->order != ORDER_LANES && i < num_topk && routes[i].rank >= 0; i = next) {
    const char *rows = c->rows[routes[i].rank];
    for (next = i; next < num_topk && routes[next].rank == routes[i].rank; next++) {
      if (c->order == ORDER_ROWS || routes[next].row < 0) continue;
      lanes[num_lanes] = rows + routes[next].row * row_bytes;
      weights[num_lanes++] = topk_weights ? topk_weights[routes[next].lane] : 1.0f;
    }
    if (c->order == ORDER_RANKS) group_end[sum.num_groups++] = num_lanes;
    else if (routes[i].row >= 0) plain[sum.num_plain++] = rows + routes[i].row * row_bytes;
  }
  c->sum(call->out + t * row_bytes, &sum, hidden);
  if (call->out_weights) epcy_combine_weights(c, routes, call->out_weights + t * num_topk);
}

static void combine_tokens(const void *context, int64_t begin, int64_t end) {
  const combine_context *c = context;
  const int64_t num_topk = c->h->shape.num_topk;
  const char *plain[num_topk + 2], *lanes[num_topk]; /* K is at most 1024 */
  float weights[num_topk];
  int group_end[num_topk];
  const unsigned saved = epcy_float_begin();
  for (int64_t t = begin; t < end; t++) epcy_combine_token(c, t, plain, lanes, weights, group_end);
  epcy_float_end(saved);
}

void epcy_combine_find_rows(const epcy_host *h, const char **rows) {
  for (int64_t r = 0; r < h->shape.num_ranks; r++) rows[r] = h->base[r] + epcy_host_record(h, r, h->epoch)->area_offset;
}

void epcy_host_combine_rows(epcy_host *h, const epcy_host_combine *call) {
  const char *rows[h->shape.num_ranks];
  epcy_combine_find_rows(h, rows);
  const int layout = epcy_host_record(h, h->rank, h->epoch)->layout;
  const combine_context c = {h, call, layout == EPCY_LAYOUT_RANK ? ORDER_ROWS : ORDER_RANKS, rows,
                             epcy_simd_table()->sum[call->dtype]};
  epcy_pool_run(h->pool, combine_tokens, &c, call->num_tokens, h->chunk_tokens);
}

int64_t epcy_host_low_latency_combine(epcy_host *h, const epcy_low_latency_combine *call) {
  const char *rows[h->shape.num_ranks];
  for (int64_t r = 0; r < h->shape.num_ranks; r++) {
    const epcy_low_latency_header *header =
        call->from[r] ? epcy_low_latency_find(h, r, EPCY_LOW_LATENCY_COMBINE, call->epoch) : NULL;
    if (call->from[r] && !header) return r;
    rows[r] = header ? h->base[r] + header->y_offset : NULL;
  }
  const epcy_simd *simd = epcy_simd_table();
  const combine_context c = {h, &call->sum, call->at_source ? ORDER_LANES : ORDER_RANKS, rows,
                             (call->use_logfmt ? simd->sum_logfmt : simd->sum)[call->sum.dtype]};
  epcy_pool_run(h->pool, combine_tokens, &c, call->sum.num_tokens, 4);
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  for (int64_t r = 0; r < h->shape.num_ranks; r++)
    if (call->from[r] && !epcy_low_latency_find(h, r, EPCY_LOW_LATENCY_COMBINE, call->epoch)) return r;
  return -1;
}
