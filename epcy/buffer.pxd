from libc.stdint cimport int64_t

from epcy.high_throughput cimport HighThroughputCalls


cdef class Buffer(HighThroughputCalls):
    """Moves tokens to their experts and back between the ranks of a communicator."""

    cdef int warm_high_throughput(self, x, quantized, idx, weights) except -1
    cdef tuple warm_tokens(self, int64_t most)
