// The lines that rows travel in: everything that knows their format.
//
// Eight neighbouring threads of a warp hold a line, 16 bytes each: seven units of the row, and a tail that begins with
// the epoch. A warp stores and loads whole lines by one instruction. PTX promises that 16 bytes arrive together, not
// that 128 do; that a line does is what NVLink's and L2's 128-byte transactions do (NCCL's LL128 relies on the same). A
// form with a flag behind the data would keep the units and wait elsewhere.
#pragma once
#include "epcy/low_latency.h"
#include "ptx.cuh"

// Which unit of a row a thread of a block has in one part of the row; a part has as many lines as the block has threads
// for.
struct Seat {
  int offset;        // of its 16 bytes in the row
  int at;            // of its unit among those of the slot
  bool line_is_real; // its line is one of the row's
  bool has_data;     // its 16 bytes belong to the row
  bool is_tail;

  EPCY_DEVICE Seat(const epcy_low_latency_call &c, int part) {
    const int line = part * (int)(blockDim.x >> 3) + (int)(threadIdx.x >> 3), unit = threadIdx.x & 7;
    at = line * 8 + unit;
    offset = line * EPCY_LINE_DATA + unit * 16;
    is_tail = unit == 7;
    line_is_real = line < c.num_lines;
    has_data = !is_tail && offset < c.row_bytes;
  }
  EPCY_DEVICE bool late(const uint4 &v, uint32_t epoch) const { return is_tail && line_is_real && v.x != epoch; }
};
EPCY_DEVICE uint4 tail(uint32_t epoch, uint32_t scale) { return make_uint4(epoch, scale, 0, 0); }
EPCY_DEVICE uint32_t scale_of(const uint4 &tail) { return tail.y; }
