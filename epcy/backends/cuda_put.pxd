"""include/epcy/put.h, as Cython sees it."""

from libc.stdint cimport int32_t, int64_t, uint32_t

from epcy.backends.cuda cimport epcy_peers
from epcy.backends.cuda_low_latency cimport epcy_low_latency_call, epcy_low_latency_wire
from epcy.layout cimport epcy_shape


cdef extern from "epcy/put.h" nogil:
    ctypedef struct epcy_put_wire:
        int64_t bytes

    ctypedef struct epcy_put:
        epcy_low_latency_call call
        epcy_put_wire wire
        char *name[32]
        int32_t pe[32]
        uint32_t far
        int32_t kind
        const float *topk_weights

    epcy_put_wire epcy_put_layout(const epcy_shape *shape, const epcy_low_latency_wire *wire, int64_t num_mirrors)
    void epcy_put_mirrors(epcy_peers *peers, const epcy_put_wire *wire, uint32_t far)
    int epcy_put_start(int device)
    int epcy_put_quiet(void *stream)
    int epcy_put_launch_weights(const epcy_put *put, void *stream)
    int epcy_put_launch_send(const epcy_put *put, void *stream)
    int epcy_put_launch_await(const epcy_put *put, void *stream)
    int epcy_put_launch_acknowledge(const epcy_put *put, void *stream)
