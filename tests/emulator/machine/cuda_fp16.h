#pragma once
#include "cuda_runtime.h"

struct __half {
  unsigned short bits;
};
inline __half __ushort_as_half(unsigned short u) { return {u}; }
inline float __half2float(__half h) {
  const unsigned sign = (h.bits & 0x8000u) << 16, exponent = h.bits >> 10 & 31, fraction = h.bits & 1023;
  if (exponent == 31) return __uint_as_float(sign | 0x7F800000u | fraction << 13);
  const float magnitude = exponent ? ldexpf(1024.0f + fraction, (int)exponent - 25) : ldexpf(fraction, -24);
  return sign ? -magnitude : magnitude;
}
