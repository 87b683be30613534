# distutils: libraries = epcy_cuda
"""Low-latency calls by plain stores to other ranks' memory, inside one NVLink domain: a kernel a call, or a half."""

from libc.stdint cimport uint32_t, uintptr_t

from epcy.backends.cuda cimport epcy_peers
from epcy.backends.cuda_low_latency cimport (
    epcy_cuda_launch_low_latency_combine, epcy_cuda_launch_low_latency_dispatch, epcy_cuda_launch_low_latency_refusal,
    epcy_low_latency_combine, epcy_low_latency_dispatch, epcy_low_latency_wire)
from epcy.backends.cuda_put cimport epcy_put_wire
from epcy.backends.symmetric cimport check


cdef class Stores:
    def __init__(self):
        self.name = "NVLink"

    cdef int open(self, const epcy_put_wire *wire, uint32_t far, object memory, int device) except -1:
        """Take the memory of a Buffer whose ranks `far`, as bits, are not to be reached by stores."""
        return 0

    cdef int prepare(self, epcy_peers *peers) except -1:
        """Set where the kernels of a call find each rank's memory."""
        return 0

    cdef int dispatch(self, epcy_low_latency_dispatch *call, uintptr_t stream) except -1:
        """Launch the phases of a call."""
        return check(epcy_cuda_launch_low_latency_dispatch(call, <void *>stream), "launching low_latency_dispatch")

    cdef int combine(self, epcy_low_latency_combine *call, uintptr_t stream) except -1:
        return check(epcy_cuda_launch_low_latency_combine(call, <void *>stream), "launching low_latency_combine")

    cdef int refuse(self, const epcy_peers *peers, const epcy_low_latency_wire *wire, int kind, uint32_t header,
                    const char *text, uintptr_t stream) except -1:
        """Take part in a call without data; `peers` are prepared."""
        return check(epcy_cuda_launch_low_latency_refusal(peers, wire, kind, header, text, <void *>stream),
                     "launching a refusal")

    cdef int quiet(self, uintptr_t stream) except -1:
        """Let everything that is under way come to its end, behind the work of a stream."""
        return 0
