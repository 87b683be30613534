/* The avx2 path; empty on other processors. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif
#define EPCY_SIMD_TABLE epcy_simd_avx2
#include "simd_body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
