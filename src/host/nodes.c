/* Between nodes: messages of rows and of sums, made and taken apart.
 *
 * A token goes once to each link that it has a row beyond, with where its rows lie; the rank there puts it into those
 * rows. Back, that rank sums what its node has of the token, rounds once, and the source adds up what its links send, in
 * the order of the groups. Sums are those of combine.c: the bits cannot differ. */
#include <string.h>

#include "combine.h"
#include "epcy/nodes.h"
#include "simd.h"

enum { SECTION_BYTES = 16 };

_Static_assert(sizeof(epcy_message) % SECTION_BYTES == 0, "the first section is aligned");

/* Where the sections of a message begin, and where it ends. */
typedef struct sections {
  int64_t routes, weights, scales, rows, end;
} sections;

static sections sections_of(int64_t num_tokens, int64_t num_topk, int with_routes, int with_weights, int64_t num_scales,
                            int64_t row_bytes) {
  sections s;
  s.routes = (int64_t)sizeof(epcy_message);
  s.weights = s.routes + (with_routes ? num_tokens * num_topk * (int64_t)sizeof(epcy_route) : 0);
  s.scales = epcy_round_up(s.weights + (with_weights ? num_tokens * num_topk * 4 : 0), SECTION_BYTES);
  s.rows = epcy_round_up(s.scales + num_tokens * num_scales * 4, SECTION_BYTES);
  s.end = s.rows + num_tokens * row_bytes;
  return s;
}

int64_t epcy_nodes_message_bytes(const epcy_host *h, const epcy_nodes *n) {
  return sections_of(n->chunk_tokens, h->shape.num_topk, 1, 1, epcy_num_scales(h->shape.hidden), h->shape.row_bytes)
      .end;
}

static int has_row_beyond(const epcy_nodes *n, const epcy_route *routes, int64_t num_topk, int32_t link) {
  for (int64_t i = 0; i < num_topk && routes[i].rank >= 0; i++)
    if (routes[i].row >= 0 && n->link_of[routes[i].rank] == link) return 1;
  return 0;
}

void epcy_nodes_count(const epcy_host *h, const epcy_nodes *n, const epcy_route *routes, int64_t num_tokens,
                      int64_t *counts) {
  const int64_t num_topk = h->shape.num_topk;
  int64_t last[n->num_links + 1]; /* the last token of each link */
  for (int64_t l = 0; l < n->num_links; l++) counts[l] = 0, last[l] = -1;
  for (int64_t t = 0; t < num_tokens; t++)
    for (int64_t i = t * num_topk; i < (t + 1) * num_topk && routes[i].rank >= 0; i++) {
      const int32_t link = n->link_of[routes[i].rank];
      if (link < 0 || routes[i].row < 0 || last[link] == t) continue;
      last[link] = t;
      counts[link]++;
    }
}

static epcy_message *begin_message(char *to, uint64_t epoch, int kind, const epcy_stream *stream, int64_t num_tokens,
                                   int64_t bytes) {
  epcy_message *m = (epcy_message *)to;
  memset(m, 0, sizeof *m);
  m->epoch = epoch, m->kind = kind;
  m->num_in_all = stream->num_in_all, m->first = stream->next;
  m->num_tokens = (int32_t)num_tokens, m->bytes = bytes;
  return m;
}

static int64_t tokens_left(const epcy_stream *stream, int64_t most) {
  const int64_t left = stream->num_in_all - stream->next;
  return left < most ? left : most;
}

