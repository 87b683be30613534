// How the rows of a low-latency combine travel: as they are, or in LogFMT. A row is a slot of lines on the wire; in a part
// of it each thread has 16 bytes of payload, and a warp sends and receives what its threads have without the others.
#pragma once
#include "epcy/logfmt.h"
#include "low_latency.cuh"
#include "numeric.cuh"

// As they are.
template <int Dtype> struct PlainRows {
  static constexpr int N = Vector<Dtype>::kElements;
  static constexpr uint32_t kHeader = 0;
  struct Shared {};
  Seat seat;

  EPCY_DEVICE static void prepare(Shared &) {}
  EPCY_DEVICE PlainRows(const epcy_low_latency_call &c, int part, Shared &) : seat(c, part) {}
  EPCY_DEVICE bool has_data() const { return seat.has_data; }
  EPCY_DEVICE int offset() const { return seat.offset; } // of this thread's payload in the row

  EPCY_DEVICE void send(const LowLatency &s, uint4 *slot, const uint4 &payload) const {
    if (seat.line_is_real) store_unit(slot + seat.at, seat.is_tail ? tail(s.epoch, 0) : payload);
  }
  // What this thread sees of a slot, whether that is of an earlier call, and what it stands for.
  EPCY_DEVICE void look(const uint4 *slot, uint4 *v) const {
    if (seat.line_is_real) *v = load_unit(slot + seat.at);
  }
  EPCY_DEVICE bool late(const LowLatency &s, const uint4 &v) const { return seat.late(v, s.epoch); }
  EPCY_DEVICE bool values(const LowLatency &, const uint4 *, const uint4 &v, int, float *x) const {
    Vector<Dtype>::load(v, x);
    return true;
  }
  // The same for a row that does not travel.
  EPCY_DEVICE void own_values(const uint4 &payload, float *x) const { Vector<Dtype>::load(payload, x); }
};

static __device__ const uint32_t kLogMantissas[] = EPCY_LOGFMT_MANTISSAS, kLogBins[] = EPCY_LOGFMT_BINS;

