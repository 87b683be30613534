"""Events: when a call is over. On the host backend every call is over when it returns."""


cdef class Event:
    """A point in the work of a Buffer that later work can wait for.

    Made by `Buffer.capture()` and by every call. On the host backend calls are over when they return, so there is
    nothing left to wait for.
    """

    def current_stream_wait(self):
        """Make the current stream wait for this point.

        Local, stream-ordered. Does nothing on the host backend.
        """

    def synchronize(self):
        """Wait on the host for this point.

        Local, blocking.
        """

    def query(self):
        """Tell whether this point has been passed.

        Local, does not block.

        Returns
        -------
        bool
        """
        return True

    def __repr__(self):
        return "<epcy.Event: passed>"


EventOverlap = Event

cdef Event _completed = Event()


cdef Event completed():
    return _completed
