"""What a Buffer asks of its backend: arguments that were checked once, as C sees them."""


cdef class DispatchCall:
    pass


cdef class CombineCall:
    pass
