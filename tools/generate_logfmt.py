"""Write include/epcy/logfmt.h out of the table in epcy/logfmt.py.

python tools/generate_logfmt.py            write it
python tools/generate_logfmt.py --check    exit 1 when it is not what would be written
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PATH = ROOT / "include/epcy/logfmt.h"

TEXT = """\
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
#define EPCY_LOGFMT_ONE {one}          /* the code of 1.0 */
#define EPCY_LOGFMT_NUM_BINS 64
#define EPCY_LOGFMT_ZERO {zero:#010x}u /* bits of T[1] / 2: up to here the code is 0 */
#define EPCY_LOGFMT_LEAST {least:#010x}u /* bits of T[1] */

/* uint32_t [32]: mantissa bits of 2^(i/32) */
#define EPCY_LOGFMT_MANTISSAS {{ {mantissas} }}
/* uint32_t [64], by the upper 6 mantissa bits of a number: from bit 18 the index, 0..32, where the bin begins; below
 * it the lower 17 mantissa bits from which on the next index counts (2^17: it does not) */
#define EPCY_LOGFMT_BINS {{ {bins} }}

/* The index, 0..32, in its octave of the float32 with bits u. */
EPCY_INLINE uint32_t epcy_logfmt_index(uint32_t u, const uint32_t *bins) {{
  const uint32_t bin = bins[(u >> 17) & 63u];
  return (bin >> 18) + ((u & 0x1FFFFu) >= (bin & 0x3FFFFu));
}}

/* The code of |x| * 2^-e, given its bits; below 2. */
EPCY_INLINE uint32_t epcy_logfmt_code(uint32_t u, const uint32_t *bins) {{
  if (u <= EPCY_LOGFMT_ZERO) return 0;
  if (u <= EPCY_LOGFMT_LEAST) return 1;
  return ((u >> 23) - 127u) * 32u + EPCY_LOGFMT_ONE + epcy_logfmt_index(u, bins);
}}

/* Bits of T[code]. */
EPCY_INLINE uint32_t epcy_logfmt_value(uint32_t code, const uint32_t *mantissas) {{
  const uint32_t k = code + 33u; /* steps above 2^-16 */
  return code ? mantissas[k & 31u] + (((k >> 5) + 111u) << 23) : 0u;
}}

#endif
"""


def text() -> str:
    from epcy.logfmt import CODES_PER_OCTAVE, MANTISSAS, ONE, TABLE

    one = 1 << 23
    reaches = []  # the least mantissa that has index i + 1
    for i in range(CODES_PER_OCTAVE):
        both = MANTISSAS[i] + MANTISSAS[i + 1]
        middle = both // 2 + (both % 2 and both // 2 % 2)  # to nearest even, as float32 rounds it
        even_above = (ONE + i + 1) % 2 == 0
        reaches.append(middle - one + (not even_above))
    inside = [[r & 0x1FFFF for r in reaches if r >> 17 == b] for b in range(64)]
    if any(len(found) > 1 for found in inside):
        raise ValueError("a bin holds two thresholds")
    firsts = [sum(r >> 17 < b for r in reaches) for b in range(64)]
    bins = [first << 18 | (found or [1 << 17])[0] for first, found in zip(firsts, inside, strict=True)]
    bits = TABLE.view("u4").tolist()
    return TEXT.format(
        one=ONE,
        zero=bits[1] - one,
        least=bits[1],
        mantissas=", ".join(f"{m - one:#x}u" for m in MANTISSAS[:-1]),
        bins=", ".join(f"{b:#x}u" for b in bins),
    )


def formatted() -> str:
    """Return the header with long lists broken into lines."""
    import textwrap

    lines = []
    for line in text().splitlines():
        if line.startswith("#define") and len(line) > 119:
            head, _, values = line.partition("{ ")
            body = textwrap.wrap(values.removesuffix(" }"), 114)
            lines += [f"{head.rstrip()} \\", "  { \\", *(f"    {part} \\" for part in body), "  }"]
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> int:
    new = formatted()
    if "--check" in sys.argv[1:]:
        return PATH.read_text(encoding="utf-8") != new
    PATH.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
