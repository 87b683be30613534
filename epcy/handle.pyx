"""What a call leaves behind: the handle of a routing, and the results of dispatch and combine."""

import numpy as np

from epcy.errors import StateError


cdef class Handle:
    """The routing of one dispatch: pass it to `combine`, and to `dispatch(handle=...)` to route again the same way.

    A handle owns its routing and never expires.

    Attributes
    ----------
    layout : str
        "rank" or "expert".
    num_tokens : int
        T, the tokens that this rank sent.
    num_rows : int
        Rows of `recv_x`: the number of received rows, or `num_worst_tokens`.
    expert_alignment : int
        To what the groups of the expert layout were padded.
    num_worst_tokens : int
        As given to dispatch; 0 where the host waited for the count.
    """

    cdef int64_t _num_recv_tokens(self) noexcept:
        return self.num_rows

    cpdef object expert_counts(self):
        raise NotImplementedError

    @property
    def num_recv_tokens(self):
        """The true number of rows for this rank, clipped ones included: a 0-d int64 array of `buf.xp`."""
        return np.array(self._num_recv_tokens(), np.int64)

    @property
    def num_tokens_per_expert(self):
        """Lanes that came for each local expert (expert layout: its rows, unpadded): (L,) int64 array of `buf.xp`."""
        return self.expert_counts()

    @property
    def expert_offsets(self):
        """Where each local expert's group starts, and the end: (L + 1,) int64; None in the rank layout."""
        if self.layout != "expert":
            return None
        counts = self.expert_counts()
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(-(-counts // self.expert_alignment) * self.expert_alignment, out=offsets[1:])
        return offsets

    @property
    def overflow(self):
        """Whether more rows came than `num_worst_tokens`; those beyond were not written."""
        return self._num_recv_tokens() > self.num_rows

    def check(self):
        """Raise what went wrong in a dispatch that did not wait: too many rows, bad ids, or another rank's refusal.

        Local, blocking.

        Raises
        ------
        CapacityError
            More rows came than `num_worst_tokens`.
        ArgumentError
            topk_idx held an id outside -1..E-1 (it counted as -1).
        PeerError
            Another rank refused its arguments; nothing came.
        """
        if self.error is not None:
            raise self.error

    def __reduce__(self):
        raise TypeError("an epcy.Handle belongs to its Buffer and cannot be pickled; keep topk_idx instead")

    def __repr__(self):
        return (f"<epcy.Handle: {self.layout} layout, {self.num_tokens} tokens sent, "
                f"{self._num_recv_tokens()} rows received>")


cdef class LowLatencyHandle(Handle):
    """The routing of one low-latency dispatch: pass it to `low_latency_combine`.

    It owns its routing and never expires. `layout` is "low_latency", `num_rows` the rows of `recv_x`, L * R * M'.

    Attributes
    ----------
    received : bool
        Whether the rows have come: True but between a dispatch with `return_recv_hook` and its hook.
    """

    @property
    def num_lanes_not_sent(self):
        """Lanes of this rank's tokens, by the rank that they would have gone to, that the dispatch dropped because that
        rank was masked: (R,) int64. None where the backend masks no ranks."""
        return None

    @property
    def num_lanes_not_returned(self):
        """Lanes, by rank, that were sent and are missing in the last combine with this handle: (R,) int64, likewise."""
        return None

    @property
    def missing_ranks(self):
        """The ranks that nothing was received from because they were masked, or had masked this one."""
        return ()

    @property
    def overflow(self):
        """Always False: there is room for every token."""
        return False

    def __repr__(self):
        return (f"<epcy.LowLatencyHandle: {self.num_tokens} tokens sent, "
                f"{'received' if self.received else 'not yet received'}>")


cdef class Area:
    pass


cdef class Dispatch:
    """What `Buffer.dispatch` returns; unpacks into its six fields in this order.

    Attributes
    ----------
    recv_x : array (N, H), or a pair (payload (N, H) uint8, scales (N, ceil(H/128)) float32)
        The received rows, a view into the Buffer's memory. It lives until the second next dispatch; then reading
        this attribute raises StateError.
    recv_topk_idx : (N, K) int64, local expert ids, -1 for lanes elsewhere; expert layout: (N,) int64, -1 on padding
    recv_topk_weights : (N, K) float32, 0 for lanes elsewhere; expert layout: (N,) float32; None without weights
    num_recv_tokens_per_expert : list of L ints, unpadded; None with `num_worst_tokens`
    handle : Handle
    event : Event
    """

    cdef int _live(self) except -1:
        if self._area is not None and self._area.generation != self._generation:
            raise StateError("recv_x: this result's memory was given to a later dispatch, or the Buffer was freed; "
                             "a result lives until the second next dispatch: copy it, or call dispatch(out=True)")
        return 0

    @property
    def recv_x(self):
        self._live()
        if self._recv_x is None:
            self._recv_x = self._views[self._kind][:self._num_rows]
            if self._has_scales:
                self._recv_x = self._recv_x, self._views["scales"][:self._num_rows]
        return self._recv_x

    @property
    def recv_topk_idx(self):
        self._live()
        if self._recv_topk_idx is None:
            self._recv_topk_idx = self._views["idx", self._layout][:self._num_rows]
        return self._recv_topk_idx

    @property
    def recv_topk_weights(self):
        self._live()
        if self._recv_topk_weights is None and self._has_weights:
            self._recv_topk_weights = self._views["weights", self._layout][:self._num_rows]
        return self._recv_topk_weights

    def __iter__(self):
        return iter((self.recv_x, self.recv_topk_idx, self.recv_topk_weights, self.num_recv_tokens_per_expert,
                     self.handle, self.event))

    def __len__(self):
        return 6

    def __repr__(self):
        return f"<epcy.Dispatch: {self.handle!r}>"


cdef class Combine:
    """What `Buffer.combine` returns; unpacks into its three fields in this order.

    Attributes
    ----------
    combined_x : (T, H) array of the payload type
    combined_topk_weights : (T, K) float32, or None
    event : Event
    """

    def __iter__(self):
        return iter((self.combined_x, self.combined_topk_weights, self.event))

    def __len__(self):
        return 3

    def __repr__(self):
        return f"<epcy.Combine: {self.combined_x.shape} {self.combined_x.dtype}>"
