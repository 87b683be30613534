// Global memory: what a block stores is seen by itself at once and by others later, unless a fence comes between.
//
// The sources are compiled with -fsanitize=thread, whose calls before each store are answered here. While a block does not
// run, the stores in its buffer are taken out of memory; when it goes on they are put back.
#include <algorithm>

#include "inside.h"

namespace emulated {

constexpr size_t kMostStores = 1024;

const Region *region_of(const void *p, size_t bytes) {
  const char *at = (const char *)p;
  auto &all = machine.regions;
  auto it = std::upper_bound(all.begin(), all.end(), at, [](const char *a, const Region &r) { return a < r.begin; });
  return it == all.begin() || at + bytes > (it - 1)->end ? nullptr : &*(it - 1);
}

// ---- the buffer
static void swap(char *a, char *b, size_t n) {
  char t[16];
  for (; n > 16; n -= 16, a += 16, b += 16) memcpy(t, a, 16), memcpy(a, b, 16), memcpy(b, t, 16);
  memcpy(t, a, n), memcpy(a, b, n), memcpy(b, t, n);
}
void StoreBuffer::show() {
  for (auto s = stores.begin(); !shown && s != stores.end(); s++) swap(s->at, s->other(), s->bytes);
  shown = true;
}
void StoreBuffer::hide() {
  for (auto s = stores.rbegin(); shown && s != stores.rend(); s++) swap(s->at, s->other(), s->bytes);
  shown = false;
}
template <typename F> void StoreBuffer::drop_if(F f) { // what is dropped while shown stays in memory for all to see
  stores.erase(std::remove_if(stores.begin(), stores.end(), f), stores.end());
  if (stores.empty()) memset(touched, 0, sizeof touched);
}
static uint32_t bit_of(uintptr_t unit) { return (uint32_t)((unit * 0x9E3779B97F4A7C15ull) >> 52); }
bool StoreBuffer::may_overlap(const char *at, uint32_t bytes) const {
  if (stores.empty()) return false;
  for (uintptr_t u = (uintptr_t)at >> 4; u <= ((uintptr_t)at + bytes - 1) >> 4; u++)
    if (touched[bit_of(u) >> 6] >> (bit_of(u) & 63) & 1) return true;
  return false;
}
void StoreBuffer::drop_overlaps(const char *at, uint32_t bytes) { // stores to one place come in order
  if (may_overlap(at, bytes)) drop_if([=](const Store &s) { return s.at < at + bytes && at < s.at + s.bytes; });
}
void StoreBuffer::add(char *at, uint32_t bytes, uint32_t thread, Order order, const char *copied) {
  Store s;
  s.at = at, s.bytes = bytes, s.thread = thread, s.met = kAlone, s.order = order, s.asynchronous = copied;
  if (bytes > sizeof s.small) s.large.resize(bytes);
  memcpy(s.other(), copied ? copied : at, bytes); // a store that was copied is added while hidden
  for (uintptr_t u = (uintptr_t)at >> 4; u <= ((uintptr_t)at + bytes - 1) >> 4; u++)
    touched[bit_of(u) >> 6] |= 1ull << (bit_of(u) & 63);
  stores.push_back(std::move(s));
}

void Block::drain() { // at the end of a slice
  const uint32_t salt = machine.random.next();
  auto chance = [&](const Store &s) {
    if (s.order != kLine) return machine.random.chance(s.order == kRelaxed ? eagerness_of_words : eagerness);
    Random r; // all of a line at once
    r.state = ((uintptr_t)s.at >> 7) ^ (uint64_t)salt << 32;
    return r.chance(eagerness);
  };
  if (!machine.delays_stores || buffer.stores.size() > kMostStores) buffer.drop_if([](const Store &) { return true; });
  else buffer.drop_if(chance);
}

// ---- what kernels do
static void check_store(const void *p, size_t bytes) {
  if ((uintptr_t)p % (bytes > 16 ? 16 : bytes)) fail("a store of %zu bytes to %p is not aligned", bytes, p);
  if (!region_of(p, bytes)) fail("a store of %zu bytes to %p is in nobody's memory", bytes, p);
}
static bool is_private(const void *p, size_t bytes) { // of the block, or of the fiber
  Block &b = *machine.block;
  const char *at = (const char *)p;
  if (at >= b.stacks && at < b.stacks + b.fibers.size() * kStackBytes) return true;
  if (at < b.memory.data() || at >= b.memory.data() + b.memory.size()) return false;
  if (at < b.shared || at + bytes > b.shared + b.shared_bytes)
    fail("a store of %zu bytes at %td of %zu bytes of shared memory", bytes, at - b.shared, b.shared_bytes);
  if ((uintptr_t)p % (bytes > 16 ? 16 : bytes)) fail("a store of %zu bytes to shared memory is not aligned", bytes);
  return true;
}
void before_store(void *p, size_t bytes, Order order) {
  if (!machine.block || is_private(p, bytes)) return;
  check_store(p, bytes);
  Block &b = *machine.block;
  b.buffer.drop_overlaps((char *)p, bytes);
  b.buffer.add((char *)p, bytes, machine.fiber->index, order, nullptr);
}
void before_atomic(void *p, size_t bytes) {
  if (is_private(p, bytes)) return;
  check_store(p, bytes);
  machine.block->buffer.drop_overlaps((char *)p, bytes);
}
void fence(bool system) {
  const uint32_t me = machine.fiber->index;
  const int rank = machine.block->stream->rank;
  machine.block->buffer.drop_if([=](const Store &s) {
    const bool mine = s.thread == me || s.met == kBlock || (s.met == kWarp && s.thread / 32 == me / 32);
    return mine && !s.asynchronous && (system || region_of(s.at, s.bytes)->rank == rank);
  });
}
void proxy_fence() {
  for (Store &s : machine.block->buffer.stores)
    if (s.thread == machine.fiber->index) s.asynchronous = false;
}

const void *line_of(const void *p) {
  Warp &w = machine.warp();
  const uintptr_t at = (uintptr_t)p & ~(uintptr_t)127;
  const uint32_t bit = 1u << (machine.fiber->index & 31);
  Line *l = nullptr;
  for (Line &c : w.lines)
    if (!l && c.at == at && !(c.seen & bit)) l = &c;
  if (!l) {
    w.lines.emplace_back();
    l = &w.lines.back();
    l->at = at;
    memcpy(l->bytes, (const void *)at, 128);
  }
  l->seen |= bit;
  return l->bytes + ((uintptr_t)p - at);
}

} // namespace emulated

