/* The avx512 path; empty on other processors. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq"))), \
                             apply_to = function)
#else
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq")
#endif
#define EPCY_SIMD_TABLE epcy_simd_avx512
#include "simd_body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
