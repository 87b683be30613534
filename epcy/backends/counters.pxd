"""What a Buffer's kernels count and stamp, brought into its meter."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from epcy.backends.cuda cimport epcy_counters, epcy_stamp
from epcy.backends.meter cimport Meter


cdef extern from "epcy/status.h" nogil:
    enum:
        EPCY_PHASE_IDLE
        EPCY_PHASE_DATA
        EPCY_STATUS_VERSION

    const uint64_t EPCY_STATUS_MAGIC

    ctypedef struct epcy_status:
        uint64_t magic
        int32_t version, pid, rank, size, op, phase
        uint64_t epoch
        int64_t since_ns
        int64_t num_calls[7]
        int64_t watched_ns


cdef class Counters:
    """Reads a GPU's counters, and adds what is new to a meter."""

    cdef Meter meter
    cdef char *address                  # of epcy_counters on the GPU
    cdef int device
    cdef int64_t nbytes, num_experts
    cdef object seen                    # as last read
    cdef object beside                  # reads more, where there is more; or None
    cdef uint32_t last_epochs[5]        # of the stamps recorded so far, by kind
    cdef int64_t ahead_ns               # of the GPU's clock
    cdef object page, page_path         # the status page, or None
    cdef epcy_status *status
    cdef int64_t last_read_ns           # CLOCK_MONOTONIC
    cdef object last_call               # the event of the last of them
    cdef list calls                     # while a trace is taken: (operation, address of counts, how many a rank, owner)

    cdef int open(self, Meter meter, char *address, int device, int64_t num_experts) except -1
    cdef object open_page(self, directory)
    cdef int enter(self, int op) except -1
    cdef int leave(self) except -1
    cdef int close(self) except -1
    cdef int follow(self, int op, const int32_t *counts, int num_chunks, object owner, object event) except -1
    cdef int read_stamps(self, epcy_counters *now) except -1
    cdef int record(self, const epcy_stamp *s) except -1
