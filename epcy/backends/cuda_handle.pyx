# cython: boundscheck=False, wraparound=False
# distutils: libraries = epcy_cuda
"""A handle whose routing lies on the GPU."""

from epcy.handle cimport Handle

from epcy.backends import verdicts


cdef class CudaHandle(Handle):
    @property
    def num_recv_tokens(self):
        return self.num_recv[0]

    @property
    def overflow(self):
        return self.num_recv[0] > self.num_rows

    cpdef object expert_counts(self):
        return self.experts

    @property
    def expert_offsets(self):
        return self.offsets

    def check(self):
        if self.event is not None:
            self.event.synchronize()
        if self.error is None and self.num_worst_tokens:
            rows = int(self.num_recv[0])
            if rows > self.num_worst_tokens:
                raise verdicts.dropped(self.epoch, self.rank, rows, self.num_worst_tokens)
        if self.error is not None:
            raise self.error
        if self.backend is not None:        # which cannot tell of which call: check() of the Buffer shall know too
            error = self.backend.late_error()
            if error is not None:
                self.backend.deferred = error
                raise error

    def __repr__(self):
        return f"<epcy.Handle: {self.layout} layout, {self.num_tokens} tokens sent, on a GPU>"
