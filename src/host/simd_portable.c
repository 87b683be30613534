/* The path that every processor has. */
#define EPCY_SIMD_TABLE epcy_simd_portable
#include "simd_body.h"