int64_t epcy_nodes_pack(const epcy_host *h, const epcy_nodes *n, const epcy_host_dispatch *call, int32_t link,
                        int with_routes, epcy_stream *stream, char *to) {
  const int64_t num_topk = h->shape.num_topk, count = tokens_left(stream, n->chunk_tokens);
  const sections s =
      sections_of(count, num_topk, with_routes, call->topk_weights != NULL, call->num_scales, call->row_bytes);
  begin_message(to, h->epoch, EPCY_MESSAGE_ROWS, stream, count, s.end);
  for (int64_t i = 0; i < count; stream->token++) {
    const int64_t t = stream->token;
    const epcy_route *routes = call->routes + t * num_topk;
    if (!has_row_beyond(n, routes, num_topk, link)) continue;
    epcy_route *out = (epcy_route *)(to + s.routes) + i * num_topk;
    int64_t used = 0;
    for (int64_t k = 0; with_routes && k < num_topk && routes[k].rank >= 0; k++)
      if (n->link_of[routes[k].rank] == link) out[used++] = routes[k];
    for (; with_routes && used < num_topk; used++) out[used] = (epcy_route){.rank = -1, .lane = -1, .row = -1};
    if (call->topk_weights)
      memcpy(to + s.weights + i * num_topk * 4, call->topk_weights + t * num_topk, (size_t)num_topk * 4);
    if (call->scales)
      memcpy(to + s.scales + i * call->num_scales * 4, call->scales + t * call->num_scales * 4,
             (size_t)call->num_scales * 4);
    memcpy(to + s.rows + i * call->row_bytes, call->x + t * call->x_stride_bytes, (size_t)call->row_bytes);
    i++;
  }
  stream->next += count;
  return s.end;
}

int64_t epcy_nodes_payload_bytes(const epcy_host_dispatch *call, const char *message) {
  return ((const epcy_message *)message)->num_tokens * (call->row_bytes + call->num_scales * 4);
}

void epcy_nodes_forward(epcy_host *h, const epcy_host_dispatch *like, int with_routes, epcy_route *routes,
                        const char *message) {
  const epcy_message *m = (const epcy_message *)message;
  const int64_t num_topk = h->shape.num_topk;
  const sections s =
      sections_of(m->num_tokens, num_topk, with_routes, like->topk_weights != NULL, like->num_scales, like->row_bytes);
  epcy_host_dispatch part = *like;
  part.routes = routes + m->first * num_topk;
  if (with_routes) memcpy(part.routes, message + s.routes, (size_t)(m->num_tokens * num_topk) * sizeof(epcy_route));
  part.x = message + s.rows, part.x_stride_bytes = like->row_bytes, part.num_tokens = m->num_tokens;
  part.topk_weights = like->topk_weights ? (const float *)(message + s.weights) : NULL;
  part.scales = like->num_scales ? message + s.scales : NULL;
  epcy_host_send(h, &part);
}

int64_t epcy_nodes_pack_weights(const epcy_host *h, const epcy_nodes *n, const epcy_route *routes, const float *weights,
                                int32_t link, epcy_stream *stream, int64_t most_bytes, char *to) {
  const int64_t num_topk = h->shape.num_topk;
  int64_t most = (most_bytes - (int64_t)sizeof(epcy_message)) / (num_topk * 4);
  const int64_t count = tokens_left(stream, most);
  const int64_t end = (int64_t)sizeof(epcy_message) + count * num_topk * 4;
  begin_message(to, h->epoch, EPCY_MESSAGE_WEIGHTS, stream, count, end);
  float *out = (float *)(to + sizeof(epcy_message));
  for (int64_t i = 0; i < count; stream->token++) {
    const int64_t t = stream->token;
    if (!has_row_beyond(n, routes + t * num_topk, num_topk, link)) continue;
    memcpy(out + i++ * num_topk, weights + t * num_topk, (size_t)num_topk * 4);
  }
  stream->next += count;
  return end;
}

static combine_context context_of(const epcy_host *h, const epcy_host_combine *call, const char **rows) {
  const int layout = epcy_host_record(h, h->rank, h->epoch)->layout;
  epcy_combine_find_rows(h, rows);
  return (combine_context){h, call, layout == EPCY_LAYOUT_RANK ? ORDER_ROWS : ORDER_RANKS, rows,
                           epcy_simd_table()->sum[call->dtype]};
}

