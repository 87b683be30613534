// Low-latency dispatch: the cast to FP8 of one part of a row by one block, to the bits of docs/numerics.md.
#pragma once
#include <cuda_fp8.h>

#include "low_latency.cuh"
#include "numeric.cuh"

constexpr int kCasters = EPCY_PART_BYTES / 16, kGroups = EPCY_PART_BYTES / EPCY_SCALE_GROUP;

// A thread has 16 elements; eight threads have a group.
template <int From> struct Caster {
  static constexpr int kVectors = From == kFp32 ? 4 : 2;
  uint4 in[kVectors];
  EPCY_DEVICE void load(const char *row, int at) {
#pragma unroll
    for (int v = 0; v < kVectors; v++) in[v] = load_early((const uint4 *)row + at * kVectors + v);
  }
  EPCY_DEVICE void clear() {
#pragma unroll
    for (int v = 0; v < kVectors; v++) in[v] = make_uint4(0, 0, 0, 0);
  }
  EPCY_DEVICE void cast(bool power_of_two, uint4 *out, float *scale) const {
    constexpr int N = Vector<From>::kElements;
    uint32_t most = 0; // magnitudes compare as integers, NaN above all
    if constexpr (From == kFp32) {
#pragma unroll
      for (int v = 0; v < kVectors; v++)
        most = max(max(max(most, magnitude(in[v].x)), magnitude(in[v].y)), max(magnitude(in[v].z), magnitude(in[v].w)));
    } else {
      uint32_t two = 0; // elements at a time
#pragma unroll
      for (int v = 0; v < kVectors; v++) {
        const uint32_t w[4] = {in[v].x, in[v].y, in[v].z, in[v].w};
#pragma unroll
        for (int i = 0; i < 4; i++) two = __vmaxu2(two, w[i] & 0x7FFF7FFFu);
      }
      two = max(two & 0xFFFFu, two >> 16);
      float x[N];
      Vector<From>::load(make_uint4(two, 0, 0, 0), x);
      most = __float_as_uint(x[0]);
    }
    most = max(most, 0x38D1B717u); // 1e-4f
#pragma unroll
    for (int d = 1; d < 8; d <<= 1) most = max(most, __shfl_xor_sync(~0u, most, d));
    const float amax = most > 0x7F800000u ? __uint_as_float(0x7FC00000u) : __uint_as_float(most);
    uint32_t bits = round_fp32(__fdiv_rn(amax, 448.0f));
    if (power_of_two && bits < 0x7F800000u) bits = (bits + 0x007FFFFFu) & 0xFF800000u;
    const float factor = power_of_two ? __fdiv_rn(1.0f, __uint_as_float(bits)) : __fdiv_rn(448.0f, amax);
    uint32_t o[4];
#pragma unroll
    for (int v = 0; v < kVectors; v++) {
      float x[N];
      Vector<From>::load(in[v], x);
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        uint32_t pair[2];
#pragma unroll
        for (int j = 0; j < 2; j++)
          pair[j] = __nv_cvt_float2_to_fp8x2(
              make_float2(__fmul_rn(x[i + 2 * j], factor), __fmul_rn(x[i + 2 * j + 1], factor)), __NV_SATFINITE,
              __NV_E4M3);
        o[(v * N + i) / 4] = pair[0] | pair[1] << 16;
      }
    }
    if (EPCY_RARELY(most >= 0x7F800000u)) // products of finite numbers are never NaN
#pragma unroll
      for (int i = 0; i < 4; i++) o[i] = canonical(o[i]);
    *out = make_uint4(o[0], o[1], o[2], o[3]);
    *scale = __uint_as_float(bits);
  }
  EPCY_DEVICE static uint32_t magnitude(uint32_t x) { return x & 0x7FFFFFFFu; }
  EPCY_DEVICE static uint32_t canonical(uint32_t four) { // NaN is 0x7F, without a sign
    return four & ~(((four & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u);
  }
};
