#pragma once
#include "cuda_runtime.h"

struct __half {
  unsigned short bits;
};
inline __half __ushort_as_half(unsigned short u) { return {u}; }
inline unsigned short __half_as_ushort(__half h) { return h.bits; }
inline float __half2float(__half h) {
  const unsigned sign = (h.bits & 0x8000u) << 16, exponent = h.bits >> 10 & 31, fraction = h.bits & 1023;
  if (exponent == 31) return __uint_as_float(sign | 0x7F800000u | fraction << 13);
  const float magnitude = exponent ? ldexpf(1024.0f + fraction, (int)exponent - 25) : ldexpf(fraction, -24);
  return sign ? -magnitude : magnitude;
}
inline __half __float2half_rn(float x) { // not of NaN
  const unsigned sign = __float_as_uint(x) >> 16 & 0x8000u;
  const float a = fabsf(x);
  if (a >= 65520.0f) return {(unsigned short)(sign | 0x7C00u)};
  int e = -14; // of the unit 2^(e - 10)
  if (a >= 0x1p-14f) frexpf(a, &e), e -= 1;
  const unsigned units = (unsigned)nearbyintf(ldexpf(a, 10 - e)); // below 1024 only for subnormals
  return {(unsigned short)(sign | (units + ((unsigned)(e + 14) << 10)))};
}
