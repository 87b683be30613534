/* LogFMT-10, written by tools/generate_logfmt.py out of epcy/logfmt.py; docs/numerics.md says what it is.
 *
 * A group of 128 elements has the exponent e of its largest magnitude; an element is a sign and a code c of 9 bits that
 * stands for T[c] * 2^e, T[0] = 0, T[c] = 2^((c - 479) / 32) as float32. With 32 codes an octave the table repeats, so
 * that 33 mantissas hold it, and so that one comparison finds a code: of 64 bins of an octave none holds more than one
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

/* uint32_t [33]: bits of 2^(i/32) less those of 1.0 */
#define EPCY_LOGFMT_MANTISSAS \
  { \
    0x0u, 0x2cd87u, 0x5aac3u, 0x8980fu, 0xb95c2u, 0xea43au, 0x11c3d3u, 0x14f4f0u, 0x1837f0u, 0x1b8d3au, 0x1ef532u, \
    0x227043u, 0x25fed7u, 0x29a15bu, 0x2d583fu, 0x3123f6u, 0x3504f3u, 0x38fbafu, 0x3d08a4u, 0x412c4du, 0x45672au, \
    0x49b9beu, 0x4e248cu, 0x52a81eu, 0x5744fdu, 0x5bfbb8u, 0x60ccdfu, 0x65b907u, 0x6ac0c7u, 0x6fe4bau, 0x75257du, \
    0x7a83b3u, 0x800000u \
  }
/* uint32_t [64]: mantissa bits from which on the bin's second index counts; all ones: there is none */
#define EPCY_LOGFMT_REACHES \
  { \
    0x166c4u, 0xffffffffu, 0x43c26u, 0x72169u, 0xffffffffu, 0xa16e9u, 0xd1cfeu, 0xffffffffu, 0x103407u, 0x135c62u, \
    0xffffffffu, 0x169671u, 0x19e295u, 0xffffffffu, 0x1d4137u, 0xffffffffu, 0x20b2bau, 0xffffffffu, 0x24378eu, \
    0x27d019u, 0xffffffffu, 0x2b7cceu, 0xffffffffu, 0x2f3e1au, 0xffffffffu, 0x331475u, 0xffffffffu, 0x370051u, \
    0xffffffffu, 0x3b022bu, 0xffffffffu, 0x3f1a78u, 0xffffffffu, 0x4349bdu, 0xffffffffu, 0x479074u, 0xffffffffu, \
    0x4bef26u, 0xffffffffu, 0xffffffffu, 0x506655u, 0xffffffffu, 0x54f68fu, 0xffffffffu, 0x59a05au, 0xffffffffu, \
    0xffffffffu, 0x5e644du, 0xffffffffu, 0x6342f3u, 0xffffffffu, 0xffffffffu, 0x683ce8u, 0xffffffffu, 0x6d52c0u, \
    0xffffffffu, 0xffffffffu, 0x72851du, 0xffffffffu, 0x77d498u, 0xffffffffu, 0xffffffffu, 0x7d41dbu, 0xffffffffu \
  }
/* uint32_t [64]: the index, 0..32, where the bin begins */
#define EPCY_LOGFMT_FIRSTS \
  { \
    0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7, 8, 9, 9, 10, 10, 11, 11, 12, 13, 13, 14, 14, 15, 15, 16, 16, 17, 17, 18, 18, \
    19, 19, 20, 20, 21, 21, 22, 22, 22, 23, 23, 24, 24, 25, 25, 25, 26, 26, 27, 27, 27, 28, 28, 29, 29, 29, 30, 30, \
    31, 31, 31, 32 \
  }

/* The index in its octave of the float32 with bits u. */
EPCY_INLINE uint32_t epcy_logfmt_index(uint32_t u, const uint32_t *reaches, const uint32_t *firsts) {
  const uint32_t mantissa = u & 0x7FFFFFu, bin = mantissa >> 17;
  return firsts[bin] + (mantissa >= reaches[bin]);
}

/* The code of |x| * 2^-e, given its bits; below 2. */
EPCY_INLINE uint32_t epcy_logfmt_code(uint32_t u, const uint32_t *reaches, const uint32_t *firsts) {
  if (u <= EPCY_LOGFMT_ZERO) return 0;
  if (u <= EPCY_LOGFMT_LEAST) return 1;
  return ((u >> 23) - 127u) * 32u + EPCY_LOGFMT_ONE + epcy_logfmt_index(u, reaches, firsts);
}

/* Bits of T[code]. */
EPCY_INLINE uint32_t epcy_logfmt_value(uint32_t code, const uint32_t *mantissas) {
  const uint32_t k = code + 33u; /* steps above 2^-16 */
  return code ? mantissas[k & 31u] + (((k >> 5) + 111u) << 23) : 0u;
}

#endif
