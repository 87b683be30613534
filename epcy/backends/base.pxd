from libc.stdint cimport int64_t

from epcy.arrays cimport Array
from epcy.backends.call cimport CombineCall, DispatchCall, LowLatencyCombineCall, LowLatencyDispatchCall
from epcy.backends.low_latency cimport LowLatency
from epcy.backends.meter cimport Meter
from epcy.handle cimport Dispatch, Handle, LowLatencyHandle
from epcy.layout cimport epcy_area, epcy_heap, epcy_shape


cdef class Backend:
    """What the backends share: which area is whose, and the views into them."""

    cdef object comm                    # the Buffer's own communicator
    cdef object token                   # equal to the Buffer's: marks its handles
    cdef list identities                # of all ranks: bootstrap.Identity
    cdef set watched                    # ranks whose processes can be seen from here
    cdef readonly double timeout        # of the call in progress
    cdef double default_timeout         # where a call gives none
    cdef readonly bint broken
    cdef bint in_call                   # between the two ends of a call: who leaves now leaves the others alone
    cdef object faults                  # faults.Faults, or None
    cdef object inspection              # inspection.Inspection with the option `check`, else None
    cdef bint checks                    # the option `check`
    cdef bint masks_late                # low latency: go on without a rank that is late or dead
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
    cdef LowLatency low_latency         # None: the mode is off
    cdef readonly Meter meter           # None: nothing is counted
    cdef readonly str transport         # what carries rows between nodes; None: there is one node, or that is not told
    cdef readonly str low_latency_transport     # what carries low-latency calls; None: the mode is off

    cdef void set_timeout(self, double seconds) noexcept
    cdef int reach(self, str operation, str phase) except -1
    cdef int take(self) except -1
    cdef int leave(self) except -1
    cdef int open_areas(self, owner) except -1
    cdef int close_areas(self) except -1
    cdef int take_area(self) except -1
    cdef bint lies_in(self, Array array, char *begin) noexcept
    cdef Array kept(self, Array array)
    cdef int keep_inputs(self, DispatchCall call) except -1
    cdef int check_out(self, Array out) except -1
    cdef int64_t offset_in_heap(self, Array array) noexcept
    cdef Dispatch result(self, DispatchCall call, Handle handle, int area, list counts, event)
    cdef object view(self, int64_t offset, tuple shape, dtype, owner)
    cdef tuple low_latency_dispatch(self, LowLatencyDispatchCall call)
    cdef int low_latency_dispatch_receive(self, LowLatencyDispatchCall call, LowLatencyHandle handle) except -1
    cdef object low_latency_combine(self, LowLatencyCombineCall call)
    cdef int low_latency_combine_receive(self, LowLatencyCombineCall call) except -1
    cdef object low_latency_combine_input(self, int kind)
    cdef int64_t num_masked(self) noexcept
    cdef bint is_left_out(self) except -1
    cdef bint leaves_alone(self, bint together, int op) except -1
    cpdef set_mask(self, int rank, bint masked)
    cpdef masked(self)
    cpdef dropped(self, int which)
