// Bulk copies and the barriers that count them. A copy reads and writes some time after it was issued, while no block runs.
#include "inside.h"

namespace emulated {

namespace {
struct Bits {           // of an mbarrier
  int64_t missing : 30; // bytes
  uint64_t pending : 12, count : 12, phase : 1, magic : 9;
};
constexpr unsigned kMagic = 0x17B;
static_assert(sizeof(Bits) == 8, "as on a GPU");

Bits bits_of(const uint64_t *bar) {
  Bits b;
  memcpy(&b, bar, sizeof b);
  if (b.magic != kMagic) fail("a barrier in shared memory is used before it is initialised");
  return b;
}
void settle(uint64_t *bar, Bits b) {
  if (b.pending == 0 && b.missing == 0) b.phase ^= 1, b.pending = b.count;
  memcpy(bar, &b, sizeof b);
}
void check_copy(const void *shared, const void *global, uint32_t bytes) {
  const Block &b = *machine.block;
  const char *s = (const char *)shared;
  if (((uintptr_t)shared | (uintptr_t)global | bytes) % 16 || !bytes)
    fail("a bulk copy of %u bytes between %p and shared memory at %td is not aligned", bytes, global, s - b.shared);
  if (s < b.shared || s + bytes > b.shared + b.shared_bytes) fail("a bulk copy beyond shared memory");
  if (!region_of(global, bytes)) fail("a bulk copy of %u bytes at %p is in nobody's memory", bytes, global);
}
int delay() { return machine.random.chance(0.9) ? machine.random.below(3) : machine.random.below(40); }
} // namespace

void barrier_init(uint64_t *bar, int count) {
  Bits b = {};
  b.pending = b.count = count, b.magic = kMagic;
  memcpy(bar, &b, sizeof b);
}
void barrier_arrive(uint64_t *bar, uint32_t expected_bytes) {
  Bits b = bits_of(bar);
  if (!b.pending) fail("more arrivals at a barrier than it counts");
  b.missing += expected_bytes, b.pending -= 1;
  settle(bar, b);
}
bool barrier_try(uint64_t *bar, uint32_t parity) {
  yield();
  return bits_of(bar).phase != parity;
}

void bulk_load(void *shared, const void *global, uint32_t bytes, uint64_t *bar) {
  check_copy(shared, global, bytes);
  bits_of(bar);
  machine.block->copies.push_back({(char *)global, (char *)shared, bytes, bar, nullptr, -1, delay(), delay(), {}});
}
void bulk_store(void *global, const void *shared, uint32_t bytes) {
  check_copy(shared, global, bytes);
  Fiber &f = *machine.fiber;
  if (!f.open) f.open = std::make_shared<Group>();
  f.open->unread++, f.open->unwritten++;
  machine.block->copies.push_back(
      {(char *)global, (char *)shared, bytes, nullptr, f.open, (int)f.index, delay(), delay(), {}});
}
void bulk_commit() {
  Fiber &f = *machine.fiber;
  f.groups.push_back(f.open ? f.open : std::make_shared<Group>());
  f.open = nullptr;
}
void bulk_wait(int groups, bool read) {
  Fiber &f = *machine.fiber;
  auto done = [&] {
    for (size_t i = 0; i + groups < f.groups.size(); i++)
      if (read ? f.groups[i]->unread : f.groups[i]->unwritten) return false;
    return true;
  };
  while (!done()) yield();
  while (f.groups.size() > (size_t)groups && f.groups[0]->unwritten == 0) f.groups.erase(f.groups.begin());
}

void Block::progress_copies() {
  for (size_t i = 0; i < copies.size();) {
    Copy &c = copies[i];
    if (!c.has_read && c.first_delay-- <= 0) {
      c.has_read = true;
      const char *from = c.bar ? c.global : c.shared;
      c.data.assign(from, from + c.bytes);
      if (c.group) c.group->unread--;
    }
    if (!c.has_read || c.second_delay-- > 0) {
      i++;
      continue;
    }
    if (c.bar) {
      memcpy(c.shared, c.data.data(), c.bytes);
      Bits b = bits_of(c.bar);
      b.missing -= c.bytes;
      settle(c.bar, b);
    } else {
      c.group->unwritten--;
      buffer.show(), buffer.drop_overlaps(c.global, c.bytes), buffer.hide();
      buffer.add(c.global, c.bytes, c.thread, kPlain, c.data.data());
    }
    if (i + 1 < copies.size()) copies[i] = std::move(copies.back());
    copies.pop_back();
  }
}

} // namespace emulated
