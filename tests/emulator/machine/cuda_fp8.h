#pragma once
#include "cuda_runtime.h"

enum { __NV_SATFINITE, __NV_E4M3 };
namespace emulated {
inline unsigned to_e4m3(float x) { // to nearest even; what is too large becomes 448
  if (x != x) return 0x7F;
  const unsigned sign = __float_as_uint(x) >> 24 & 0x80u;
  const float a = fabsf(x);
  if (a >= 448.0f) return sign | 0x7E;
  int e = -6; // of the unit 2^(e - 3)
  if (a >= 0x1p-6f) frexpf(a, &e), e -= 1;
  return sign | ((unsigned)nearbyintf(ldexpf(a, 3 - e)) + ((unsigned)(e + 6) << 3));
}
} // namespace emulated
inline unsigned short __nv_cvt_float2_to_fp8x2(float2 v, int, int) {
  return (unsigned short)(emulated::to_e4m3(v.x) | emulated::to_e4m3(v.y) << 8);
}
