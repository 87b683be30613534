/* Low latency between nodes: a call is one message to each rank of another node, which finds all of it in its copy of
 * the sender's slot.
 *
 * Of a dispatch that is the header, the lists, and the rows of tokens that go to the receiver's experts, each once.
 * Of a combine it is the header and the experts' rows for the receiver's tokens; they stay in the message, where the
 * copied header points, until they are summed. */
#include <stdlib.h>
#include <string.h>

#include "epcy/nodes.h"
#include "low_latency.h"

enum { SECTION_BYTES = 64 };

typedef struct low_latency_message {
  uint64_t epoch;
  int32_t kind, slot;
  int64_t num_tokens, num_rows; /* entries of the list; rows that travel */
  int64_t row_bytes, scale_bytes;
  int64_t bytes, payload_bytes;
} low_latency_message;

/* Of a dispatch: header | firsts (E + 1) | the receiver's part of tokens | which tokens have rows | scales | rows.
 * Of a combine: header | where each local expert's rows begin, and how many there are (L + 1) | rows. */
typedef struct sections {
  int64_t header, firsts, tokens, senders, scales, rows, end;
} sections;

static sections sections_of(const epcy_shape *s, const low_latency_message *m) {
  const int dispatch = m->kind == EPCY_LOW_LATENCY_DISPATCH;
  sections at;
  at.header = epcy_round_up((int64_t)sizeof(low_latency_message), SECTION_BYTES);
  at.firsts = at.header + epcy_low_latency_header_bytes(s);
  at.tokens =
      epcy_round_up(at.firsts + ((dispatch ? s->num_experts : epcy_num_local_experts(s)) + 1) * 4, SECTION_BYTES);
  at.senders = epcy_round_up(at.tokens + m->num_tokens * 4, SECTION_BYTES);
  at.scales = epcy_round_up(at.senders + (dispatch ? m->num_rows * 4 : 0), SECTION_BYTES);
  at.rows = epcy_round_up(at.scales + m->num_rows * m->scale_bytes, SECTION_BYTES);
  at.end = at.rows + m->num_rows * m->row_bytes;
  return at;
}

int64_t epcy_nodes_low_latency_bytes(const epcy_shape *s, int kind) {
  const int64_t local = epcy_num_local_experts(s), lanes = s->num_topk < local ? s->num_topk : local;
  const int64_t tokens = s->num_low_latency_tokens;
  low_latency_message m = {.kind = kind, .num_tokens = tokens * lanes, .row_bytes = s->row_bytes};
  m.num_rows = kind == EPCY_LOW_LATENCY_DISPATCH ? tokens : tokens * lanes;
  m.scale_bytes = epcy_num_scales(s->hidden) * 4;
  return sections_of(s, &m).end;
}

static int64_t item_bytes(const epcy_low_latency_header *header) {
  return header->use_fp8 ? 1 : header->dtype == EPCY_FP32 ? 4 : 2;
}

static void begin_message(const epcy_host *h, low_latency_message *m, const epcy_low_latency_header *header, int kind,
                          int slot, uint64_t epoch) {
  memset(m, 0, sizeof *m);
  m->epoch = epoch, m->kind = kind, m->slot = slot;
  m->row_bytes = h->shape.hidden * item_bytes(header);
}

static int64_t end_message(const epcy_host *h, low_latency_message *m, const epcy_low_latency_header *header,
                           char *to) {
  const sections at = sections_of(&h->shape, m);
  memcpy(to + at.header, header, (size_t)epcy_low_latency_header_bytes(&h->shape));
  m->bytes = at.end;
  m->payload_bytes = m->num_rows * (m->row_bytes + m->scale_bytes);
  memcpy(to, m, sizeof *m);
  return at.end;
}

