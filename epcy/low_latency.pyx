# cython: boundscheck=False, wraparound=False
"""The low-latency calls (decoding): fixed slots, no count exchange, no host wait on a GPU, hooks."""

from epcy.backends.base cimport Backend
from epcy.backends.call cimport Call, LowLatencyCombineCall, LowLatencyDispatchCall
from epcy.backends.low_latency cimport LOW_LATENCY_COMBINE, LOW_LATENCY_DISPATCH, LowLatency
from epcy.observers cimport close_call, is_recorded, open_call, open_range, recorded
from epcy.state cimport BufferState

from epcy.errors import StateError
from epcy.status import OPERATIONS

OP_DISPATCH = OPERATIONS.index("low_latency_dispatch")
OP_COMBINE = OPERATIONS.index("low_latency_combine")


cdef class LowLatencyCalls(BufferState):

    def low_latency_dispatch(self, x, topk_idx, topk_weights=None, *, use_fp8=True, round_scale=False,
                             use_ue8m0=False, stats=None, return_recv_hook=False, previous_event=None,
                             async_finish=False, stream=None, timeout=None):
        """Send every token to its experts, into fixed slots.

        Collective. Blocking on the host backend, stream-ordered on nvshmem, where it never waits on the host and may
        lie in a CUDA graph. Needs `low_latency_mode=True`.

        Parameters
        ----------
        x : array (T, H) of bfloat16, float16 or float32
            T may differ between ranks, may be 0, and is at most M' = `num_max_low_latency_tokens_per_rank`.
        topk_idx : array (T, K) of int64 or int32
            Expert of each lane; -1: lane unused. An id outside -1..E-1 counts as -1, and `handle.check()`, `check()` or
            the next call that waits raises it. An expert that a token names twice gets the token once.
        topk_weights : array (T, K) of float32, optional
            For the combine: given here they travel with the rows, which is faster than giving them there.
        use_fp8 : bool
            Cast rows to e4m3 on the way, with a float32 scale for each 128 columns (H a multiple of 128).
        round_scale, use_ue8m0 : bool
            Round scales up to powers of two; give them as biased exponents, four in an int32 (H a multiple of 512).
        stats : array (L,) of int32 or int64, optional
            `recv_count` is added to it.
        return_recv_hook : bool
            Only send. `hook()` receives; until then the results are not there. Two such calls may be unreceived; their
            hooks run in the order of the calls.
        previous_event, async_finish, stream
            Order with other work; nothing to order on the host backend.
        timeout : float, optional
            Seconds that this call, and its hook, may wait for another rank; by default the Buffer's.

        Returns
        -------
        recv_x : array (L, R * M', H), or a pair (payload uint8, scales (L, R * M', H/128) or (L, R * M', H/512))
            Rows 0..recv_count[e]-1 are those of local expert e, ordered by (source rank, source token); the others are
            unspecified. A view that lives until the second next low-latency dispatch.
        recv_count : (L,) int64
            Likewise.
        handle : LowLatencyHandle
        event : Event
        hook : Hook, or None

        Raises
        ------
        ArgumentError, CapacityError, MismatchError, PeerTimeoutError, StateError
            See docs/errors.md. What another rank refused is a PeerError of `handle.check()`, `check()` or the next call
            that waits; `recv_count` is then 0.
        """
        cdef LowLatencyDispatchCall call
        cdef bint only_send = return_recv_hook
        if is_recorded(self):
            return recorded(self, "low_latency_dispatch", self.low_latency_dispatch, dict(
                x=x, topk_idx=topk_idx, topk_weights=topk_weights, use_fp8=use_fp8, round_scale=round_scale,
                use_ue8m0=use_ue8m0, stats=stats, return_recv_hook=return_recv_hook, previous_event=previous_event,
                async_finish=async_finish, stream=stream, timeout=timeout))
        self.enter_low_latency("low_latency_dispatch", LOW_LATENCY_DISPATCH, only_send)
        open_range("low_latency_dispatch")
        try:
            try:
                call = self._checker.low_latency_dispatch(x, topk_idx, topk_weights, use_fp8, round_scale, use_ue8m0,
                                                          stats, only_send)
                self._checker.order(call, previous_event, async_finish, stream)
                self.limit(timeout)
                call.timeout = self._backend.timeout
            except BaseException as error:
                self._backend.refuse(OP_DISPATCH, str(error) or type(error).__name__)
                raise
            recv_x, recv_count, handle, event = self._backend.low_latency_dispatch(call)
            call.handle = handle
            return recv_x, recv_count, handle, event, self.hook(LOW_LATENCY_DISPATCH, call) if only_send else None
        finally:
            close_call(self)

    def low_latency_combine(self, x, topk_idx, topk_weights, handle, *, reduction="rank", zero_copy=False,
                            use_logfmt=False, out=None, renormalize=False, return_recv_hook=False, previous_event=None,
                            async_finish=False, stream=None, timeout=None):
        """Bring the experts' rows back to the tokens' ranks, weigh and sum them.

        Collective. Blocking on the host backend, stream-ordered on nvshmem.

        Parameters
        ----------
        x : array (L, R * M', H) of bfloat16, float16 or float32
            A row for each row of recv_x; only the received ones are read.
        topk_idx : array (T, K), or None
            As given to the dispatch; the handle has it.
        topk_weights : array (T, K) of float32, or None
            None: those of the dispatch, or 1 where it had none.
        handle : LowLatencyHandle
        reduction : "rank" or "source"
            "rank": each rank sums its experts' rows and rounds, the source sums over ranks: the fewest bytes.
            "source": all K rows travel and are summed at the source, with one rounding.
        zero_copy : bool
            x must be the array of `low_latency_combine_input`.
        use_logfmt : bool
            Rows travel with 10 bits an element (docs/numerics.md; H a multiple of 128).
        out : array (T, H) of x's dtype, optional
            Where the sums go; by default a new array.
        renormalize : bool
            Where lanes of a token are missing because a rank is masked, multiply the weights of the others by (sum of
            all) / (sum of those that are left). nvshmem with reduction="rank": all ranks give it, or none.
        return_recv_hook : bool
            Only send; `hook()` receives. x may be overwritten after `event`; an array of `low_latency_combine_input`
            belongs to the combine from now on, hook or not.
        previous_event, async_finish, stream
            Order with other work; nothing to order on the host backend.
        timeout : float, optional
            Seconds that this call, and its hook, may wait for another rank; by default the Buffer's.

        Returns
        -------
        combined_x : array (T, H)
        event : Event
        hook : Hook, or None

        Raises
        ------
        ArgumentError, MismatchError, PeerTimeoutError, StateError
            See docs/errors.md. What another rank refused is a PeerError of `check()` or the next call that waits;
            combined_x is then unspecified.
        """
        cdef LowLatencyCombineCall call
        cdef bint only_send = return_recv_hook
        if is_recorded(self):
            return recorded(self, "low_latency_combine", self.low_latency_combine, dict(
                x=x, topk_idx=topk_idx, topk_weights=topk_weights, handle=handle, reduction=reduction,
                zero_copy=zero_copy, use_logfmt=use_logfmt, out=out, renormalize=renormalize,
                return_recv_hook=return_recv_hook, previous_event=previous_event, async_finish=async_finish,
                stream=stream, timeout=timeout))
        self.enter_low_latency("low_latency_combine", LOW_LATENCY_COMBINE, only_send)
        open_range("low_latency_combine")
        try:
            try:
                call = self._checker.low_latency_combine(x, topk_idx, topk_weights, handle, reduction, use_logfmt, out,
                                                         only_send)
                self._checker.order(call, previous_event, async_finish, stream)
                self.limit(timeout)
                call.timeout, call.renormalize = self._backend.timeout, renormalize
                self._backend.low_latency.take_input(call, zero_copy)
            except BaseException as error:
                self._backend.refuse(OP_COMBINE, str(error) or type(error).__name__)
                raise
            event = self._backend.low_latency_combine(call)
            return call.out.owner, event, self.hook(LOW_LATENCY_COMBINE, call) if only_send else None
        finally:
            close_call(self)

    def low_latency_combine_input(self, handle, dtype=None):
        """Get memory for the experts' output, so that low_latency_combine copies nothing.

        Local. The array is taken until the combine that gets it is received; two may be out at a time. On the host
        backend it waits until the other ranks have read what lay there before.

        Parameters
        ----------
        handle : LowLatencyHandle
        dtype : bfloat16, float16 or float32, optional
            Of the rows; no wider than the Buffer's.

        Returns
        -------
        array (L, R * M', H) of `dtype` (default: the Buffer's)

        Raises
        ------
        ArgumentError, PeerTimeoutError, StateError
        """
        self.enter_low_latency("low_latency_combine_input", -1, False)
        try:
            self._checker.low_latency_handle(handle)
            return self._backend.low_latency_combine_input(self._checker.payload_kind(dtype))
        finally:
            self._busy = False

    @property
    def low_latency_transport(self):
        """What carries the low-latency calls; None without `low_latency_mode`, and after free()."""
        return None if self._backend is None else self._backend.low_latency_transport

    cdef Hook hook(self, int kind, Call call):
        cdef Hook hook = Hook.__new__(Hook)
        hook.buffer, hook.call, hook.kind = self, call, kind
        hook.number = self._backend.low_latency.num_sent[kind]
        return hook

    cdef int warm_low_latency(self, x, idx, weights) except -1:
        """Make a call of every kind: each cast, each reduction, LogFMT, in one piece and in two halves."""
        for use_fp8, round_scale, use_ue8m0, multiple in (
                (False, False, False, 1), (True, False, False, 128), (True, True, False, 128), (True, True, True, 512)):
            if x.shape[1] % multiple:
                continue
            for in_halves in (False, True):
                _, _, handle, _, hook = self.low_latency_dispatch(
                    x, idx, weights, use_fp8=use_fp8, round_scale=round_scale, use_ue8m0=use_ue8m0,
                    return_recv_hook=in_halves)
                if in_halves:
                    hook()
                for reduction in ("rank", "source"):
                    y = self.low_latency_combine_input(handle)
                    _, _, hook = self.low_latency_combine(
                        y, None, None, handle, reduction=reduction, zero_copy=True, use_logfmt=multiple == 128,
                        return_recv_hook=in_halves)
                    if in_halves:
                        hook()
        return 0

    # ---- state ----------------------------------------------------------------------------------------------

    cdef LowLatency enter_low_latency(self, str name, int kind, bint return_recv_hook):
        """As `enter`, and refuse what the mode or calls that are not received do not allow; no other rank is told."""
        cdef LowLatency state
        self.enter(name)
        state = self._backend.low_latency
        try:
            if state is None:
                raise StateError(f"{name}: this Buffer has no low-latency areas (rank {self.rank}); construct it with "
                                 "low_latency_mode=True")
            if kind >= 0:
                state.may_send(kind, return_recv_hook)
        except BaseException:
            self._busy = False
            raise
        return state


cdef class Hook:
    """Receives what a low-latency call with `return_recv_hook=True` only sent.

    Call it once, in the order in which the calls of its kind were made. It keeps the call's arrays until then.
    """

    def __call__(self, timeout=None):
        """Receive.

        Blocking on the host backend, stream-ordered on nvshmem.

        Parameters
        ----------
        timeout : float, optional
            Seconds that it may wait for another rank; by default those of its call.

        Raises
        ------
        MismatchError, PeerTimeoutError, StateError
        """
        cdef Backend backend
        if is_recorded(self.buffer):
            return recorded(self.buffer, "hook", self, dict(timeout=timeout))
        open_call(self.buffer, "hook")
        try:
            backend = self.buffer._backend
            backend.low_latency.may_receive(self.kind, self.number)
            self.buffer.limit(self.call.timeout if timeout is None else timeout)
            if self.kind == LOW_LATENCY_DISPATCH:
                backend.low_latency_dispatch_receive(self.call, self.call.handle)
            else:
                backend.low_latency_combine_receive(self.call)
            self.call = None
        finally:
            close_call(self.buffer)

    def __repr__(self):
        return f"<epcy.Hook of low-latency call {self.number} of its kind>"
