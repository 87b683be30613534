// What Python calls of the machine, and of the C headers. Kernels are launched by src/cuda's own launchers.
#include <cstdio>

#include "epcy/put.h"
#include "epcy/put_nodes.h"
#include "inside.h"

using namespace emulated;

namespace emulated {
bool run(uint64_t seed, uint64_t most_slices);
}

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void emulated_memory(int rank, char *begin, int64_t bytes) {
  auto at = machine.regions.begin();
  while (at != machine.regions.end() && at->begin < begin) at++;
  machine.regions.insert(at, {begin, begin + bytes, rank});
}
EXPORTED void emulated_reset(int delays_stores) {
  machine.regions.clear(), machine.streams.clear();
  machine.delays_stores = delays_stores;
}
EXPORTED void *emulated_stream(int rank) {
  machine.streams.push_back(std::make_unique<Stream>());
  machine.streams.back()->rank = rank;
  return machine.streams.back().get();
}
EXPORTED void emulated_wait(void *stream, uint64_t ns) {
  Operation o;
  o.wait_ns = ns;
  ((Stream *)stream)->operations.push_back(std::move(o));
}
// On a stream: copy rows, as epcy_cuda_stage and a host's small writes do.
EXPORTED void emulated_copy(void *stream, char *to, const char *from, int64_t rows, int64_t row_bytes,
                            int64_t from_stride) {
  Operation o;
  o.begin = [=] {
    for (int64_t i = 0; i < rows; i++) memcpy(to + i * row_bytes, from + i * from_stride, row_bytes);
    return true;
  };
  ((Stream *)stream)->operations.push_back(std::move(o));
}
EXPORTED int emulated_run(uint64_t seed, uint64_t most_slices, char *text, int64_t bytes) {
  const bool good = run(seed, most_slices);
  snprintf(text, bytes, "%s", machine.error.c_str());
  return good;
}
EXPORTED uint64_t emulated_slices() { return machine.slices; }

// ---- of the headers
EXPORTED void emulated_layout(const epcy_shape *shape, epcy_control *control, epcy_area *area,
                              epcy_low_latency_wire *wire, epcy_heap *heap, int64_t num_mirrors, epcy_put_wire *put,
                              int num_groups, int num_slots, int chunk_tokens, epcy_nodes_wire *nodes) {
  *control = epcy_control_layout(shape), *area = epcy_area_layout(shape);
  *wire = epcy_low_latency_wire_layout(shape, control->bytes);
  *put = epcy_put_layout(shape, wire, num_mirrors);
  const int64_t words = control->bytes + wire->bytes + put->bytes;
  *nodes = epcy_nodes_layout(shape, words, num_groups, num_slots, chunk_tokens);
  *heap = epcy_heap_layout(shape, words + nodes->bytes);
}
EXPORTED void emulated_mirrors(epcy_peers *peers, const epcy_put_wire *wire, uint32_t far) {
  epcy_put_mirrors(peers, wire, far);
}
EXPORTED int64_t emulated_handle(const epcy_shape *shape, char *base, epcy_low_latency_handle *handle) {
  return epcy_low_latency_handle_layout(shape, base, handle);
}
EXPORTED int64_t emulated_sizeof(const char *name) {
#define SIZE_OF(type) \
  if (!strcmp(name, #type)) return sizeof(type);
  SIZE_OF(epcy_shape)
  SIZE_OF(epcy_peers)
  SIZE_OF(epcy_report)
  SIZE_OF(epcy_cuda_dispatch)
  SIZE_OF(epcy_cuda_combine)
  SIZE_OF(epcy_cuda_staging)
  SIZE_OF(epcy_low_latency_dispatch)
  SIZE_OF(epcy_low_latency_combine)
  SIZE_OF(epcy_put)
  SIZE_OF(epcy_nodes_call)
  return -1;
}

// What follows from the rest of a low-latency call, by the header's own functions where it has them.
template <typename Call> auto complete(Call *c, int64_t bytes, int) -> decltype(epcy_low_latency_rows(c, bytes)) {
  epcy_low_latency_constants(c), epcy_low_latency_rows(c, bytes);
}
template <typename Call> void complete(Call *c, int64_t bytes, long) {
  c->row_bytes = bytes, c->num_lines = (int)((bytes + EPCY_LINE_DATA - 1) / EPCY_LINE_DATA);
  c->num_parts = (c->num_lines + EPCY_PART_LINES - 1) / EPCY_PART_LINES;
}
EXPORTED void emulated_complete(epcy_low_latency_call *call, int64_t row_bytes) { complete(call, row_bytes, 0); }
