from libc.stdint cimport int64_t

from epcy.arrays cimport Array
from epcy.backends.call cimport CombineCall, DispatchCall
from epcy.handle cimport Dispatch, Handle
from epcy.layout cimport epcy_area, epcy_heap, epcy_shape


cdef class Backend:
    """What the backends share: which area is whose, and the views into them."""

    cdef object comm                    # the Buffer's own communicator
    cdef object token                   # equal to the Buffer's: marks its handles
    cdef list identities                # of all ranks: bootstrap.Identity
    cdef set watched                    # ranks whose processes can be seen from here
    cdef readonly double timeout
    cdef readonly bint broken
    cdef object deferred                # an error for check() or the next waiting call
    cdef object xp                      # numpy or cupy
    cdef int rank, num_ranks
    cdef int device                     # of the arrays; -1: host memory
    cdef epcy_shape shape
    cdef epcy_area area
    cdef epcy_heap heap_layout
    cdef char *start                    # of this rank's allocation
    cdef list areas                     # the receive areas' generations
    cdef list receive_views, combine_views
    cdef bint taken[2]                  # combine areas given out by combine_input
    cdef int next_area

    cdef int open_areas(self, owner) except -1
    cdef int close_areas(self) except -1
    cdef int take_area(self) except -1
    cdef Array kept(self, Array array)
    cdef int keep_inputs(self, DispatchCall call) except -1
    cdef int check_out(self, CombineCall call) except -1
    cdef int64_t offset_in_heap(self, Array array) noexcept
    cdef Dispatch result(self, DispatchCall call, Handle handle, int area, list counts, event)
    cdef object view(self, int64_t offset, tuple shape, dtype, owner)