// In LogFMT (epcy/logfmt.h), 10 bits an element. A warp's piece of 512 bytes is one or two groups. Its units are
//   {exponents of its groups}, then of each group: the low eight bits of the codes in 8 units, and their upper two bits,
//   the sign above, in 2; or the group's elements as they are.
// With groups that travel raw there are more lines, at the end.
template <int Dtype> struct LogRows {
  static constexpr int N = Vector<Dtype>::kElements, kGroups = N / 4, kGroupLanes = 32 / kGroups;
  static constexpr int kCoded = 10, kLines = (1 + kGroups * kCoded + 6) / 7; // units of a group; lines without raw ones
  static constexpr uint32_t kHeader = EPCY_LOW_LATENCY_LOGFMT;
  static_assert(7 * EPCY_LOGFMT_PIECE_LINES >= 1 + 32, "a piece that travels raw has room");
  struct Shared {
    uint4 piece[kWarps][7 * EPCY_LOGFMT_PIECE_LINES];
    uint32_t mantissas[32], bins[EPCY_LOGFMT_NUM_BINS];
  };
  Shared &shared;
  const int lane, first_line;
  int at;
  bool real, data;

  EPCY_DEVICE static void prepare(Shared &shared) { // all threads
    const int i = threadIdx.x;
    if (i < 32) shared.mantissas[i] = kLogMantissas[i];
    if (i < EPCY_LOGFMT_NUM_BINS) shared.bins[i] = kLogBins[i];
    __syncthreads();
  }
  EPCY_DEVICE LogRows(const epcy_low_latency_call &c, int part, Shared &memory)
      : shared(memory), lane(threadIdx.x & 31),
        first_line((part * (EPCY_PART_BYTES / EPCY_LOGFMT_PIECE) + (int)(threadIdx.x >> 5)) * EPCY_LOGFMT_PIECE_LINES) {
    at = part * EPCY_PART_BYTES + (int)threadIdx.x * 16;
    data = threadIdx.x < EPCY_PART_BYTES / 16 && at < c.row_bytes;
    real = __any_sync(~0u, data);
  }
  EPCY_DEVICE bool has_data() const { return data; }
  EPCY_DEVICE int offset() const { return at; }
  EPCY_DEVICE uint4 *piece() const { return shared.piece[threadIdx.x >> 5]; }

  EPCY_DEVICE uint32_t exponent_of(const float *x) const { // of the thread's group, + 127
    uint32_t most = 1u << 23;                              // that of subnormals
#pragma unroll
    for (int i = 0; i < N; i++) most = max(most, __float_as_uint(x[i]) & 0x7FFFFFFFu);
#pragma unroll
    for (int d = 1; d < kGroupLanes; d <<= 1) most = max(most, __shfl_xor_sync(~0u, most, d));
    const uint32_t exponent = most >> 23;
    return exponent >= EPCY_LOGFMT_FIRST_RAW ? EPCY_LOGFMT_RAW : exponent;
  }
  EPCY_DEVICE uint32_t code_of(float x, uint32_t exponent) const {
    const float down = __uint_as_float((254u - exponent) << 23);
    const uint32_t u = __float_as_uint(__fmul_rn(fabsf(x), down));
    return epcy_logfmt_code(u, shared.bins) | (__float_as_uint(x) >> 31) << 9;
  }
  EPCY_DEVICE float value_of(uint32_t code, uint32_t exponent) const {
    const float value = __uint_as_float(epcy_logfmt_value(code & (EPCY_LOGFMT_SIGN - 1), shared.mantissas));
    const float x = __fmul_rn(value, __uint_as_float(exponent << 23));
    return code & EPCY_LOGFMT_SIGN ? __uint_as_float(__float_as_uint(x) | 0x80000000u) : x;
  }
  // Where the units of this thread's group begin, given everybody's exponents.
  EPCY_DEVICE int begin_of(uint32_t exponents) const {
    const bool first_is_raw = (exponents & 255) == EPCY_LOGFMT_RAW;
    return lane < kGroupLanes ? 1 : 1 + (first_is_raw ? kGroupLanes : kCoded);
  }
  EPCY_DEVICE static int num_lines(uint32_t exponents) {
    int units = 1;
#pragma unroll
    for (int g = 0; g < kGroups; g++) units += (exponents >> (8 * g) & 255) == EPCY_LOGFMT_RAW ? kGroupLanes : kCoded;
    return max(kLines, (units + 6) / 7);
  }

  EPCY_DEVICE void send(const LowLatency &s, uint4 *slot, const uint4 &payload) const {
    if (!real) return;
    float x[N];
    Vector<Dtype>::load(data ? payload : make_uint4(0, 0, 0, 0), x);
    const uint32_t exponent = exponent_of(x);
    uint32_t exponents = __shfl_sync(~0u, exponent, 0);
    if (kGroups == 2) exponents |= __shfl_sync(~0u, exponent, 16) << 8;
    const int begin = begin_of(exponents), me = lane % kGroupLanes;
    __syncwarp(); // the piece before this one has been read
    if (lane == 0) piece()[0] = make_uint4(exponents, 0, 0, 0);
    if (exponent == EPCY_LOGFMT_RAW) {
      piece()[begin + me] = payload;
    } else {
      uint32_t low[2] = {0, 0}, high = 0;
#pragma unroll
      for (int i = 0; i < N; i++) {
        const uint32_t code = code_of(x[i], exponent);
        low[i / 4] |= (code & 255) << (8 * (i % 4)), high |= code >> 8 << (2 * i);
      }
      char *group = (char *)(piece() + begin);
      if constexpr (N == 8) ((uint2 *)group)[me] = make_uint2(low[0], low[1]), ((uint16_t *)(group + 128))[me] = high;
      else ((uint32_t *)group)[me] = low[0], ((uint8_t *)(group + 128))[me] = high;
    }
    __syncwarp();
    const int lines = num_lines(exponents);
#pragma unroll 1
    for (int i = lane; i < lines * 8; i += 32)
      store_unit(slot + first_line * 8 + i, i % 8 == 7 ? tail(s.epoch, 0) : piece()[i / 8 * 7 + i % 8]);
  }

  EPCY_DEVICE void look(const uint4 *slot, uint4 *v) const {
    if (real && lane < kLines * 8) *v = load_unit(slot + first_line * 8 + lane);
  }
  EPCY_DEVICE bool late(const LowLatency &s, const uint4 &v) const {
    return real && lane < kLines * 8 && lane % 8 == 7 && v.x != s.epoch;
  }
  // `from`: for the report of a wait that expires. False: gave up.
  EPCY_DEVICE bool values(const LowLatency &s, const uint4 *slot, const uint4 &v, int from, float *x) const {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = 0.0f;
    if (!real) return true;
    const uint32_t exponents = __shfl_sync(~0u, v.x, 0);
    __syncwarp();
    if (lane < kLines * 8 && lane % 8 < 7) piece()[lane / 8 * 7 + lane % 8] = v;
    const int more = (num_lines(exponents) - kLines) * 8; // units of the lines that follow: at most 24
    if (more) {
      const int i = kLines * 8 + lane;
      uint4 w = make_uint4(0, 0, 0, 0);
      Patience patience;
      for (;;) {
        if (lane < more) w = load_unit(slot + first_line * 8 + i);
        const bool waits = lane < more && lane % 8 == 7 && w.x != s.epoch;
        if (!__any_sync(~0u, waits)) break;
        if (patience.over<true>(s, waits, EPCY_CUDA_LINES, from, (uint64_t)w.x << 32)) return false;
      }
      if (lane < more && i % 8 < 7) piece()[i / 8 * 7 + i % 8] = w;
    }
    __syncwarp();
    const int begin = begin_of(exponents), me = lane % kGroupLanes;
    const uint32_t exponent = exponents >> (lane < kGroupLanes ? 0 : 8) & 255;
    if (exponent == EPCY_LOGFMT_RAW) {
      Vector<Dtype>::load(piece()[begin + me], x);
      return true;
    }
    const char *group = (const char *)(piece() + begin);
    uint2 low = make_uint2(0, 0);
    uint32_t high;
    if constexpr (N == 8) low = ((const uint2 *)group)[me], high = ((const uint16_t *)(group + 128))[me];
    else low.x = ((const uint32_t *)group)[me], high = ((const uint8_t *)(group + 128))[me];
#pragma unroll
    for (int i = 0; i < N; i++)
      x[i] = value_of(((i < 4 ? low.x : low.y) >> (8 * (i % 4)) & 255) | (high >> (2 * i) & 3) << 8, exponent);
    return true;
  }
  EPCY_DEVICE void own_values(const uint4 &payload, float *x) const {
    Vector<Dtype>::load(data ? payload : make_uint4(0, 0, 0, 0), x);
    const uint32_t exponent = exponent_of(x);
    if (exponent == EPCY_LOGFMT_RAW) return;
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = value_of(code_of(x[i], exponent), exponent);
  }
};
