/* The arithmetic itself, in GCC/Clang vectors of 16 float32. Each simd_*.c sets its target and includes this once, with
 * EPCY_SIMD_TABLE naming the table. Every path gives the same bits: only exact integer steps and single IEEE operations
 * are used, in one order; -ffp-contract=off keeps multiply and add apart. */
#include <string.h>

#include "epcy/logfmt.h"
#include "simd.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi" /* every function that takes a vector is inlined: no ABI is involved */
#endif

#define V 16
typedef float vf __attribute__((vector_size(4 * V)));
typedef uint32_t vu __attribute__((vector_size(4 * V)));
typedef int32_t vi __attribute__((vector_size(4 * V)));
typedef uint16_t vh __attribute__((vector_size(2 * V)));
typedef uint8_t vb __attribute__((vector_size(V)));
#define ALWAYS static inline __attribute__((always_inline))

ALWAYS vu bits(vf x) { return (vu)x; }
ALWAYS vf splat(float x) { return x - (vf){0}; }
ALWAYS vu pick(vi mask, vu yes, vu no) { return ((vu)mask & yes) | (~(vu)mask & no); }
#if defined(__AVX512F__)
ALWAYS uint32_t largest(vu x) { return _mm512_reduce_max_epu32((__m512i)x); }
#else
ALWAYS uint32_t largest(vu x) {
  uint32_t most = 0;
  for (int i = 0; i < V; i++) most = x[i] > most ? x[i] : most;
  return most;
}
#endif
ALWAYS vu magnitude(vf x) { return bits(x) & 0x7FFFFFFFu; }
ALWAYS vi is_nan(vf x) { return (vi)(magnitude(x) > 0x7F800000u); }

/* Tokens' elements arrive as bytes at any address; `count` < V only in a row's last block. */
ALWAYS vh load_half(const char *p, int count) {
  vh h = {0};
  memcpy(&h, p, count == V ? sizeof h : (size_t)count * 2);
  return h;
}
ALWAYS void store_half(char *p, vh h, int count) { memcpy(p, &h, count == V ? sizeof h : (size_t)count * 2); }

ALWAYS vf load_bf16(const char *p, int count) { return (vf)(__builtin_convertvector(load_half(p, count), vu) << 16); }
ALWAYS void store_bf16(char *p, vf x, int count) {
  const vu u = bits(x), rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  store_half(p, __builtin_convertvector(pick(is_nan(x), (vu){0} + 0x7FC0u, rounded), vh), count);
}

#if defined(__F16C__) && defined(__AVX512F__)
ALWAYS vf load_fp16(const char *p, int count) { return (vf)_mm512_cvtph_ps((__m256i)load_half(p, count)); }
ALWAYS vu half_of(vf x) {
  return __builtin_convertvector((vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT), vu);
}
#elif defined(__F16C__)
ALWAYS vf load_fp16(const char *p, int count) {
  const vh h = load_half(p, count);
  union {
    __m256 part[2];
    vf whole;
  } u;
  u.part[0] = _mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)h));
  u.part[1] = _mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)h, 1));
  return u.whole;
}
ALWAYS vu half_of(vf x) {
  union {
    vf whole;
    __m256 part[2];
  } u = {x};
  const __m128i low = _mm256_cvtps_ph(u.part[0], _MM_FROUND_TO_NEAREST_INT);
  const __m128i high = _mm256_cvtps_ph(u.part[1], _MM_FROUND_TO_NEAREST_INT);
  return __builtin_convertvector((vh)_mm256_set_m128i(high, low), vu);
}
#else
ALWAYS vf load_fp16(const char *p, int count) {
  const vu h = __builtin_convertvector(load_half(p, count), vu), em = h & 0x7FFFu, sign = (h & 0x8000u) << 16;
  const vu normal = (em << 13) + (112u << 23), special = (em << 13) + (224u << 23);
  const vu tiny = bits(__builtin_convertvector((vi)em, vf) * splat(0x1p-24f));
  return (vf)(sign | pick((vi)(em < 0x400u), tiny, pick((vi)(em >= 0x7C00u), special, normal)));
}
ALWAYS vu half_of(vf x) {
  const vu u = magnitude(x), sign = (bits(x) >> 16) & 0x8000u;
  const vu normal = (u - (112u << 23) + 0xFFFu + ((u >> 13) & 1u)) >> 13;
  const vu tiny = bits((vf)u + splat(0.5f)) - bits(splat(0.5f)); /* the addition rounds to multiples of 2^-24 */
  return sign | pick((vi)(u >= 0x47800000u), (vu){0} + 0x7C00u, pick((vi)(u < 0x38800000u), tiny, normal));
}
#endif
ALWAYS void store_fp16(char *p, vf x, int count) {
  store_half(p, __builtin_convertvector(pick(is_nan(x), (vu){0} + 0x7E00u, half_of(x)), vh), count);
}

