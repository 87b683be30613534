"""The host backend's dispatch and combine."""

from libc.stdint cimport int64_t

from epcy.backends.call cimport CombineCall, DispatchCall
from epcy.backends.host_epoch cimport HostEpoch
from epcy.backends.host_kernels cimport *
from epcy.handle cimport Handle


cdef class HostHandle(Handle):
    cdef epcy_route *routes             # (T, K)
    cdef int64_t *expert_numbers        # counts (L,), then offsets (L + 1,)
    cdef int64_t num_local
    cdef int64_t *tokens                # to each rank (R,), then from each (R,)
    cdef int64_t num_true_rows          # of this rank, unclipped
    cdef object relayed                 # what this rank passes on between nodes; None: nothing


cdef class HostBackend(HostEpoch):
    cdef int move(self, HostHandle handle, epcy_host_dispatch *d, bint uncached) except -1
    cdef int add_up(self, HostHandle handle, epcy_host_combine *c) except -1
    cdef HostHandle count(self, DispatchCall call, epcy_record *record)
    cdef HostHandle new_handle(self, str layout, int64_t num_tokens, int64_t alignment, int64_t num_worst_tokens)
    cdef object implausible(self)
    cdef object overflow_error(self)
    cdef HostHandle nothing_came(self, HostHandle of, error)
    cdef int count_tokens(self, HostHandle handle, DispatchCall call, int area, bint uncached) except -1
    cdef int stage(self, CombineCall call) except -1
    cdef int count_sums(self, HostHandle handle, int64_t row_bytes) except -1
    cdef int poison(self, int64_t at) except -1