// ---- the compiler's calls
#define EXPORTED extern "C" __attribute__((visibility("hidden")))
static void plain(void *p, size_t bytes) { emulated::before_store(p, bytes, emulated::kPlain); }
static void relaxed(void *p, size_t bytes) { emulated::before_store(p, bytes, emulated::kRelaxed); }
#define OF_SIZE(n)                                                                                                 \
  EXPORTED void __tsan_read##n(void *p) {                                                                          \
    if (n == 16 && (uintptr_t)p % 16 && emulated::machine.block) emulated::fail("a load at %p is not aligned", p); \
  }                                                                                                                \
  EXPORTED void __tsan_unaligned_read##n(void *) {}                                                                \
  EXPORTED void __tsan_volatile_read##n(void *) {}                                                                 \
  EXPORTED void __tsan_unaligned_volatile_read##n(void *) {}                                                       \
  EXPORTED void __tsan_write##n(void *p) { plain(p, n); }                                                          \
  EXPORTED void __tsan_unaligned_write##n(void *p) { plain(p, n); }                                                \
  EXPORTED void __tsan_volatile_write##n(void *p) { relaxed(p, n); }                                               \
  EXPORTED void __tsan_unaligned_volatile_write##n(void *p) { relaxed(p, n); }
OF_SIZE(1)
OF_SIZE(2)
OF_SIZE(4)
OF_SIZE(8)
OF_SIZE(16)
EXPORTED void __tsan_read_range(void *, size_t) {}
EXPORTED void __tsan_write_range(void *p, size_t bytes) { plain(p, bytes); }
EXPORTED void __tsan_vptr_update(void *, void *) {}
EXPORTED void __tsan_vptr_read(void *) {}
EXPORTED void __tsan_func_entry(void *) {}
EXPORTED void __tsan_func_exit() {}
EXPORTED void __tsan_init() {}