ALWAYS vf load_fp32(const char *p, int count) {
  vf x = {0};
  memcpy(&x, p, count == V ? sizeof x : (size_t)count * 4);
  return x;
}
ALWAYS void store_fp32(char *p, vf x, int count) {
  const vu u = pick(is_nan(x), (vu){0} + 0x7FC00000u, bits(x));
  memcpy(p, &u, count == V ? sizeof u : (size_t)count * 4);
}

/* e4m3 (OCP 8-bit floating point, 1.0): bias 7, no infinity, S.1111.111 is NaN, largest 448, smallest step 2^-9. */
ALWAYS vu e4m3_of(vf x) {
  const vu sign = (bits(x) >> 24) & 0x80u, limit = (vu){0} + 0x43E00000u;
  vu u = magnitude(x);
  u = pick((vi)(u > limit), limit, u); /* saturate at 448 */
  const vu normal = (u - (120u << 23) + 0x7FFFFu + ((u >> 20) & 1u)) >> 20;
  const vu tiny = bits((vf)u + splat(0x1p14f)) - bits(splat(0x1p14f)); /* rounds to multiples of 2^-9 */
  return pick(is_nan(x), (vu){0} + 0x7Fu, sign | pick((vi)(u < 0x3C800000u), tiny, normal));
}
ALWAYS vf from_e4m3(vu b) {
  const vu em = b & 0x7Fu, sign = (b & 0x80u) << 24, normal = (em << 20) + (120u << 23);
  const vu tiny = bits(__builtin_convertvector((vi)em, vf) * splat(0x1p-9f));
  return (vf)(sign | pick((vi)(em == 0x7Fu), (vu){0} + 0x7FC00000u, pick((vi)(em < 8u), tiny, normal)));
}

/* One block of V elements of a token's sum. */
#define EPCY_DEFINE_SUM(NAME, ITEM)                                                                             \
  ALWAYS void block_##NAME(char *out, const epcy_sum *s, int64_t at, int count) {                               \
    vf acc = {0};                                                                                               \
    for (int i = 0; i < s->num_plain; i++) acc += load_##NAME(s->plain[i] + at, count);                         \
    for (int i = 0; i < s->num_direct; i++) acc += splat(s->weights[i]) * load_##NAME(s->lanes[i] + at, count); \
    for (int g = 0, i = 0; g < s->num_groups; g++) {                                                            \
      vf part = {0};                                                                                            \
      for (; i < s->group_end[g]; i++) part += splat(s->weights[i]) * load_##NAME(s->lanes[i] + at, count);     \
      char rounded[V * ITEM];                                                                                   \
      store_##NAME(rounded, part, V);                                                                           \
      acc += load_##NAME(rounded, V);                                                                           \
    }                                                                                                           \
    store_##NAME(out + at, acc, count);                                                                         \
  }                                                                                                             \
  static void sum_##NAME(char *out, const epcy_sum *s, int64_t hidden) {                                        \
    int64_t j = 0;                                                                                              \
    for (; j + V <= hidden; j += V) block_##NAME(out, s, j * ITEM, V);                                          \
    if (j < hidden) block_##NAME(out, s, j * ITEM, (int)(hidden - j));                                          \
  }
EPCY_DEFINE_SUM(bf16, 2)
EPCY_DEFINE_SUM(fp16, 2)
EPCY_DEFINE_SUM(fp32, 4)

enum { GROUP_BLOCKS = EPCY_LOGFMT_GROUP / V };
static const uint32_t logfmt_mantissas[32] = EPCY_LOGFMT_MANTISSAS, logfmt_bins[64] = EPCY_LOGFMT_BINS;

