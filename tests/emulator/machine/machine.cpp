// Which block runs when, and what ranks do one after the other.
#include "inside.h"

#include <algorithm>
#include <cstdio>

#include <sys/mman.h>

Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

Machine machine;

void record_failure(const char *format, va_list arguments) {
  if (machine.failed) return;
  char text[512];
  vsnprintf(text, sizeof text, format, arguments);
  machine.failed = true, machine.error = text;
  if (machine.block) {
    char where[128];
    snprintf(where, sizeof where, " (rank %d, block %u of %u, thread %d, slice %llu)", machine.block->stream->rank,
             machine.block->number, machine.block->launch->blocks, machine.fiber ? (int)machine.fiber->index : -1,
             (unsigned long long)machine.slices);
    machine.error += where;
  }
}
static void failed(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record_failure(format, arguments);
  va_end(arguments);
}

// ---- a block
static std::vector<char *> spare_stacks; // of 1024 fibers each; pages that nobody touches cost nothing
static char *take_stacks() {
  if (spare_stacks.empty())
    return (char *)mmap(nullptr, 1024 * kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  char *stacks = spare_stacks.back();
  spare_stacks.pop_back();
  return stacks;
}

static void enter() {
  machine.block->launch->body();
  machine.fiber->ended = true;
  for (;;) yield();
}

void Block::start(Stream *of, const Launch &what, unsigned index) {
  stream = of, launch = &what, number = index, num_live = what.threads;
  static_bytes = (static_shared_bytes() + 127) / 128 * 128 + 16, shared_bytes = static_bytes + what.dynamic_bytes;
  memory.resize(shared_bytes + 256);
  memset(memory.data(), machine.random.below(256), memory.size()); // it begins with anything
  shared = memory.data() + (128 - (uintptr_t)memory.data() % 128) % 128;
  stacks = take_stacks();
  fibers.resize(what.threads), warps.resize((what.threads + 31) / 32);
  for (unsigned i = 0; i < what.threads; i++) {
    fibers[i].index = i;
    fibers[i].context = new_context(stacks + i * kStackBytes, kStackBytes, enter);
    *(uint64_t *)(stacks + i * kStackBytes) = kStackBytes;
    warps[i / 32].live |= 1u << (i % 32);
  }
  for (Warp &w : warps) w.runnable = w.live;
  static const double speeds[] = {1, 1, 0.3, 0.05}, eager[] = {1, 0.5, 0.1, 0.02};
  speed = speeds[machine.random.below(4)];
  eagerness = eager[machine.random.below(4)], eagerness_of_words = eager[machine.random.below(3)];
}

void Block::run_lane(Warp &warp, Fiber &fiber) {
  machine.fiber = &fiber, threadIdx = {fiber.index};
  switch_context(&machine.scheduler, fiber.context);
  if (!fiber.ended) return;
  const uint32_t lane = 1u << (fiber.index & 31);
  warp.live &= ~lane, warp.runnable &= ~lane, num_live--;
  if (*(uint64_t *)(stacks + fiber.index * kStackBytes) != kStackBytes) failed("a stack is too small");
  free_context(fiber.context);
  if (num_live && barriers[0].waiting.size() >= num_live) open_barrier(barriers[0]); // those that ended need not come
}

void Block::run_slice() {
  progress_copies();
  if (machine.failed) return;
  machine.block = this, set_static_shared(shared);
  blockIdx = {number}, blockDim = {launch->threads}, gridDim = {launch->blocks};
  buffer.show();
  const unsigned visits = 1 + machine.random.below(2 * (unsigned)warps.size());
  bool any = false;
  for (unsigned v = 0, w = machine.random.below((unsigned)warps.size()); v < visits || (!any && v < warps.size());
       v++) {
    Warp &warp = warps[w];
    w = machine.random.chance(0.2) ? machine.random.below((unsigned)warps.size()) : (w + 1) % warps.size();
    if (!any && v >= visits) w = (w + 1) % warps.size();
    const uint32_t runnable = warp.runnable, first = ~0u << machine.random.below(32); // the lane to begin with
    for (uint32_t some : {runnable & first, runnable & ~first})
      for (uint32_t lanes = some; lanes && !machine.failed; lanes &= lanes - 1, any = true)
        run_lane(warp, fibers[(&warp - warps.data()) * 32 + __builtin_ctz(lanes)]);
    if (machine.failed) break;
  }
  machine.fiber = nullptr;
  bool waits = num_live > 0;
  for (const Warp &warp : warps) waits &= warp.runnable == 0;
  if (waits) failed("all threads wait for threads that do not come");
  drain();
  buffer.hide();
  machine.block = nullptr;
}

// Whether nothing of it is under way any more. Threads may have ended long before.
bool Block::has_ended() {
  if (num_live) return false;
  for (const Copy &c : copies)
    if (!c.has_read && c.group) failed("a block ended before a bulk store had read its shared memory");
  eagerness = std::max(eagerness, 0.2), speed = 1;
  return copies.empty() && buffer.stores.empty();
}
Block::~Block() { spare_stacks.push_back(stacks); }

// ---- streams
int launch(void *stream, std::function<void()> body, unsigned blocks, unsigned threads, size_t dynamic_bytes) {
  if (!stream || !blocks || !threads || threads > 1024 || threads % 32) return 1;
  Operation o;
  o.launch.body = std::move(body), o.launch.blocks = blocks, o.launch.threads = threads;
  o.launch.dynamic_bytes = dynamic_bytes;
  ((Stream *)stream)->operations.push_back(std::move(o));
  return 0;
}

// Let a stream come as far as its next kernel; false when there is nothing left.
static bool advance(Stream &s) {
  while (s.blocks.empty() && !s.operations.empty()) {
    Operation &o = s.operations.front();
    if (o.wait_ns) s.not_before = machine.now + o.wait_ns, o.wait_ns = 0;
    if (machine.now < s.not_before) return true;
    if (o.begin) o.begin();
    for (unsigned i = 0; i < o.launch.blocks; i++) {
      s.blocks.push_back(std::make_unique<Block>());
      s.blocks.back()->start(&s, o.launch, i);
    }
    if (s.blocks.empty()) s.operations.pop_front();
  }
  return !s.operations.empty();
}

static void run_one() {
  bool any = false;
  std::vector<Block *> ready;
  for (auto &s : machine.streams)
    for (auto &b : s->blocks) ready.push_back(b.get());
  machine.slices++, machine.now += 50 + machine.random.below(100);
  while (!ready.empty() && !any) {
    Block &b = *ready[machine.random.below((uint32_t)ready.size())];
    if (machine.random.chance(0.01)) b.speed = machine.random.chance(0.5) ? 1 : 0.05;
    if (!machine.random.chance(b.speed)) continue;
    b.run_slice();
    any = true;
    if (machine.failed || !b.has_ended()) continue;
    Stream &s = *b.stream;
    for (size_t i = 0; i < s.blocks.size(); i++)
      if (s.blocks[i].get() == &b) {
        s.blocks.erase(s.blocks.begin() + i);
        break;
      }
    if (s.blocks.empty()) s.operations.pop_front();
  }
}

bool run(uint64_t seed, uint64_t most_slices) {
  machine.random.state = seed * 1000003 + 17;
  machine.failed = false, machine.error.clear(), machine.slices = 0;
  for (;;) {
    bool more = false;
    for (auto &s : machine.streams) more |= advance(*s);
    if (!more || machine.failed) break;
    if (machine.slices > most_slices) failed("kernels do not end within %llu slices", (unsigned long long)most_slices);
    else run_one();
  }
  return !machine.failed;
}

} // namespace emulated
