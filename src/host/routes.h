/* Where a token's lanes go. */
#ifndef EPCY_ROUTES_H
#define EPCY_ROUTES_H

#include "epcy/host.h"

/* A token's lanes in the order of their ranks, equal ranks by lane; K is small, most tokens are nearly in order. */
static inline void insert_route(epcy_route *routes, int64_t used, epcy_route route) {
  int64_t i = used;
  for (; i > 0 && routes[i - 1].rank > route.rank; i--) routes[i] = routes[i - 1];
  routes[i] = route;
}

static inline int64_t read_id(const void *topk_idx, int is_int64, int64_t i) {
  return is_int64 ? ((const int64_t *)topk_idx)[i] : ((const int32_t *)topk_idx)[i];
}

#endif
