// How the rows of the expert layout hang together: a token's rows at one rank form a chain in the order of its lanes.
//
// A link is a row's next row plus one (0: none), with kNotFirst set on every row but a chain's first. Padding is not
// first and has no next. Senders write links into the receive area, where the rank layout has wider ids; the receiver
// keeps them in the handle. With one lane a token there are no chains, and no room for links: the pointer is null.
#pragma once
#include "epcy/cuda.h"
#include "ptx.cuh"

constexpr uint32_t kNotFirst = 0x80000000u;
constexpr int kChain = 8;  // rows of a chain that a thread holds in registers; longer ones go on in memory
constexpr int kBatch = 16; // rows that a warp looks at together

EPCY_DEVICE int32_t *links_of(const epcy_peers &p, char *area) {
  return p.shape.num_topk > 1 ? (int32_t *)(area + p.area.topk_idx + p.shape.num_rows * 8) : nullptr;
}
EPCY_DEVICE int next_row(int32_t link) { return (int)((uint32_t)link & ~kNotFirst) - 1; }
// Peers may have written it in this kernel: not from the cache of this SM.
EPCY_DEVICE int32_t load_link(const int32_t *links, int row) { return links ? __ldcg(links + row) : 0; }

// Each thread's own chain; row[0] is -1 if `row` is no chain's first.
struct Chain {
  int row[kChain], rest;
  int32_t link;
  EPCY_DEVICE Chain(const int32_t *links, int at) : link(at < 0 ? (int32_t)kNotFirst : load_link(links, at)) {
    row[0] = (uint32_t)link & kNotFirst ? -1 : at;
    int next = row[0] < 0 ? -1 : next_row(link);
#pragma unroll
    for (int j = 1; j < kChain; j++) {
      row[j] = next;
      if (next >= 0) next = next_row(load_link(links, next));
    }
    rest = next;
  }
  // A whole warp: the chain of thread `from`.
  EPCY_DEVICE Chain(const Chain &all, int from) : rest(__shfl_sync(~0u, all.rest, from)), link(0) {
#pragma unroll
    for (int j = 0; j < kChain; j++) row[j] = __shfl_sync(~0u, all.row[j], from);
  }
};
