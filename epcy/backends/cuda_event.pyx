# cython: boundscheck=False, wraparound=False
# distutils: libraries = epcy_cuda
"""Points of CUDA streams, which Buffers record by the thousand."""

import time

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uintptr_t

from epcy.backends.cuda cimport *
from epcy.backends.symmetric cimport check
from epcy.event cimport Event

cdef void *spare_events[64]             # a process uses one GPU: any event fits anywhere
cdef int num_spare_events = 0


cdef class CudaEvent(Event):
    def __dealloc__(self):
        global num_spare_events
        if self.event != NULL and num_spare_events < 64:
            spare_events[num_spare_events] = self.event
            num_spare_events += 1
        elif self.event != NULL:
            epcy_cuda_event_free(self.event)

    cdef int record(self, uintptr_t stream) except -1:
        global num_spare_events
        if self.event == NULL and num_spare_events:
            num_spare_events -= 1
            self.event = spare_events[num_spare_events]
        elif self.event == NULL:
            check(epcy_cuda_event(&self.event), "cudaEventCreate")
        return check(epcy_cuda_event_record(self.event, <void *>stream), "cudaEventRecord")

    def current_stream_wait(self):
        import cupy
        check(epcy_cuda_event_wait(self.event, <void *><uintptr_t>cupy.cuda.get_current_stream().ptr),
              "cudaStreamWaitEvent")

    def query(self):
        cdef int done = 0
        check(epcy_cuda_event_query(self.event, &done), "cudaEventQuery")
        return done != 0

    def synchronize(self):
        while not self.query():
            PyErr_CheckSignals()
            time.sleep(2e-5)

    def __repr__(self):
        return "<epcy.Event on a CUDA stream>"


class Foreign:
    """A stream's address, as CuPy takes it."""

    def __init__(self, address):
        self.address = address

    def __cuda_stream__(self):
        return 0, self.address