int64_t epcy_nodes_reduce(epcy_host *h, const epcy_nodes *n, const epcy_host_combine *like, const epcy_route *routes,
                          const float *weights, int with_weights, epcy_stream *stream, char *to) {
  const int64_t num_topk = h->shape.num_topk, count = tokens_left(stream, n->chunk_tokens);
  const int64_t row_bytes = h->shape.hidden * (like->dtype == EPCY_FP32 ? 4 : 2);
  const sections s = sections_of(count, num_topk, 0, with_weights, 0, row_bytes);
  begin_message(to, h->epoch, EPCY_MESSAGE_SUMS, stream, count, s.end);
  epcy_host_combine part = {.routes = routes + stream->next * num_topk, .num_tokens = count, .dtype = like->dtype};
  part.topk_weights = weights ? weights + stream->next * num_topk : NULL;
  part.out = to + s.rows;
  part.out_weights = with_weights ? (float *)(to + s.weights) : NULL;
  epcy_host_combine_rows(h, &part);
  stream->next += count;
  return s.end;
}

/* ---- the source's sum ---------------------------------------------------------------------------------------- */

typedef struct summing {
  const combine_context *c; /* its call: one token whose routes are `picked` */
  const epcy_nodes *n;
  epcy_nodes_sum *s;
  epcy_host_combine *one;
  epcy_route *picked;
  const char **plain, **lanes, **inner;
  float *weights;
  int *group_end;
  int32_t *groups;
  int64_t row_bytes;
  int with_weights;
} summing;

/* The message with the next token of a link; NULL: it is not here. */
static const epcy_message *message_of(const epcy_nodes_sum *s, int32_t link) {
  const epcy_message *m = (const epcy_message *)s->messages[link];
  return m && s->next[link] < m->first + m->num_tokens ? m : NULL;
}

/* The groups in which a token has rows, ascending; -1: a message is missing. */
static int64_t find_groups(const summing *u, const epcy_route *routes) {
  const int64_t num_topk = u->c->h->shape.num_topk;
  int64_t num_groups = 0;
  for (int64_t k = 0; k < num_topk && routes[k].rank >= 0; k++) {
    const int32_t link = u->n->link_of[routes[k].rank], group = u->n->group_of[routes[k].rank];
    if (routes[k].row < 0) continue;
    if (link >= 0 && !message_of(u->s, link)) {
      u->s->wanted = link;
      return -1;
    }
    int64_t i = num_groups;
    while (i > 0 && u->groups[i - 1] > group) i--;
    if (i > 0 && u->groups[i - 1] == group) continue;
    memmove(u->groups + i + 1, u->groups + i, (size_t)(num_groups - i) * sizeof *u->groups);
    u->groups[i] = group;
    num_groups++;
  }
  return num_groups;
}

/* What a group of this node adds to a token: a row of its own if there is but one, else their sum, rounded. */
static const char *sum_here(const summing *u, const epcy_route *routes, int32_t group, char *out) {
  const epcy_host *h = u->c->h;
  const int64_t num_topk = h->shape.num_topk;
  int64_t used = 0;
  int one_row = u->c->order == ORDER_ROWS;
  for (int64_t k = 0; k < num_topk && routes[k].rank >= 0; k++) {
    if (u->n->group_of[routes[k].rank] != group || routes[k].row < 0) continue;
    one_row &= used == 0 || u->picked[0].rank == routes[k].rank;
    u->picked[used++] = routes[k];
  }
  if (one_row) return u->c->rows[u->picked[0].rank] + u->picked[0].row * u->row_bytes;
  if (used < num_topk) u->picked[used].rank = -1;
  u->one->out = out;
  epcy_combine_token(u->c, 0, u->inner, u->lanes, u->weights, u->group_end);
  return out;
}

static const char *sum_beyond(const summing *u, const epcy_message *m, int32_t link) {
  const sections s = sections_of(m->num_tokens, u->c->h->shape.num_topk, 0, u->with_weights, 0, u->row_bytes);
  return (const char *)m + s.rows + (u->s->next[link] - m->first) * u->row_bytes;
}

