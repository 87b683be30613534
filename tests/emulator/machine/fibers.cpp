// Threads of a kernel as fibers, and how they meet: warps and barriers.
#include <link.h>

#include "inside.h"

namespace emulated {

// ---- a fiber's registers
#if defined(__x86_64__)
extern "C" void emulated_switch(void **from, void *to);
asm(R"(
.text
.globl emulated_switch
.hidden emulated_switch
emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
void *new_context(char *stack, size_t bytes, void (*entry)()) {
  void **top = (void **)(((uintptr_t)stack + bytes - 64) & ~(uintptr_t)15);
  *--top = nullptr; // a function begins with its stack 8 bytes off a multiple of 16
  *--top = (void *)entry;
  for (int i = 0; i < 6; i++) *--top = nullptr;
  return top;
}
void switch_context(void **from, void *to) { emulated_switch(from, to); }
void free_context(void *) {}
#else
#include <ucontext.h>
void *new_context(char *stack, size_t bytes, void (*entry)()) {
  ucontext_t *c = new ucontext_t;
  getcontext(c);
  c->uc_stack.ss_sp = stack, c->uc_stack.ss_size = bytes, c->uc_link = nullptr;
  makecontext(c, entry, 0);
  return c;
}
void switch_context(void **from, void *to) {
  if (!*from) *from = new ucontext_t;
  swapcontext((ucontext_t *)*from, (ucontext_t *)to);
}
void free_context(void *context) { delete (ucontext_t *)context; }
#endif

// ---- static shared memory
//
// `__shared__` makes a variable static thread_local, and the sources are compiled with the oldest way to reach those: a
// call of __tls_get_addr with the variable's offset. It is ours, and gives an address in the memory of the block that
// runs. So each block has its own, and a variable stays what it is in the source.
static char *static_shared;
extern "C" __attribute__((visibility("hidden"))) void *__tls_get_addr(size_t *module_and_offset) {
  return static_shared + module_and_offset[1];
}
void set_static_shared(char *memory) { static_shared = memory; }

size_t static_shared_bytes() {
  static size_t bytes = [] {
    struct Found {
      uintptr_t here;
      size_t bytes;
    } found = {(uintptr_t)&static_shared, 0};
    dl_iterate_phdr(
        [](dl_phdr_info *info, size_t, void *data) {
          Found *f = (Found *)data;
          bool is_ours = false;
          size_t tls = 0;
          for (int i = 0; i < info->dlpi_phnum; i++) {
            const auto &h = info->dlpi_phdr[i];
            const uintptr_t begin = info->dlpi_addr + h.p_vaddr;
            is_ours |= h.p_type == PT_LOAD && f->here >= begin && f->here < begin + h.p_memsz;
            if (h.p_type == PT_TLS) tls = h.p_memsz;
          }
          if (is_ours) f->bytes = tls;
          return (int)is_ours;
        },
        &found);
    return found.bytes;
  }();
  return bytes;
}

static void leave() { switch_context(&machine.fiber->context, machine.scheduler); }

void fail(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record_failure(format, arguments);
  va_end(arguments);
  for (;;) leave();
}

void yield() { leave(); }

// ---- warps
static const uint64_t *meet(const char *what, unsigned mask, uint64_t value, bool orders_memory) {
  Warp &w = machine.warp();
  const unsigned lane = machine.fiber->index & 31;
  if (mask != ~0u) fail("%s of a part of a warp is not emulated", what);
  if (w.live != ~0u) fail("%s of a warp some of whose threads have ended", what);
  if (w.arrived && w.what != what && strcmp(w.what, what)) fail("threads of a warp meet in %s and in %s", w.what, what);
  const int turn = w.turn;
  w.what = what;
  w.values[turn][lane] = value;
  w.arrived |= 1u << lane;
  w.runnable &= ~(1u << lane);
  if (w.arrived == ~0u) {
    w.arrived = 0, w.turn ^= 1, w.runnable = w.live, w.lines.clear();
    const uint32_t first = machine.fiber->index & ~31u;
    for (Store &s : machine.block->buffer.stores)
      if (orders_memory && s.thread - first < 32 && s.met < kWarp) s.met = kWarp;
  }
  leave(); // the last one too, so that all go on side by side
  return w.values[turn];
}
const uint64_t *exchange(const char *what, unsigned mask, uint64_t value) { return meet(what, mask, value, false); }
void warp_barrier(unsigned mask) { meet("syncwarp", mask, 0, true); }

// ---- barriers of a block
void Block::open_barrier(Barrier &barrier) {
  std::vector<bool> came(fibers.size());
  for (Fiber *f : barrier.waiting) {
    const unsigned i = f->index;
    came[i] = true, f->result = barrier.any;
    warps[i / 32].runnable |= 1u << (i & 31);
  }
  for (Store &s : buffer.stores)
    if (came[s.thread]) s.met = kBlock;
  barrier.waiting.clear(), barrier.any = false;
}
bool block_barrier(int id, unsigned threads, bool value) {
  Block &b = *machine.block;
  Barrier &barrier = b.barriers[id];
  Fiber &f = *machine.fiber;
  machine.warp().runnable &= ~(1u << (f.index & 31));
  barrier.waiting.push_back(&f), barrier.any |= value;
  if (barrier.waiting.size() >= (threads ? threads : b.num_live)) b.open_barrier(barrier);
  leave();
  return f.result;
}

uint64_t clock_ns() { return machine.now; }
char *dynamic_shared() { return machine.block->shared + machine.block->static_bytes; }
size_t shared_offset(const void *p) { return (const char *)p - machine.block->shared; }

} // namespace emulated