/* Look up in a table of 32 or 64 words; indices beyond it count modulo its size. */
#if defined(__AVX512F__)
ALWAYS vu look_up_32(const uint32_t *table, vu at) {
  return (vu)_mm512_permutex2var_epi32(_mm512_loadu_si512(table), (__m512i)at, _mm512_loadu_si512(table + V));
}
ALWAYS vu look_up_64(const uint32_t *table, vu at) {
  return pick((vi)((at & 32u) != 0), look_up_32(table + 32, at), look_up_32(table, at));
}
#else
ALWAYS vu look_up(const uint32_t *table, vu at) {
  union {
    vu whole;
    uint32_t one[V];
#if defined(__AVX2__)
    __m256i half[2];
#endif
  } u = {at};
#if defined(__AVX2__)
  for (int i = 0; i < 2; i++) u.half[i] = _mm256_i32gather_epi32((const int *)table, u.half[i], 4);
#else
  for (int i = 0; i < V; i++) u.one[i] = table[u.one[i]];
#endif
  return u.whole;
}
ALWAYS vu look_up_32(const uint32_t *table, vu at) { return look_up(table, at & 31u); }
ALWAYS vu look_up_64(const uint32_t *table, vu at) { return look_up(table, at & 63u); }
#endif

/* What the codes of |x| * 2^-e, given as bits, stand for. */
ALWAYS vu logfmt_values(vu u) {
  const vu bin = look_up_64(logfmt_bins, u >> 17);
  const vu index = (bin >> 18) - (vu)((u & 0x1FFFFu) >= (bin & 0x3FFFFu)); /* true is -1 */
  const vu value = (u & 0x7F800000u) + look_up_32(logfmt_mantissas, index) + ((index >> 5) << 23);
  const vu least = (vu){0} + EPCY_LOGFMT_LEAST;
  return pick((vi)(u > EPCY_LOGFMT_ZERO), pick((vi)(u > EPCY_LOGFMT_LEAST), value, least), (vu){0});
}

/* What a group of a row is after its way in LogFMT: each element the float32 that its code stands for. */
ALWAYS void through_logfmt(vf *row) {
  vu top = {0};
  for (int b = 0; b < GROUP_BLOCKS; b++) top = pick((vi)(magnitude(row[b]) > top), magnitude(row[b]), top);
  uint32_t exponent = largest(top) >> 23;
  if (exponent == 0) exponent = 1; /* subnormals */
  if (exponent >= EPCY_LOGFMT_FIRST_RAW) return;
  const vf down = (vf)((vu){0} + ((254u - exponent) << 23)), up = (vf)((vu){0} + (exponent << 23));
  for (int b = 0; b < GROUP_BLOCKS; b++) {
    const vu value = logfmt_values(bits((vf)magnitude(row[b]) * down));
    row[b] = (vf)(bits((vf)value * up) | (bits(row[b]) & 0x80000000u));
  }
}

#define EPCY_DEFINE_SUM_LOGFMT(NAME, ITEM)                                                               \
  static void sum_logfmt_##NAME(char *out, const epcy_sum *s, int64_t hidden) {                          \
    for (int64_t at = 0; at < hidden * ITEM; at += EPCY_LOGFMT_GROUP * ITEM) {                           \
      vf acc[GROUP_BLOCKS] = {0};                                                                        \
      for (int i = 0; i < s->num_direct; i++) {                                                          \
        vf row[GROUP_BLOCKS];                                                                            \
        for (int b = 0; b < GROUP_BLOCKS; b++) row[b] = load_##NAME(s->lanes[i] + at + b * V * ITEM, V); \
        through_logfmt(row);                                                                             \
        for (int b = 0; b < GROUP_BLOCKS; b++) acc[b] += splat(s->weights[i]) * row[b];                  \
      }                                                                                                  \
      for (int g = 0, i = 0; g < s->num_groups; g++) {                                                   \
        vf part[GROUP_BLOCKS] = {0};                                                                     \
        for (; i < s->group_end[g]; i++)                                                                 \
          for (int b = 0; b < GROUP_BLOCKS; b++)                                                         \
            part[b] += splat(s->weights[i]) * load_##NAME(s->lanes[i] + at + b * V * ITEM, V);           \
        for (int b = 0; b < GROUP_BLOCKS; b++) {                                                         \
          char rounded[V * ITEM];                                                                        \
          store_##NAME(rounded, part[b], V);                                                             \
          part[b] = load_##NAME(rounded, V);                                                             \
        }                                                                                                \
        through_logfmt(part);                                                                            \
        for (int b = 0; b < GROUP_BLOCKS; b++) acc[b] += part[b];                                        \
      }                                                                                                  \
      for (int b = 0; b < GROUP_BLOCKS; b++) store_##NAME(out + at + b * V * ITEM, acc[b], V);           \
    }                                                                                                    \
  }
