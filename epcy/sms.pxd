from libc.stdint cimport int64_t

from epcy.low_latency cimport LowLatencyCalls


cdef class SmsPlan(LowLatencyCalls):
    """The part of the machine that each call of a Buffer takes."""

    cdef object _plan               # epcy.model.Plan: SMs by a call's size; None: _num_sms for all
    cdef object _num_sms            # as given or set; None: the backend's own choice

    cdef object _make_plan(self, dict found)
    cdef object _planned(self, str op, str layout, int64_t num_tokens)
