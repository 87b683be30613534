"""What a Buffer's kernels count and stamp, brought into its meter."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from epcy.backends.cuda cimport epcy_counters, epcy_stamp
from epcy.backends.meter cimport Meter


cdef class Counters:
    """Reads a GPU's counters, and adds what is new to a meter."""

    cdef Meter meter
    cdef char *address                  # of epcy_counters on the GPU
    cdef int device
    cdef int64_t nbytes, num_experts
    cdef object seen                    # as last read
    cdef uint32_t last_epochs[5]        # of the stamps recorded so far, by kind
    cdef int64_t ahead_ns               # of the GPU's clock
    cdef list calls                     # while a trace is taken: (operation, chunk counts' address, its owner)

    cdef int open(self, Meter meter, char *address, int device, int64_t num_experts) except -1
    cdef int follow(self, int op, const void *chunk_counts, object owner) except -1
    cdef int read_stamps(self, epcy_counters *now) except -1
    cdef int record(self, const epcy_stamp *s) except -1
