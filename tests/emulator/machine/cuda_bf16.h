#pragma once
#include "cuda_runtime.h"

struct __nv_bfloat16 {
  unsigned short bits;
};
inline __nv_bfloat16 __float2bfloat16_rn(float x) { // not of NaN
  const unsigned u = __float_as_uint(x);
  return {(unsigned short)((u + 0x7FFF + (u >> 16 & 1)) >> 16)};
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
