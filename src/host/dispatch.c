/* Dispatch: count, place, send.  Every rank writes each of its rows once, straight to its final place. */
#include <string.h>

#include "epcy/host.h"
#include "pool.h"
#include "routes.h"
#include "simd.h"

/* Fill routes with ordinals among the rows that this rank sends to the same rank (rank layout) or expert (expert
 * layout), and count both. */
void epcy_host_count(const epcy_host *h, const void *topk_idx, int is_int64, int64_t num_tokens, int layout,
                     epcy_route *routes, int64_t *counts, int64_t *expert_counts, epcy_bad_id *bad) {
  const int64_t num_experts = h->shape.num_experts, num_topk = h->shape.num_topk;
  const int64_t num_local = epcy_num_local_experts(&h->shape);
  memset(counts, 0, (size_t)h->shape.num_ranks * 8);
  memset(expert_counts, 0, (size_t)num_experts * 8);
  bad->num_bad = 0;
  for (int64_t t = 0; t < num_tokens; t++, routes += num_topk) {
    int64_t used = 0;
    for (int64_t k = 0; k < num_topk; k++) {
      const int64_t expert = read_id(topk_idx, is_int64, t * num_topk + k);
      if (expert < 0 || expert >= num_experts) {
        if (expert != -1 && bad->num_bad++ == 0) bad->token = t, bad->lane = k, bad->value = expert;
        continue;
      }
      epcy_route route = {0};
      route.rank = (int32_t)epcy_rank_of_expert(expert, num_local);
      route.lane = (int32_t)k;
      route.local_expert = (int32_t)epcy_local_expert(expert, num_local);
      route.row = expert_counts[expert]++;
      insert_route(routes, used++, route);
    }
    for (int64_t i = 0; i < used; i++) {
      const int first = i == 0 || routes[i].rank != routes[i - 1].rank;
      if (first) counts[routes[i].rank]++;
      if (layout == EPCY_LAYOUT_RANK) routes[i].row = counts[routes[i].rank] - 1;
    }
    for (int64_t i = used; i < num_topk; i++) routes[i] = (epcy_route){.rank = -1, .lane = -1, .row = -1};
  }
}

int64_t epcy_host_rows(const epcy_host *h, int64_t rank, int64_t *limit) {
  const epcy_record *mine = epcy_host_record(h, rank, h->epoch);
  const int64_t num_ranks = h->shape.num_ranks, num_local = epcy_num_local_experts(&h->shape);
  int64_t rows = 0;
  *limit = mine->limit;
  if (mine->layout == EPCY_LAYOUT_RANK) {
    for (int64_t s = 0; s < num_ranks; s++) rows += epcy_host_counts(h, s, h->epoch)[rank];
    return rows;
  }
  for (int64_t e = rank * num_local; e < (rank + 1) * num_local; e++) {
    int64_t count = 0;
    for (int64_t s = 0; s < num_ranks; s++) count += epcy_host_expert_counts(h, s, h->epoch)[e];
    rows += epcy_padded(count, mine->alignment);
  }
  return rows;
}

/* base[i]: this rank's first row at destination i (rank layout: a rank; expert layout: an expert). */
static void find_bases(const epcy_host *h, int layout, int64_t alignment, int64_t *base) {
  const int64_t num_ranks = h->shape.num_ranks, num_local = epcy_num_local_experts(&h->shape);
  if (layout == EPCY_LAYOUT_RANK) {
    memset(base, 0, (size_t)num_ranks * 8);
    for (int64_t s = 0; s < h->rank; s++) {
      const int64_t *counts = epcy_host_counts(h, s, h->epoch);
      for (int64_t d = 0; d < num_ranks; d++) base[d] += counts[d];
    }
    return;
  }
  int64_t start = 0;
  for (int64_t e = 0; e < h->shape.num_experts; e++) {
    int64_t before = 0, all = 0;
    for (int64_t s = 0; s < num_ranks; s++) {
      const int64_t count = epcy_host_expert_counts(h, s, h->epoch)[e];
      all += count;
      if (s < h->rank) before += count;
    }
    if (e % num_local == 0) start = 0; /* the next rank */
    base[e] = start + before;
    start += epcy_padded(all, alignment);
  }
}

/* Turn ordinals into rows, clip, and learn what this rank receives. */
void epcy_host_place(const epcy_host *h, epcy_host_dispatch *call) {
  const epcy_record *mine = epcy_host_record(h, h->rank, h->epoch);
  const int64_t num_local = epcy_num_local_experts(&h->shape), num_ranks = h->shape.num_ranks;
  int64_t *base = h->scratch, unused;
  find_bases(h, mine->layout, mine->alignment, base);
  for (int64_t i = 0; i < call->num_tokens * h->shape.num_topk; i++) {
    epcy_route *r = &call->routes[i];
    if (r->rank < 0) continue;
    r->row += base[mine->layout == EPCY_LAYOUT_RANK ? r->rank : r->rank * num_local + r->local_expert];
    if (r->row >= epcy_host_record(h, r->rank, h->epoch)->limit) r->row = -1;
  }
  call->num_rows = epcy_host_rows(h, h->rank, &unused);
  call->expert_offsets[0] = 0;
  for (int64_t l = 0; l < num_local; l++) {
    int64_t count = 0;
    for (int64_t s = 0; s < num_ranks; s++) count += epcy_host_expert_counts(h, s, h->epoch)[h->rank * num_local + l];
    call->expert_counts[l] = count;
    call->expert_offsets[l + 1] = call->expert_offsets[l] + epcy_padded(count, mine->alignment);
  }
}

