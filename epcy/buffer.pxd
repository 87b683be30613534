from libc.stdint cimport int64_t

from epcy.low_latency cimport LowLatencyCalls


cdef class Buffer(LowLatencyCalls):
    """Moves tokens to their experts and back between the ranks of a communicator."""

    cdef readonly int size
    cdef readonly int64_t num_local_experts
    cdef readonly str backend
    cdef readonly object comm, topology, options
    cdef object _token              # marks this Buffer's handles
    cdef dict _shape
    cdef object _plan               # epcy.model.Plan: SMs by a call's size; None: _num_sms for all
    cdef object _num_sms            # as given or set; None: the backend's own choice
    cdef int64_t _num_max_tokens, _hidden, _num_experts, _num_topk

    cdef tuple warm_tokens(self, int64_t most)
    cdef object _make_plan(self, dict found)
    cdef object _planned(self, str op, str layout, int64_t num_tokens)
