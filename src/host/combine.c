/* Combine: each rank pulls the rows of its tokens from where the experts left them, and sums them in rank order. */
#include "epcy/host.h"
#include "pool.h"
#include "simd.h"

typedef struct combine_context {
  const epcy_host *h;
  const epcy_host_combine *call;
  const epcy_simd *simd;
  int layout;
} combine_context;

static const char *row_of(const combine_context *c, const epcy_route *route, int64_t row_bytes) {
  const epcy_host *h = c->h;
  return h->base[route->rank] + epcy_host_record(h, route->rank, h->epoch)->area_offset + route->row * row_bytes;
}

static void combine_weights(const combine_context *c, const epcy_route *routes, float *out) {
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

static void combine_token(const combine_context *c, int64_t t, const char **plain, const char **lanes, float *weights,
                          int *group_end) {
  const epcy_host_combine *call = c->call;
  const int64_t num_topk = c->h->shape.num_topk, hidden = c->h->shape.hidden;
  const int64_t row_bytes = hidden * (call->dtype == EPCY_FP32 ? 4 : 2);
  const epcy_route *routes = call->routes + t * num_topk;
  epcy_sum sum = {plain, 0, lanes, weights, group_end, 0};
  for (int b = 0; b < 2; b++)
    if (call->bias[b]) plain[sum.num_plain++] = call->bias[b] + t * row_bytes;
  int num_lanes = 0;
  for (int64_t i = 0, next; i < num_topk && routes[i].rank >= 0; i = next) {
    for (next = i; next < num_topk && routes[next].rank == routes[i].rank; next++) {
      if (c->layout == EPCY_LAYOUT_RANK || routes[next].row < 0) continue;
      lanes[num_lanes] = row_of(c, &routes[next], row_bytes);
      weights[num_lanes++] = call->topk_weights ? call->topk_weights[t * num_topk + routes[next].lane] : 1.0f;
    }
    if (c->layout == EPCY_LAYOUT_EXPERT) group_end[sum.num_groups++] = num_lanes;
    else if (routes[i].row >= 0) plain[sum.num_plain++] = row_of(c, &routes[i], row_bytes);
  }
  c->simd->sum[call->dtype](call->out + t * row_bytes, &sum, hidden);
  if (call->out_weights) combine_weights(c, routes, call->out_weights + t * num_topk);
}

static void combine_tokens(const void *context, int64_t begin, int64_t end) {
  const combine_context *c = context;
  const int64_t num_topk = c->h->shape.num_topk;
  const char *plain[num_topk + 2], *lanes[num_topk]; /* K is at most 1024 */
  float weights[num_topk];
  int group_end[num_topk];
  const unsigned saved = epcy_float_begin();
  for (int64_t t = begin; t < end; t++) combine_token(c, t, plain, lanes, weights, group_end);
  epcy_float_end(saved);
}

void epcy_host_combine_rows(epcy_host *h, const epcy_host_combine *call) {
  const combine_context c = {h, call, epcy_simd_table(), epcy_host_record(h, h->rank, h->epoch)->layout};
  epcy_pool_run(h->pool, combine_tokens, &c, call->num_tokens, 16);
}
