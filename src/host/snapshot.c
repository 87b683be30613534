/* The control block of a rank, as ranks of other nodes have it: a copy that messages keep up to date.
 *
 * Everything that looks at other ranks' words and records looks at these copies, so the protocol is the one of shared
 * memory. A message holds all words at one moment, and the records that they speak of; whoever applies it puts the
 * records in place before the words. */
#include <string.h>

#include "control.h"
#include "epcy/nodes.h"

typedef struct snapshot {
  uint64_t words[EPCY_NUM_WORDS];
  uint64_t without;   /* whether, and until which call, the sender goes on without the receiver */
  epcy_status status; /* since_ns: for how long, since clocks differ between machines */
  epcy_heard said;
  int32_t num_records, num_bytes; /* the latter of all of it */
} snapshot;

static int64_t header_bytes(void) { return epcy_round_up((int64_t)sizeof(snapshot), EPCY_LINE_BYTES); }

int64_t epcy_snapshot_bytes(const epcy_shape *shape) { return header_bytes() + 2 * epcy_record_bytes(shape); }

int64_t epcy_snapshot_take(const epcy_host *h, int64_t rank, uint32_t leaving, uint32_t asked, const epcy_heard *heard,
                           epcy_told *told, char *to) {
  snapshot *s = (snapshot *)to;
  epcy_told now = {.leaving = leaving, .asked = asked, .answered = heard->asked, .started = 1, .record = told->record};
  for (int w = 0; w < EPCY_NUM_WORDS; w++) now.words[w] = epcy_host_word(h, h->rank, w);
  now.without = epcy_host_without(h, h->rank)[rank];
  if (!memcmp(&now, told, sizeof now)) return 0;
  memset(s, 0, (size_t)header_bytes());
  memcpy(s->words, now.words, sizeof s->words);
  s->without = now.without;
  s->status = *epcy_host_status(h, h->rank);
  s->status.since_ns = epcy_now_ns() - s->status.since_ns;
  if (now.words[EPCY_WORD_DONE] >= s->status.epoch) s->status.phase = EPCY_PHASE_IDLE; /* it only waits for others */
  s->said = (epcy_heard){leaving, asked, heard->asked};
  char *at = to + header_bytes();
  for (int i = 1; i >= 0; i--) { /* the older one first */
    const uint64_t arrived = now.words[EPCY_WORD_ARRIVED], epoch = arrived - (uint64_t)i;
    const epcy_record *record = epcy_host_record(h, h->rank, epoch);
    if ((uint64_t)i > arrived || record->epoch != epoch || epoch <= told->record) continue;
    memcpy(at, record, (size_t)epcy_record_bytes(&h->shape));
    at += epcy_record_bytes(&h->shape);
    s->num_records++;
    now.record = epoch;
  }
  *told = now;
  s->num_bytes = (int32_t)(at - to);
  return at - to;
}

int64_t epcy_snapshot_num_bytes(const char *snapshot_) { return ((const snapshot *)snapshot_)->num_bytes; }

void epcy_snapshot_apply(epcy_host *h, int64_t rank, const char *from, epcy_heard *heard) {
  const snapshot *s = (const snapshot *)from;
  const char *at = from + header_bytes();
  for (int i = 0; i < s->num_records; i++, at += epcy_record_bytes(&h->shape))
    memcpy(epcy_host_record(h, rank, ((const epcy_record *)at)->epoch), at, (size_t)epcy_record_bytes(&h->shape));
  epcy_status *status = epcy_host_status(h, rank);
  *status = s->status;
  status->since_ns = epcy_now_ns() - s->status.since_ns;
  __atomic_store_n(epcy_host_without(h, rank) + h->rank, s->without, __ATOMIC_RELEASE);
  for (int w = 0; w < EPCY_NUM_WORDS; w++) {
    /* Who goes on without this rank does not wait for it to listen, so it may be anywhere by now: it is in the way of
     * nothing, and what is missing of it is missing for that reason. */
    const int runs_ahead =
        w == EPCY_WORD_ARRIVED || w == EPCY_WORD_RECEIVED_DISPATCH || w == EPCY_WORD_RECEIVED_COMBINE;
    epcy_host_copy_word(h, rank, w, s->without == UINT64_MAX && runs_ahead ? UINT64_MAX / 2 : s->words[w]);
  }
  *heard = s->said;
}
