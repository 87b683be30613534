"""Low-latency calls by NVSHMEM's put."""

from epcy.backends.cuda_low_latency cimport epcy_low_latency_call
from epcy.backends.cuda_put cimport epcy_put
from epcy.backends.stores cimport Stores


cdef class Puts(Stores):
    cdef epcy_put put

    cdef epcy_put *step(self, const epcy_low_latency_call *call, int kind, const float *topk_weights) noexcept