EPCY_DEFINE_SUM_LOGFMT(bf16, 2)
EPCY_DEFINE_SUM_LOGFMT(fp16, 2)
EPCY_DEFINE_SUM_LOGFMT(fp32, 4)

ALWAYS vf load_any(const char *x, int dtype, int64_t j) {
  switch (dtype) {
    case EPCY_BF16: return load_bf16(x + j * 2, V);
    case EPCY_FP16: return load_fp16(x + j * 2, V);
    default: return load_fp32(x + j * 4, V);
  }
}

/* A group's scale: amax / 448 with amax floored at 1e-4, or the smallest power of two not below that. */
static float fp8_scale(float amax, int power_of_two) {
  float scale = amax / 448.0f;
  uint32_t u;
  memcpy(&u, &scale, 4);
  if (power_of_two && u < 0x7F800000u && (u & 0x7FFFFFu)) {
    u = ((u >> 23) + 1) << 23;
    memcpy(&scale, &u, 4);
  }
  return scale;
}

static void row_to_fp8(const char *x, int dtype, int64_t hidden, int power_of_two, uint8_t *payload, float *scales) {
  for (int64_t group = 0; group * EPCY_SCALE_GROUP < hidden; group++) {
    const int64_t begin = group * EPCY_SCALE_GROUP;
    vu top = {0}; /* magnitudes compare as integers, NaN above all */
    for (int64_t j = begin; j < begin + EPCY_SCALE_GROUP; j += V) {
      const vu u = magnitude(load_any(x, dtype, j));
      top = pick((vi)(u > top), u, top);
    }
    uint32_t most = largest(top);
    if (most < 0x38D1B717u) most = 0x38D1B717u; /* 1e-4f */
    if (most > 0x7F800000u) most = 0x7FC00000u;
    float amax;
    memcpy(&amax, &most, 4);
    const float scale = fp8_scale(amax, power_of_two);
    const float factor = power_of_two ? 1.0f / scale : 448.0f / amax;
    scales[group] = scale;
    for (int64_t j = begin; j < begin + EPCY_SCALE_GROUP; j += V) {
      const vb b = __builtin_convertvector(e4m3_of(load_any(x, dtype, j) * splat(factor)), vb);
      memcpy(payload + j, &b, sizeof b);
    }
  }
}

static void row_from_fp8(const uint8_t *payload, const float *scales, int64_t hidden, int dtype, char *out) {
  for (int64_t j = 0; j < hidden; j += V) {
    const int count = hidden - j < V ? (int)(hidden - j) : V; /* V divides the scale group */
    vb b = {0};
    memcpy(&b, payload + j, (size_t)count);
    const vf x = from_e4m3(__builtin_convertvector(b, vu)) * splat(scales[j / EPCY_SCALE_GROUP]);
    switch (dtype) {
      case EPCY_BF16: store_bf16(out + j * 2, x, count); break;
      case EPCY_FP16: store_fp16(out + j * 2, x, count); break;
      default: store_fp32(out + j * 4, x, count);
    }
  }
}

static void stream_row(char *dst, const char *src, int64_t bytes) {
#if defined(__AVX512F__)
  if (((uintptr_t)dst | (uint64_t)bytes) % 64 == 0) {
    for (int64_t i = 0; i < bytes; i += 64) _mm512_stream_si512((void *)(dst + i), _mm512_loadu_si512(src + i));
    return;
  }
#endif
#if defined(__AVX2__)
  if (((uintptr_t)dst | (uint64_t)bytes) % 32 == 0) {
    for (int64_t i = 0; i < bytes; i += 32)
      _mm256_stream_si256((__m256i *)(dst + i), _mm256_loadu_si256((const __m256i *)(src + i)));
    return;
  }
#endif
#if defined(__SSE2__)
  if (((uintptr_t)dst | (uint64_t)bytes) % 16 == 0) {
    for (int64_t i = 0; i < bytes; i += 16)
      _mm_stream_si128((__m128i *)(dst + i), _mm_loadu_si128((const __m128i *)(src + i)));
    return;
  }
#endif
  memcpy(dst, src, (size_t)bytes);
}

const epcy_simd EPCY_SIMD_TABLE = {stream_row,
                                   {sum_bf16, sum_fp16, sum_fp32, NULL},
                                   {sum_logfmt_bf16, sum_logfmt_fp16, sum_logfmt_fp32, NULL},
                                   row_to_fp8,
                                   row_from_fp8};
