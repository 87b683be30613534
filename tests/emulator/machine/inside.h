// The machine's own structures.
#pragma once
#include <cstdarg>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "machine.h"

namespace emulated {

struct Block;
struct Warp;

// ---- one sequence of random numbers decides everything, so a seed repeats a run
struct Random {
  uint64_t state = 1;
  uint32_t next() { // splitmix64
    uint64_t z = state += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull, z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return (uint32_t)(z >> 32);
  }
  uint32_t below(uint32_t n) { return (uint32_t)((uint64_t)next() * n >> 32); }
  bool chance(double p) { return next() < p * 4294967296.0; }
};

// ---- bulk copies
struct Group { // of a thread's bulk stores: how many have not been read, or not been written
  int unread = 0, unwritten = 0;
};
struct Copy {
  char *global, *shared;
  uint32_t bytes;
  uint64_t *bar;                         // of a load
  std::shared_ptr<Group> group;          // of a store
  int thread, first_delay, second_delay; // slices until it is read, and from there until it is written
  std::vector<char> data;
  bool has_read = false;
};

// ---- threads
struct Fiber {
  unsigned index;
  void *context = nullptr;
  bool ended = false, result = false; // of the block's barrier
  std::shared_ptr<Group> open;        // stores that are not committed
  std::vector<std::shared_ptr<Group>> groups;
};
struct Barrier {
  std::vector<Fiber *> waiting;
  bool any = false;
};
struct
    Line { // of global memory, as one load of the warp saw it: the n-th that a lane makes of it is the n-th of all lanes
  uintptr_t at = 0;
  uint32_t seen = 0;
  alignas(16) char bytes[128];
};
struct Warp {
  uint32_t live = 0, runnable = 0, arrived = 0; // lanes
  int turn = 0;
  uint64_t values[2][32];
  const char *what = nullptr;
  std::vector<Line> lines; // since the lanes met
};

// ---- stores that are not visible to other blocks yet
enum Met : uint8_t { kAlone, kWarp, kBlock }; // whose fence makes a store visible: its thread's, its warp's, any
struct Store {
  char *at;
  uint32_t bytes;
  uint32_t thread;
  Met met;
  Order order;
  bool asynchronous; // by a bulk copy: no fence sees it before a proxy fence
  char small[16];    // while the block runs, what others see; while others run, what was stored
  std::vector<char> large;
  char *other() { return large.empty() ? small : large.data(); }
};
struct StoreBuffer {
  std::vector<Store> stores;
  uint64_t touched[64] = {}; // a filter over units of 16 bytes: bits of those in `stores`
  bool shown = true;         // the stores are in memory
  void show();
  void hide();
  void add(char *at, uint32_t bytes, uint32_t thread, Order order, const char *asynchronous);
  void drop_overlaps(const char *at, uint32_t bytes);
  template <typename F> void drop_if(F f);
  bool may_overlap(const char *at, uint32_t bytes) const;
};

struct Stream;
struct Block {
  Stream *stream;
  const Launch *launch;
  unsigned number, num_live;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<char> memory; // static shared memory, dynamic, a margin
  char *shared = nullptr;
  size_t static_bytes = 0, shared_bytes = 0;
  char *stacks = nullptr;
  StoreBuffer buffer;
  std::vector<Copy> copies;
  double speed = 1;                             // how often it runs
  double eagerness = 1, eagerness_of_words = 1; // how soon its stores become visible
  Barrier barriers[16];
  void start(Stream *stream, const Launch &launch, unsigned number);
  void drain();
  void open_barrier(Barrier &barrier);
  void run_slice();
  void run_lane(Warp &warp, Fiber &fiber);
  void progress_copies();
  bool has_ended();
  ~Block();
};

// ---- what ranks do, one after the other
struct Operation {
  std::function<bool()> begin; // whether it is over at once
  Launch launch;
  uint64_t wait_ns = 0;
};
struct Stream {
  int rank;
  std::deque<Operation> operations;
  std::vector<std::unique_ptr<Block>> blocks; // of the launch at the front
  uint64_t not_before = 0;
  bool is_queue = false; // of a network
};

struct Region { // of memory that kernels may write
  char *begin, *end;
  int rank; // -1: the host's
};

struct Machine {
  Random random;
  uint64_t now = 0, slices = 0;
  std::vector<Region> regions; // by address
  std::vector<std::unique_ptr<Stream>> streams;
  std::string error;
  bool failed = false, delays_stores = true;
  Block *block = nullptr; // that runs
  Fiber *fiber = nullptr;
  void *scheduler = nullptr;
  Warp &warp() { return block->warps[(fiber - block->fibers.data()) / 32]; }
};
extern Machine machine;

const Region *region_of(const void *p, size_t bytes);
void *new_context(char *stack, size_t bytes, void (*entry)());
void switch_context(void **from, void *to);
void free_context(void *context);
size_t static_shared_bytes();
void set_static_shared(char *memory);
void record_failure(const char *format, va_list arguments);

constexpr size_t kStackBytes = 32 * 1024;

} // namespace emulated
