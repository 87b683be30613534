# distutils: libraries = epcy_put epcy_cuda
"""Low-latency calls by NVSHMEM's put, whatever lies between the ranks: see include/epcy/put.h.

The kernels that send and receive are those of `stores`; around them come those that put what was sent, wait for what
comes, and acknowledge. Importing this loads NVSHMEM's device library.
"""

from libc.stdint cimport uint32_t, uintptr_t

from epcy.backends.cuda cimport EPCY_HEADER_REFUSED, epcy_peers
from epcy.backends.cuda_low_latency cimport *
from epcy.backends.cuda_put cimport *
from epcy.backends.low_latency cimport LOW_LATENCY_COMBINE, LOW_LATENCY_DISPATCH
from epcy.backends.stores cimport Stores
from epcy.backends.symmetric cimport check

from epcy.errors import BackendError


cdef class Puts(Stores):
    def __init__(self):
        self.name = "NVSHMEM put"

    cdef int open(self, const epcy_put_wire *wire, uint32_t far, object memory, int device) except -1:
        cdef int rank, status = epcy_put_start(device)
        if status:
            raise BackendError(f"NVSHMEM's device library did not start (status {status}); set NVSHMEM_DEBUG=INFO to "
                               "see why, or leave allow_nvlink_for_low_latency_mode True", "NVSHMEM", status)
        self.put.wire, self.put.far = wire[0], far
        for rank, (name, pe) in enumerate(zip(memory.names, memory.pes)):
            self.put.name[rank], self.put.pe[rank] = <char *><uintptr_t>name, pe
        return 0

    cdef int prepare(self, epcy_peers *peers) except -1:
        epcy_put_mirrors(peers, &self.put.wire, self.put.far)
        return 0

    cdef epcy_put *step(self, const epcy_low_latency_call *call, int kind, const float *topk_weights) noexcept:
        self.put.call, self.put.kind, self.put.topk_weights = call[0], kind, topk_weights
        return &self.put

    cdef int dispatch(self, epcy_low_latency_dispatch *call, uintptr_t stream) except -1:
        cdef void *s = <void *>stream
        cdef int asked = call.call.phases
        if asked & EPCY_LOW_LATENCY_SEND:
            call.call.phases = EPCY_LOW_LATENCY_SEND
            Stores.dispatch(self, call, stream)
            check(epcy_put_launch_send(self.step(&call.call, LOW_LATENCY_DISPATCH, NULL), s), "launching puts")
        if asked & EPCY_LOW_LATENCY_RECEIVE:
            call.call.phases = EPCY_LOW_LATENCY_RECEIVE
            check(epcy_put_launch_await(self.step(&call.call, LOW_LATENCY_DISPATCH, NULL), s), "launching a wait")
            Stores.dispatch(self, call, stream)
            check(epcy_put_launch_acknowledge(&self.put, s), "launching acknowledgements")
        return 0

    cdef int combine(self, epcy_low_latency_combine *call, uintptr_t stream) except -1:
        cdef void *s = <void *>stream
        cdef int asked = call.call.phases
        cdef uint32_t weighted = call.call.header & (EPCY_LOW_LATENCY_WEIGHTS | EPCY_LOW_LATENCY_SOURCE)
        if asked & EPCY_LOW_LATENCY_SEND:
            call.call.phases = EPCY_LOW_LATENCY_SEND
            self.step(&call.call, LOW_LATENCY_COMBINE, call.topk_weights)
            if weighted == EPCY_LOW_LATENCY_WEIGHTS:        # else they stay at home
                check(epcy_put_launch_weights(&self.put, s), "launching puts of weights")
            Stores.combine(self, call, stream)
            check(epcy_put_launch_send(&self.put, s), "launching puts")
        if asked & EPCY_LOW_LATENCY_RECEIVE:
            call.call.phases = EPCY_LOW_LATENCY_RECEIVE
            check(epcy_put_launch_await(self.step(&call.call, LOW_LATENCY_COMBINE, NULL), s), "launching a wait")
            Stores.combine(self, call, stream)
            check(epcy_put_launch_acknowledge(&self.put, s), "launching acknowledgements")
        return 0

    cdef int refuse(self, const epcy_peers *peers, const epcy_low_latency_wire *wire, int kind, uint32_t header,
                    const char *text, uintptr_t stream) except -1:
        cdef epcy_low_latency_call *call = &self.put.call
        Stores.refuse(self, peers, wire, kind, header, text, stream)
        call.peers, call.wire, call.header, call.num_tokens = peers[0], wire[0], header | EPCY_HEADER_REFUSED, 0
        epcy_low_latency_constants(call)
        self.put.kind, self.put.topk_weights = kind, NULL
        check(epcy_put_launch_send(&self.put, <void *>stream), "launching puts")
        return check(epcy_put_launch_acknowledge(&self.put, <void *>stream), "launching acknowledgements")

    cdef int quiet(self, uintptr_t stream) except -1:
        return check(epcy_put_quiet(<void *>stream), "nvshmemx_quiet_on_stream")
