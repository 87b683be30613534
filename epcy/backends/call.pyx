"""What a Buffer asks of its backend: arguments that were checked once, as C sees them."""


cdef class Call:
    pass


cdef class DispatchCall(Call):
    pass


cdef class CombineCall(Call):
    pass


cdef class LowLatencyDispatchCall(Call):
    pass


cdef class LowLatencyCombineCall(Call):
    pass