static int64_t pack_dispatch(const epcy_host *h, int slot, uint64_t epoch, int64_t rank, char *to) {
  const epcy_shape *s = &h->shape;
  const int64_t local = epcy_num_local_experts(s);
  const epcy_low_latency_header *header = epcy_low_latency_header_at(h, h->rank, EPCY_LOW_LATENCY_DISPATCH, slot);
  const slot_layout l = epcy_slot_layout(s);
  const char *from = epcy_slot_at(h, h->rank, slot);
  const int32_t *firsts = (const int32_t *)(from + l.firsts), *tokens = (const int32_t *)(from + l.tokens);
  uint8_t *goes = calloc((size_t)s->num_low_latency_tokens, 1); /* the tokens with rows there */
  low_latency_message m;
  if (!goes) return -1;
  begin_message(h, &m, header, EPCY_LOW_LATENCY_DISPATCH, slot, epoch);
  if (header->use_fp8) m.scale_bytes = s->hidden / (header->use_ue8m0 ? 512 : 128) * 4;
  if (!header->refused) m.num_tokens = firsts[(rank + 1) * local] - firsts[rank * local];
  for (int64_t i = 0; i < m.num_tokens; i++) {
    uint8_t *one = &goes[tokens[firsts[rank * local] + i]];
    m.num_rows += !*one;
    *one = 1;
  }
  const sections at = sections_of(s, &m);
  if (!header->refused) {
    memcpy(to + at.firsts, firsts, (size_t)(s->num_experts + 1) * 4);
    memcpy(to + at.tokens, tokens + firsts[rank * local], (size_t)m.num_tokens * 4);
  }
  for (int64_t t = 0, i = 0; i < m.num_rows; t++) {
    if (!goes[t]) continue;
    ((int32_t *)(to + at.senders))[i] = (int32_t)t;
    memcpy(to + at.scales + i * m.scale_bytes, from + l.scales + t * m.scale_bytes, (size_t)m.scale_bytes);
    memcpy(to + at.rows + i * m.row_bytes, from + l.rows + t * m.row_bytes, (size_t)m.row_bytes);
    i++;
  }
  free(goes);
  return end_message(h, &m, header, to);
}

/* Rows of `source` at a local expert: up to those of the next source that was placed. */
static int64_t rows_of(const int32_t *bases, int64_t source, int64_t num_ranks, int64_t local, int64_t expert,
                       int64_t all) {
  if (bases[source * local + expert] < 0) return 0;
  for (int64_t next = source + 1; next < num_ranks; next++)
    if (bases[next * local + expert] >= 0) return bases[next * local + expert] - bases[source * local + expert];
  return all - bases[source * local + expert];
}

static int64_t pack_combine(const epcy_host *h, int slot, uint64_t epoch, int64_t rank, const int64_t *counts,
                            char *to) {
  const epcy_shape *s = &h->shape;
  const int64_t local = epcy_num_local_experts(s), room = s->num_ranks * s->num_low_latency_tokens;
  const epcy_low_latency_header *header = epcy_low_latency_header_at(h, h->rank, EPCY_LOW_LATENCY_COMBINE, slot);
  const int32_t *bases = epcy_low_latency_bases(h, h->rank, EPCY_LOW_LATENCY_COMBINE, slot);
  low_latency_message m;
  begin_message(h, &m, header, EPCY_LOW_LATENCY_COMBINE, slot, epoch);
  int32_t starts[local + 1];
  for (int64_t e = 0; e <= local; e++) {
    starts[e] = (int32_t)m.num_rows;
    if (e < local && counts && !header->refused) m.num_rows += rows_of(bases, rank, s->num_ranks, local, e, counts[e]);
  }
  const sections at = sections_of(s, &m);
  memcpy(to + at.firsts, starts, sizeof starts);
  for (int64_t e = 0; e < local; e++) {
    const char *from = h->base[h->rank] + header->y_offset + (e * room + bases[rank * local + e]) * m.row_bytes;
    if (starts[e + 1] > starts[e])
      memcpy(to + at.rows + starts[e] * m.row_bytes, from, (size_t)((starts[e + 1] - starts[e]) * m.row_bytes));
  }
  return end_message(h, &m, header, to);
}

