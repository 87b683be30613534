# cython: boundscheck=False, wraparound=False
"""The high-throughput calls (training, prefill): dispatch and combine of tightly packed rows, and what goes with them.

Each looks at its arguments once and makes one call into the backend.
"""

import numpy as np

from epcy.backends.call cimport CombineCall, DispatchCall
from epcy.observers cimport close_call, is_recorded, open_call, recorded

from epcy.status import OPERATIONS

OP_DISPATCH, OP_COMBINE = OPERATIONS.index("dispatch"), OPERATIONS.index("combine")
OP_BARRIER = OPERATIONS.index("barrier")


cdef class HighThroughputCalls(SmsPlan):

    def dispatch(self, x, topk_idx=None, topk_weights=None, *, handle=None, layout=None, expert_alignment=None,
                 num_worst_tokens=0, num_sms=None, previous_event=None, async_finish=False, stream=None, out=None,
                 timeout=None):
        """Send every token to the ranks of its experts.

        Collective. Blocking on the host backend, stream-ordered on nvshmem.

        Parameters
        ----------
        x : array (T, H) of bfloat16, float16 or float32, or a pair
            (payload (T, H) of float8_e4m3fn or uint8, scales (T, ceil(H/128)) float32). T may differ between ranks
            and may be 0.
        topk_idx : array (T, K) of int64 or int32
            Expert of each lane; -1: lane unused.
        topk_weights : array (T, K) of float32, optional
        handle : Handle, optional
            Route as an earlier dispatch did; then topk_idx stays None.
        layout : "rank" or "expert"
            "rank" (default): a row per (token, destination rank), ordered by (source rank, token).
            "expert": a row per (token, lane), grouped by local expert, each group ordered by (source rank, token,
            lane) and padded with zero rows to a multiple of `expert_alignment`.
        expert_alignment : int
            Rows (default 1); the expert layout alone. With `handle` both are the handle's and stay None.
        num_worst_tokens : int
            N > 0: results of N rows whatever comes; rows past the count have recv_topk_idx -1; what goes wrong is
            raised by `handle.check()`, `check()` or the next call that waits.
        num_sms : int, optional
            For this call alone; see `set_num_sms`.
        previous_event, async_finish, stream
            Order with other work; nothing to order on the host backend.
        out : True, array (>= N, H), or a pair of arrays
            Give the result in the user's own arrays instead of views into the Buffer. True: new ones.
        timeout : float, optional
            Seconds that this call may wait for another rank; by default the Buffer's.

        Returns
        -------
        Dispatch
            Views that live until the second next dispatch, unless `out` was given.

        Raises
        ------
        ArgumentError, CapacityError, MismatchError, PeerError, PeerTimeoutError, StateError
            See docs/errors.md.
        """
        if is_recorded(self):
            return recorded(self, "dispatch", self.dispatch, dict(
                x=x, topk_idx=topk_idx, topk_weights=topk_weights, handle=handle, layout=layout,
                expert_alignment=expert_alignment, num_worst_tokens=num_worst_tokens, num_sms=num_sms,
                previous_event=previous_event, async_finish=async_finish, stream=stream, out=out, timeout=timeout))
        open_call(self, "dispatch")
        try:
            try:
                call = self._checker.dispatch(x, topk_idx, topk_weights, handle, layout, expert_alignment,
                                              num_worst_tokens, out)
                self._checker.order(call, previous_event, async_finish, stream)
                if num_sms is not None:
                    self._use_sms(num_sms)
                elif self._plan is not None:
                    num_sms = self._planned("dispatch", (<DispatchCall>call).layout, (<DispatchCall>call).x.shape[0])
                self.limit(timeout)
                self._backend.keep_inputs(call)
            except BaseException as error:
                self._backend.refuse(OP_DISPATCH, str(error) or type(error).__name__)
                raise
            result = self._backend.dispatch(call)
            if handle is None and num_worst_tokens == 0:
                self._raise_late()
            return result
        finally:
            if num_sms is not None:
                self._backend.use_sms(self._num_sms)
            close_call(self)

    def combine(self, x, handle, topk_weights=None, *, bias=None, num_sms=None, previous_event=None,
                async_finish=False, stream=None, out=None, timeout=None):
        """Bring the experts' rows back to the tokens' ranks and sum them.

        Collective. Blocking on the host backend, stream-ordered on nvshmem.

        Parameters
        ----------
        x : array (N, H) of bfloat16, float16 or float32
            A row for each row of recv_x. Written into `combine_input(handle)`, or into recv_x itself, nothing is
            copied.
        handle : Handle
            Of the dispatch.
        topk_weights : array of float32, optional
            Rank layout: (N, K), brought back unchanged to `combined_topk_weights`. Expert layout: (T, K), this rank's
            own: lane k of token t counts with weight [t, k].
        bias : array (T, H), or a pair of them, of x's dtype
            Added first.
        num_sms : int, optional
            For this call alone; see `set_num_sms`.
        previous_event, async_finish, stream
            Order with other work; nothing to order on the host backend.
        out : array (T, H) of x's dtype, optional
            Where the sums go; by default a new array.
        timeout : float, optional
            Seconds that this call may wait for another rank; by default the Buffer's.

        Returns
        -------
        Combine
            Sums in float32 in rank order, rounded once (docs/numerics.md).

        Raises
        ------
        ArgumentError, MismatchError, PeerError, PeerTimeoutError, StateError
            See docs/errors.md.
        """
        if is_recorded(self):
            return recorded(self, "combine", self.combine, dict(
                x=x, handle=handle, topk_weights=topk_weights, bias=bias, num_sms=num_sms,
                previous_event=previous_event, async_finish=async_finish, stream=stream, out=out, timeout=timeout))
        open_call(self, "combine")
        try:
            try:
                call = self._checker.combine(x, handle, topk_weights, bias, out)
                self._checker.order(call, previous_event, async_finish, stream)
                if num_sms is not None:
                    self._use_sms(num_sms)
                elif self._plan is not None:
                    num_sms = self._planned("combine", (<CombineCall>call).handle.layout,
                                            (<CombineCall>call).out.shape[0])
                self.limit(timeout)
                self._backend.prepare_combine(call)
            except BaseException as error:
                self._backend.refuse(OP_COMBINE, str(error) or type(error).__name__)
                raise
            return self._backend.combine(call)
        finally:
            if num_sms is not None:
                self._backend.use_sms(self._num_sms)
            close_call(self)

    def combine_input(self, handle, dtype=None):
        """Get memory for the experts' output, so that combine copies nothing.

        Local, does not block. The array is taken until the combine that gets it; two may be out at a time.

        Parameters
        ----------
        handle : Handle
            Of the dispatch whose rows the experts work on.
        dtype : bfloat16, float16 or float32, optional
            Of the rows; no wider than the Buffer's.

        Returns
        -------
        array (N, H) of `dtype` (default: the Buffer's)

        Raises
        ------
        ArgumentError, StateError
        """
        self.enter("combine_input")
        try:
            checked = self._checker.handle(handle)
            kind = self._checker.payload_kind(dtype)
            return self._backend.combine_input(checked, kind)
        finally:
            self._busy = False

    def get_dispatch_layout(self, topk_idx):
        """Count where this rank's tokens go.

        Local, blocking.

        Parameters
        ----------
        topk_idx : array (T, K) of int64 or int32

        Returns
        -------
        num_tokens_per_rank : (R,) int64
        num_tokens_per_node : (num_nodes,) int64
        num_tokens_per_expert : (E,) int64
            Lanes; a repeated expert counts twice.
        is_token_in_rank : (T, R) bool

        Raises
        ------
        ArgumentError
            A wrong shape or dtype, or an id outside -1..E-1.
        StateError
        """
        self.enter("get_dispatch_layout")
        try:
            xp, idx = self.xp, self._checker.lanes(topk_idx, "topk_idx", -1, True).owner
            bad = (idx < -1) | (idx >= self._num_experts)
            if bad.any():
                token, lane = xp.argwhere(bad)[0].tolist()
                raise self._checker.wrong(f"topk_idx[{token}, {lane}]",
                                          f"an expert id in 0..{self._num_experts - 1} or -1", int(idx[token, lane]))
            token, lane = xp.nonzero(idx >= 0)
            experts = idx[token, lane]
            in_rank = xp.zeros((idx.shape[0], self.size), np.bool_)
            in_rank[token, experts // self.num_local_experts] = True
            ranks_of_node = [[r for r, n in enumerate(self.topology.node_of_rank) if n == node]
                             for node in range(self.topology.num_nodes)]
            in_node = xp.stack([in_rank[:, ranks].any(1) for ranks in ranks_of_node], 1)
            return (in_rank.sum(0, dtype=np.int64), in_node.sum(0, dtype=np.int64),
                    xp.bincount(experts, minlength=self._num_experts).astype(np.int64), in_rank)
        finally:
            self._busy = False

    def barrier(self, timeout=None):
        """Wait until every rank has called this.

        Collective, blocking.

        Parameters
        ----------
        timeout : float, optional
            Seconds that it may wait; by default the Buffer's.

        Raises
        ------
        MismatchError
            Another rank is in another call.
        PeerError, PeerTimeoutError, StateError
        """
        if is_recorded(self):
            return recorded(self, "barrier", self.barrier, dict(timeout=timeout))
        open_call(self, "barrier")
        try:
            try:
                self.limit(timeout)
            except BaseException as error:
                self._backend.refuse(OP_BARRIER, str(error))
                raise
            self._backend.barrier()
            self._backend.inspect("barrier")
            self._raise_late()
        finally:
            close_call(self)

    def capture(self):
        """Mark this point of the current stream.

        Local, does not block.

        Returns
        -------
        Event
        """
        self.enter("capture")
        self._busy = False
        return self._backend.capture()
