// Payload elements <-> float32, to the bits of docs/numerics.md: one rounding to nearest even, one NaN.
#pragma once
#include <cuda_fp16.h>

#include "epcy/cuda.h"
#include "ptx.cuh"

enum { kBf16, kFp16, kFp32 }; // the payload kinds of epcy/arrays.pxd

// Two at once, as the GPU converts them, whose NaN is 0x7FFF: as signed numbers of 16 bits it alone is above ours.
EPCY_DEVICE uint32_t round_bf16(float low, float high) { return __vmins2(bf16_pair(low, high), 0x7FC07FC0u); }
EPCY_DEVICE uint32_t round_fp16(float low, float high) { return __vmins2(fp16_pair(low, high), 0x7E007E00u); }
EPCY_DEVICE uint32_t round_fp32(float x) { return x != x ? 0x7FC00000u : __float_as_uint(x); }

// 16 bytes of a row: 8 or 4 elements.
template <int Dtype> struct Vector {
  static constexpr int kElements = Dtype == kFp32 ? 4 : 8;
  EPCY_DEVICE static void load(const uint4 &v, float *x) {
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (Dtype == kFp32) x[i] = __uint_as_float(w[i]);
      if (Dtype == kBf16) x[2 * i] = __uint_as_float(w[i] << 16), x[2 * i + 1] = __uint_as_float(w[i] & 0xFFFF0000u);
      if (Dtype == kFp16) {
        x[2 * i] = __half2float(__ushort_as_half((unsigned short)w[i]));
        x[2 * i + 1] = __half2float(__ushort_as_half((unsigned short)(w[i] >> 16)));
      }
    }
  }
  EPCY_DEVICE static uint4 round(const float *x) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (Dtype == kFp32) w[i] = round_fp32(x[i]);
      if (Dtype == kBf16) w[i] = round_bf16(x[2 * i], x[2 * i + 1]);
      if (Dtype == kFp16) w[i] = round_fp16(x[2 * i], x[2 * i + 1]);
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
  }
  EPCY_DEVICE static void add(float *acc, const uint4 &v) {
    float x[kElements];
    load(v, x);
#pragma unroll
    for (int i = 0; i < kElements; i++) acc[i] = __fadd_rn(acc[i], x[i]);
  }
};
