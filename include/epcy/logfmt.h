/* LogFMT-10, written by tools/generate_logfmt.py out of epcy/logfmt.py; docs/numerics.md says what it is.
 *
 * A group of 128 elements has the exponent e of its largest magnitude; an element is a sign and a code c of 9 bits that
 * stands for T[c] * 2^e, T[0] = 0, T[c] = 2^((c - 479) / 32) as float32. With 32 codes an octave the table repeats, so
 * that 32 mantissas hold it, and so that one comparison finds a code: of 64 bins of an octave none holds more than one
 * threshold. The arrays are macros, so that gcc and nvcc each put them where they like. */
/* clang-format off */
#ifndef EPCY_LOGFMT_H
#define EPCY_LOGFMT_H

#include <stdint.h>

#include "epcy/layout.h"

#define EPCY_LOGFMT_GROUP 128
#define EPCY_LOGFMT_RAW 255          /* in place of e + 127: the group's elements are as they were */
#define EPCY_LOGFMT_FIRST_RAW 254    /* of e + 127: NaN, infinity, or 2^127 and more */
#define EPCY_LOGFMT_SIGN 512u        /* beside the code */
#define EPCY_LOGFMT_ONE 479          /* the code of 1.0 */
#define EPCY_LOGFMT_NUM_BINS 64
#define EPCY_LOGFMT_ZERO 0x3785aac3u /* bits of T[1] / 2: up to here the code is 0 */
#define EPCY_LOGFMT_LEAST 0x3805aac3u /* bits of T[1] */

/* uint32_t [32]: mantissa bits of 2^(i/32) */
#define EPCY_LOGFMT_MANTISSAS \
  { \
    0x0u, 0x2cd87u, 0x5aac3u, 0x8980fu, 0xb95c2u, 0xea43au, 0x11c3d3u, 0x14f4f0u, 0x1837f0u, 0x1b8d3au, 0x1ef532u, \
    0x227043u, 0x25fed7u, 0x29a15bu, 0x2d583fu, 0x3123f6u, 0x3504f3u, 0x38fbafu, 0x3d08a4u, 0x412c4du, 0x45672au, \
    0x49b9beu, 0x4e248cu, 0x52a81eu, 0x5744fdu, 0x5bfbb8u, 0x60ccdfu, 0x65b907u, 0x6ac0c7u, 0x6fe4bau, 0x75257du, \
    0x7a83b3u \
  }
/* uint32_t [64], by the upper 6 mantissa bits of a number: from bit 18 the index, 0..32, where the bin begins; below
 * it the lower 17 mantissa bits from which on the next index counts (2^17: it does not) */
#define EPCY_LOGFMT_BINS \
  { \
    0x166c4u, 0x60000u, 0x43c26u, 0x92169u, 0xe0000u, 0xc16e9u, 0x111cfeu, 0x160000u, 0x143407u, 0x195c62u, 0x1e0000u, \
    0x1c9671u, 0x21e295u, 0x260000u, 0x254137u, 0x2a0000u, 0x28b2bau, 0x2e0000u, 0x2c378eu, 0x31d019u, 0x360000u, \
    0x357cceu, 0x3a0000u, 0x393e1au, 0x3e0000u, 0x3d1475u, 0x420000u, 0x410051u, 0x460000u, 0x45022bu, 0x4a0000u, \
    0x491a78u, 0x4e0000u, 0x4d49bdu, 0x520000u, 0x519074u, 0x560000u, 0x55ef26u, 0x5a0000u, 0x5a0000u, 0x586655u, \
    0x5e0000u, 0x5cf68fu, 0x620000u, 0x61a05au, 0x660000u, 0x660000u, 0x64644du, 0x6a0000u, 0x6942f3u, 0x6e0000u, \
    0x6e0000u, 0x6c3ce8u, 0x720000u, 0x7152c0u, 0x760000u, 0x760000u, 0x74851du, 0x7a0000u, 0x79d498u, 0x7e0000u, \
    0x7e0000u, 0x7d41dbu, 0x820000u \
  }

/* The index, 0..32, in its octave of the float32 with bits u. */
EPCY_INLINE uint32_t epcy_logfmt_index(uint32_t u, const uint32_t *bins) {
  const uint32_t bin = bins[(u >> 17) & 63u];
  return (bin >> 18) + ((u & 0x1FFFFu) >= (bin & 0x3FFFFu));
}

/* The code of |x| * 2^-e, given its bits; below 2. */
EPCY_INLINE uint32_t epcy_logfmt_code(uint32_t u, const uint32_t *bins) {
  if (u <= EPCY_LOGFMT_ZERO) return 0;
  if (u <= EPCY_LOGFMT_LEAST) return 1;
  return ((u >> 23) - 127u) * 32u + EPCY_LOGFMT_ONE + epcy_logfmt_index(u, bins);
}

/* Bits of T[code]. */
EPCY_INLINE uint32_t epcy_logfmt_value(uint32_t code, const uint32_t *mantissas) {
  const uint32_t k = code + 33u; /* steps above 2^-16 */
  return code ? mantissas[k & 31u] + (((k >> 5) + 111u) << 23) : 0u;
}

#endif
