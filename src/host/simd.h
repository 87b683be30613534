/* Arithmetic on rows, once in portable vectors, compiled for several instruction sets and chosen at run time. */
#ifndef EPCY_SIMD_H
#define EPCY_SIMD_H

#include <stdint.h>

#include "epcy/host.h"

/* out = round(+0 + plain rows in order + groups in order), everything in float32, every operation rounded alone.
 * A group is round(+0 + w * lane + ...) over its lanes, rounded once to the payload type; lanes of group g end at
 * group_end[g]. Biases are plain rows; so are the rows of the rank layout. Lanes [0, num_direct) belong to no group:
 * each w * lane is added to the sum itself. */
typedef struct epcy_sum {
  const char *const *plain;
  int num_plain;
  const char *const *lanes;
  const float *weights;
  const int *group_end;
  int num_groups, num_direct;
} epcy_sum;

typedef struct epcy_simd {
  /* Copy a row that its reader will find in memory rather than in this core's cache. */
  void (*stream)(char *dst, const char *src, int64_t bytes);
  void (*sum[EPCY_NUM_DTYPES])(char *out, const epcy_sum *sum, int64_t hidden); /* no EPCY_FP8 */
  /* The same, with what groups round to, and direct lanes, as they are after their way in LogFMT; no plain rows. */
  void (*sum_logfmt[EPCY_NUM_DTYPES])(char *out, const epcy_sum *sum, int64_t hidden);
  void (*to_fp8)(const char *x, int dtype, int64_t hidden, int power_of_two, uint8_t *payload, float *scales);
  void (*from_fp8)(const uint8_t *payload, const float *scales, int64_t hidden, int dtype, char *out);
} epcy_simd;

extern const epcy_simd epcy_simd_portable, epcy_simd_avx2, epcy_simd_avx512;
const epcy_simd *epcy_simd_table(void); /* the best one for this processor */

/* Make streamed rows visible before the flag that announces them. */
void epcy_stream_fence(void);

/* Denormals count: clear flush-to-zero for the time of a kernel. */
unsigned epcy_float_begin(void);
void epcy_float_end(unsigned saved);

#endif