int64_t epcy_nodes_low_latency_pack(const epcy_host *h, int kind, int slot, uint64_t epoch, int64_t rank,
                                    const int64_t *counts, char *to, int64_t *payload_bytes) {
  const int64_t bytes = kind == EPCY_LOW_LATENCY_DISPATCH ? pack_dispatch(h, slot, epoch, rank, to)
                                                          : pack_combine(h, slot, epoch, rank, counts, to);
  if (bytes > 0) *payload_bytes = ((const low_latency_message *)to)->payload_bytes;
  return bytes;
}

uint64_t epcy_nodes_low_latency_epoch(const char *message) { return ((const low_latency_message *)message)->epoch; }

void epcy_nodes_low_latency_apply(epcy_host *h, int64_t rank, const char *message) {
  const low_latency_message *m = (const low_latency_message *)message;
  const epcy_shape *s = &h->shape;
  const sections at = sections_of(s, m);
  epcy_low_latency_header *header = epcy_low_latency_header_at(h, rank, m->kind, m->slot);
  if (header->epoch == m->epoch) return; /* it is here already */
  memcpy(header, message + at.header, (size_t)epcy_low_latency_header_bytes(s));
  if (m->kind == EPCY_LOW_LATENCY_COMBINE) {
    header->y_offset = message + at.rows - h->base[rank];
  } else if (!header->refused) {
    const int64_t local = epcy_num_local_experts(s);
    const slot_layout l = epcy_slot_layout(s);
    char *to = epcy_slot_at(h, rank, m->slot);
    const int32_t *firsts = (const int32_t *)(message + at.firsts), *senders = (const int32_t *)(message + at.senders);
    memcpy(to + l.firsts, firsts, (size_t)(s->num_experts + 1) * 4);
    memcpy(to + l.tokens + firsts[h->rank * local] * 4, message + at.tokens, (size_t)m->num_tokens * 4);
    for (int64_t i = 0; i < m->num_rows; i++) {
      memcpy(to + l.scales + senders[i] * m->scale_bytes, message + at.scales + i * m->scale_bytes,
             (size_t)m->scale_bytes);
      memcpy(to + l.rows + senders[i] * m->row_bytes, message + at.rows + i * m->row_bytes, (size_t)m->row_bytes);
    }
  }
  epcy_low_latency_publish(header, m->epoch);
}

void epcy_nodes_low_latency_routes(const epcy_host *h, uint64_t epoch, const epcy_route *routes, int64_t num_tokens,
                                   epcy_route *out) {
  const epcy_shape *s = &h->shape;
  const int64_t local = epcy_num_local_experts(s), room = s->num_ranks * s->num_low_latency_tokens;
  const int32_t *starts[s->num_ranks], *bases[s->num_ranks];
  for (int64_t r = 0; r < s->num_ranks; r++) {
    const epcy_low_latency_header *header =
        h->is_remote[r] ? epcy_low_latency_find(h, r, EPCY_LOW_LATENCY_COMBINE, epoch) : NULL;
    starts[r] = bases[r] = NULL;
    if (!header) continue;
    bases[r] = (const int32_t *)(header + 1) + h->rank * local;
    /* The starts lie before the rows, at the end of their section: see sections_of. */
    starts[r] = (const int32_t *)(h->base[r] + header->y_offset - epcy_round_up((local + 1) * 4, SECTION_BYTES));
  }
  memcpy(out, routes, (size_t)(num_tokens * s->num_topk) * sizeof *out);
  for (int64_t i = 0; i < num_tokens * s->num_topk; i++) {
    epcy_route *route = &out[i];
    if (route->rank < 0 || route->row < 0 || !starts[route->rank]) continue;
    const int64_t e = route->local_expert;
    route->row += starts[route->rank][e] - e * room - bases[route->rank][e];
  }
}
