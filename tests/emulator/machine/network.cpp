// A network between ranks: puts wait in queues of their rank, of which none knows of the others.
#include "inside.h"

namespace emulated {

constexpr unsigned kQueues = 4, kLongestNs = 20000;

static Stream &any_queue() {
  const int rank = machine.block->stream->rank;
  std::vector<Stream *> queues;
  for (auto &s : machine.streams)
    if (s->is_queue && s->rank == rank) queues.push_back(s.get());
  while (queues.size() < kQueues) {
    machine.streams.push_back(std::make_unique<Stream>());
    queues.push_back(machine.streams.back().get());
    queues.back()->rank = rank, queues.back()->is_queue = true;
  }
  return *queues[machine.random.below(kQueues)];
}
static void later(Stream &queue, std::function<void()> what) {
  Operation o;
  o.wait_ns = 1 + machine.random.below(kLongestNs);
  o.begin = [=] { return what(), true; };
  queue.operations.push_back(std::move(o));
}
static void check(const void *p, size_t bytes) {
  if (!bytes || !region_of(p, bytes)) fail("a put of %zu bytes at %p, which are in nobody's memory", bytes, p);
}

// Every second 16 bytes, of those that begin at `first`.
static void copy_some(char *to, const char *from, size_t bytes, size_t first) {
  for (size_t i = first; i < bytes; i += 32) memcpy(to + i, from + i, bytes - i < 16 ? bytes - i : 16);
}
// The source is read when its turn comes, and in two parts, the ends of lines before their beginnings.
void network_put(void *to, const void *from, size_t bytes, uint64_t *flag, uint64_t value) {
  check(to, bytes), check(from, bytes), check(flag, 8);
  Stream &queue = any_queue();
  for (size_t first : {16, 0}) later(queue, [=] { copy_some((char *)to, (const char *)from, bytes, first); });
  later(queue, [=] { *flag = value; });
}
void network_store(void *to, uint64_t value, size_t bytes) {
  check(to, bytes);
  later(any_queue(), [=] { memcpy(to, &value, bytes); });
}
bool network_is_quiet() {
  for (auto &s : machine.streams)
    if (s->is_queue && s->rank == machine.block->stream->rank && !s->operations.empty()) return false;
  return true;
}

} // namespace emulated
