#include "epcy/layout.h"

int64_t rows_of_rank(int64_t expert, int64_t num_local) { return epcy_rank_of_expert(expert, num_local); }
