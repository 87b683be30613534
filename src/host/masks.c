/* Low-latency combines without some ranks.
 *
 * Masks are each rank's own, so ranks may differ about whose tokens were there. Where a row lies at its expert's rank
 * follows from the sources that this rank placed, and it tells in its combine's header where it placed each. */
#include <string.h>

#include "epcy/host.h"

int epcy_host_mask_routes(const epcy_host *h, const epcy_masked_routes *call) {
  const int64_t num_ranks = h->shape.num_ranks, num_topk = h->shape.num_topk;
  const int64_t num_local = epcy_num_local_experts(&h->shape);
  const int32_t *placed[num_ranks];
  int changed = 0;
  for (int64_t d = 0; d < num_ranks; d++) {
    placed[d] = NULL;
    for (int slot = 0; slot < EPCY_NUM_SLOTS && call->from[d]; slot++)
      if (epcy_low_latency_header_at(h, d, EPCY_LOW_LATENCY_COMBINE, slot)->epoch == call->epoch)
        placed[d] = epcy_low_latency_bases(h, d, EPCY_LOW_LATENCY_COMBINE, slot) + h->rank * num_local;
    call->num_dropped[d] = 0;
  }
  for (int64_t i = 0; i < call->num_tokens * num_topk; i++) {
    epcy_route *route = &call->routes[i];
    *route = call->given[i];
    if (route->rank < 0) continue;
    if (route->row < 0) {
      changed = 1;
      continue;
    }
    const int32_t *bases = placed[route->rank];
    const int known = bases != NULL && bases[route->local_expert] >= 0;
    const int64_t by =
        known ? bases[route->local_expert] - call->before[route->rank * num_local + route->local_expert] : 0;
    if (!known) call->num_dropped[route->rank]++;
    changed |= !known || by;
    route->row = known ? route->row + by : -1;
  }
  return changed;
}

void epcy_host_renormalize(const epcy_host *h, const epcy_route *routes, int64_t num_tokens, const float *weights,
                           float *out) {
  const int64_t num_topk = h->shape.num_topk;
  for (int64_t t = 0; t < num_tokens; t++, routes += num_topk, out += num_topk) {
    const float *w = weights ? weights + t * num_topk : NULL;
    unsigned char used[num_topk], left[num_topk];
    int lost = 0;
    memset(used, 0, sizeof used);
    memset(left, 0, sizeof left);
    for (int64_t i = 0; i < num_topk && routes[i].rank >= 0; i++) {
      used[routes[i].lane] = 1;
      left[routes[i].lane] = routes[i].row >= 0;
      lost |= routes[i].row < 0;
    }
    float all = 0.0f, kept = 0.0f;
    for (int64_t k = 0; k < num_topk; k++) { /* float32, lanes ascending */
      out[k] = w ? w[k] : 1.0f;
      if (used[k]) all += out[k];
      if (left[k]) kept += out[k];
    }
    const float factor = all / kept;
    for (int64_t k = 0; k < num_topk && lost && kept != 0.0f; k++)
      if (left[k]) out[k] *= factor;
  }
}
