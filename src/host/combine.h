/* A token's sum, for those who take rows from elsewhere too. */
#ifndef EPCY_COMBINE_H
#define EPCY_COMBINE_H

#include "epcy/host.h"
#include "simd.h"

/* How a token's lanes make its sum. */
enum order {
  ORDER_ROWS,  /* a row for each rank, summed by the expert's owner (rank layout) */
  ORDER_RANKS, /* the lanes of each rank, weighed, into a rounded partial sum (expert layout, reduction="rank") */
  ORDER_LANES  /* all lanes, weighed, into one sum (reduction="source") */
};

typedef struct combine_context {
  const epcy_host *h;
  const epcy_host_combine *call;
  enum order order;
  const char *const *rows; /* of each rank */
  void (*sum)(char *out, const epcy_sum *sum, int64_t hidden);
} combine_context;

/* Sum token t. `plain` has room for K + 2, the others for K. */
void epcy_combine_token(const combine_context *c, int64_t t, const char **plain, const char **lanes, float *weights,
                        int *group_end);
/* Each lane's weight from the rank that owns it, 0 for lanes without a row. */
void epcy_combine_weights(const combine_context *c, const epcy_route *routes, float *out);
/* Where the rows of all ranks of this call lie; meaningless for ranks of other nodes. */
void epcy_combine_find_rows(const epcy_host *h, const char **rows);

#endif