static void returned_weights(const summing *u, const epcy_route *routes, float *out) {
  const int64_t num_topk = u->c->h->shape.num_topk;
  int64_t used = 0;
  for (int64_t k = 0; k < num_topk && routes[k].rank >= 0; k++)
    if (u->n->link_of[routes[k].rank] < 0) u->picked[used++] = routes[k];
  if (used < num_topk) u->picked[used].rank = -1;
  epcy_combine_weights(u->c, u->picked, out);
  for (int64_t k = 0; k < num_topk && routes[k].rank >= 0; k++) {
    const int32_t link = u->n->link_of[routes[k].rank];
    if (link < 0 || routes[k].row < 0) continue;
    const epcy_message *m = message_of(u->s, link);
    const sections s = sections_of(m->num_tokens, num_topk, 0, 1, 0, u->row_bytes);
    const float *theirs = (const float *)((const char *)m + s.weights) + (u->s->next[link] - m->first) * num_topk;
    out[routes[k].lane] = theirs[routes[k].lane];
  }
}

/* Sum a token of which everything is here. */
static void sum_token(const summing *u, int64_t t, const epcy_route *routes, int64_t num_groups) {
  const epcy_host_combine *call = u->s->call;
  const int64_t num_topk = u->c->h->shape.num_topk;
  epcy_sum sum = {u->plain, 0, NULL, NULL, NULL, 0, 0};
  char *scratch = u->s->scratch;
  for (int b = 0; b < 2; b++)
    if (call->bias[b]) u->plain[sum.num_plain++] = call->bias[b] + t * u->row_bytes;
  u->one->topk_weights = call->topk_weights ? call->topk_weights + t * num_topk : NULL;
  for (int64_t g = 0; g < num_groups; g++) {
    int64_t k = 0;
    while (u->n->group_of[routes[k].rank] != u->groups[g] || routes[k].row < 0) k++;
    const int32_t link = u->n->link_of[routes[k].rank];
    if (link >= 0) {
      u->plain[sum.num_plain++] = sum_beyond(u, message_of(u->s, link), link);
    } else {
      u->plain[sum.num_plain++] = sum_here(u, routes, u->groups[g], scratch);
      scratch += u->row_bytes;
    }
  }
  u->c->sum(call->out + t * u->row_bytes, &sum, u->c->h->shape.hidden);
  if (call->out_weights) returned_weights(u, routes, call->out_weights + t * num_topk);
  for (int64_t g = 0; g < num_groups; g++) { /* of each link one token is used up */
    int64_t k = 0;
    while (u->n->group_of[routes[k].rank] != u->groups[g] || routes[k].row < 0) k++;
    if (u->n->link_of[routes[k].rank] >= 0) u->s->next[u->n->link_of[routes[k].rank]]++;
  }
}

void epcy_nodes_sum_tokens(epcy_host *h, const epcy_nodes *n, epcy_nodes_sum *s, int with_weights) {
  const int64_t num_topk = h->shape.num_topk;
  const char *rows[h->shape.num_ranks], *plain[num_topk + 2], *inner[num_topk + 2], *lanes[num_topk];
  float weights[num_topk];
  int group_end[num_topk];
  int32_t groups[num_topk + 1];
  epcy_route picked[num_topk];
  epcy_host_combine one = {.routes = picked, .num_tokens = 1, .dtype = s->call->dtype};
  const combine_context c = context_of(h, &one, rows);
  const summing u = {&c,          n,         s,      &one,
                     picked,      plain,     lanes,  inner,
                     weights,     group_end, groups, h->shape.hidden * (s->call->dtype == EPCY_FP32 ? 4 : 2),
                     with_weights};
  const unsigned saved = epcy_float_begin();
  s->wanted = -1;
  for (; s->token < s->call->num_tokens; s->token++) {
    const epcy_route *routes = s->call->routes + s->token * num_topk;
    const int64_t num_groups = find_groups(&u, routes);
    if (num_groups < 0) break;
    sum_token(&u, s->token, routes, num_groups);
  }
  epcy_float_end(saved);
}