typedef struct send_context {
  const epcy_host *h;
  const epcy_host_dispatch *call;
  const epcy_simd *simd;
  int layout, stream;
} send_context;

static void send_token(const send_context *c, int64_t t) {
  const epcy_host *h = c->h;
  const epcy_host_dispatch *call = c->call;
  const int64_t num_topk = h->shape.num_topk;
  const epcy_route *routes = call->routes + t * num_topk;
  const char *row = call->x + t * call->x_stride_bytes;
  const float *weights = call->topk_weights ? call->topk_weights + t * num_topk : NULL;
  for (int64_t i = 0, next; i < num_topk && routes[i].rank >= 0; i = next) {
    for (next = i + 1; c->layout == EPCY_LAYOUT_RANK && next < num_topk && routes[next].rank == routes[i].rank;
         next++) {
    } /* routes [i, next) share a row */
    const int64_t at = routes[i].row;
    if (at < 0 || (h->is_remote && h->is_remote[routes[i].rank])) continue;
    char *area = h->base[routes[i].rank] + epcy_host_record(h, routes[i].rank, h->epoch)->area_offset;
    char *payload = area + h->area.payload + at * call->row_bytes;
    if (c->stream) c->simd->stream(payload, row, call->row_bytes);
    else memcpy(payload, row, (size_t)call->row_bytes);
    if (call->scales)
      memcpy(area + h->area.scales + at * call->num_scales * 4, call->scales + t * call->num_scales * 4,
             (size_t)call->num_scales * 4);
    int64_t *idx = (int64_t *)(area + h->area.topk_idx);
    float *out_weights = (float *)(area + h->area.topk_weights);
    if (c->layout == EPCY_LAYOUT_EXPERT) {
      idx[at] = routes[i].local_expert;
      if (weights) out_weights[at] = weights[routes[i].lane];
      continue;
    }
    idx += at * num_topk;
    out_weights += at * num_topk;
    for (int64_t k = 0; k < num_topk; k++) idx[k] = -1;
    if (weights) memset(out_weights, 0, (size_t)num_topk * 4);
    for (int64_t j = i; j < next; j++) {
      idx[routes[j].lane] = routes[j].local_expert;
      if (weights) out_weights[routes[j].lane] = weights[routes[j].lane];
    }
  }
}

static void send_tokens(const void *context, int64_t begin, int64_t end) {
  const send_context *c = context;
  for (int64_t t = begin; t < end; t++) send_token(c, t);
  if (c->stream) epcy_stream_fence();
}

/* The rows of this rank that nobody sends: padding of the expert layout, and what lies past the count in worst case. */
void epcy_host_fill(const epcy_host *h, const epcy_host_dispatch *call) {
  const epcy_record *mine = epcy_host_record(h, h->rank, h->epoch);
  const int layout = mine->layout;
  char *area = h->base[h->rank] + mine->area_offset;
  int64_t *idx = (int64_t *)(area + h->area.topk_idx);
  float *weights = (float *)(area + h->area.topk_weights);
  const int64_t num_local = epcy_num_local_experts(&h->shape);
  const int64_t width = layout == EPCY_LAYOUT_RANK ? h->shape.num_topk : 1;
  for (int64_t l = 0; layout == EPCY_LAYOUT_EXPERT && l < num_local; l++)
    for (int64_t row = call->expert_offsets[l] + call->expert_counts[l];
         row < call->expert_offsets[l + 1] && row < mine->limit; row++) {
      memset(area + h->area.payload + row * call->row_bytes, 0, (size_t)call->row_bytes);
      if (call->scales) memset(area + h->area.scales + row * call->num_scales * 4, 0, (size_t)call->num_scales * 4);
      idx[row] = -1;
      weights[row] = 0.0f;
    }
  for (int64_t i = call->num_rows * width; i < call->fill_to * width; i++) {
    idx[i] = -1;
    weights[i] = 0.0f;
  }
}

void epcy_host_send(epcy_host *h, const epcy_host_dispatch *call) {
  const int layout = epcy_host_record(h, h->rank, h->epoch)->layout;
  /* Rows for one's own rank and small calls stay in the cache for the reader; large ones would only push it out. */
  const int64_t num_topk = h->shape.num_topk, num_ranks = h->shape.num_ranks;
  const int64_t rows = layout == EPCY_LAYOUT_EXPERT || num_topk < num_ranks ? num_topk : num_ranks; /* of a token */
  const send_context c = {h, call, epcy_simd_table(), layout,
                          call->num_tokens * rows * call->row_bytes >= h->stream_bytes};
  epcy_pool_run(h->pool, send_tokens, &c, call->num_tokens, h->chunk_tokens);
}
