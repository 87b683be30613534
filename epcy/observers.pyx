# cython: boundscheck=False, wraparound=False
"""Who looks at calls while they are made: NVTX ranges (epcy/ranges.py) and recordings (epcy/recording)."""

import os

from epcy.state cimport BufferState

cdef object _domain = None      # NVTX's: where calls shall be ranges
cdef object _recorder = None    # what makes calls and keeps them


def use_ranges(domain):
    """Make calls ranges of this NVTX domain from now on; None: no more."""
    global _domain
    _domain = domain


cdef int open_range(str name) except -1:
    if _domain is not None:
        _domain.push_range(_domain.get_event_attributes(message=name))
    return 0


cdef int open_call(BufferState buf, str name) except -1:
    """Begin a call: refuse it where the Buffer's state does not allow it, else it is a range."""
    buf.enter(name)
    return open_range(name)


cdef int close_call(BufferState buf) except -1:
    """End a call, well or not."""
    buf.leave()
    if _domain is not None:
        _domain.pop_range()
    return 0


def use_recorder(recorder):
    """Hand calls to recorder.call(buf, op, function, arguments) from now on, which makes them; None: no more."""
    global _recorder
    _recorder = recorder


cdef bint is_recorded(BufferState buf) noexcept:
    return _recorder is not None and not buf._unrecorded


cdef object recorded(BufferState buf, str op, function, dict arguments):
    buf._unrecorded = True
    try:
        return _recorder.call(buf, op, function, arguments)
    finally:
        buf._unrecorded = False


if "NVTX_INJECTION64_PATH" in os.environ:       # nsys sets it for what it starts
    from epcy import ranges

    ranges.follow(True)
