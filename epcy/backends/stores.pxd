"""How low-latency calls reach other ranks: by plain stores, or as a subclass does."""

from libc.stdint cimport uint32_t, uintptr_t

from epcy.backends.cuda cimport epcy_peers
from epcy.backends.cuda_low_latency cimport (
    epcy_low_latency_combine, epcy_low_latency_dispatch, epcy_low_latency_wire)
from epcy.backends.cuda_put cimport epcy_put_wire


cdef class Stores:
    cdef readonly str name              # of the transport

    cdef int open(self, const epcy_put_wire *wire, uint32_t far, object memory, int device) except -1
    cdef int prepare(self, epcy_peers *peers) except -1
    cdef int dispatch(self, epcy_low_latency_dispatch *call, uintptr_t stream) except -1
    cdef int combine(self, epcy_low_latency_combine *call, uintptr_t stream) except -1
    cdef int refuse(self, const epcy_peers *peers, const epcy_low_latency_wire *wire, int kind, uint32_t header,
                    const char *text, uintptr_t stream) except -1
    cdef int quiet(self, uintptr_t stream) except -1
