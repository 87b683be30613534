from epcy.sms cimport SmsPlan


cdef class HighThroughputCalls(SmsPlan):
    """The high-throughput calls of a Buffer."""
