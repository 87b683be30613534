# cython: boundscheck=False, wraparound=False
"""Buffer: checks arguments, keeps the ranks in step, makes one call into the backend per operation."""

import os
import warnings

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t
from posix.unistd cimport getpid

import numpy as np

from epcy.arrays cimport (
    KIND_BF16, KIND_FP8, KIND_FP16, KIND_FP32, KIND_INT32, KIND_INT64, KIND_OTHER, Array, contiguous, describe,
    with_rows)
from epcy.backends.call cimport CombineCall, DispatchCall
from epcy.event cimport Event, completed
from epcy.handle cimport Dispatch, Handle
from epcy.layout cimport epcy_default_num_rows, epcy_num_scales, epcy_shape

from epcy import backends, topology
from epcy.arrays import DTYPES
from epcy.backends import bootstrap
from epcy.backends.host import heap_layout
from epcy.errors import (
    ArgumentError, CapacityError, EpcyError, NotSupportedError, PeerTimeoutError, StateError)
from epcy.options import resolve

DEF_TIMEOUT = 60.0
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
OP_DISPATCH, OP_COMBINE = 1, 2          # enum epcy_op


def shape_of(dict options, int64_t num_ranks):
    """The numbers that fix a Buffer's memory; ArgumentError where they do not go together."""
    cdef epcy_shape s
    experts, hidden, dtype = options["num_experts"], options["hidden"], options["dtype"]
    if experts % num_ranks:
        raise ArgumentError(f"num_experts: expected a multiple of the number of ranks ({num_ranks}), got {experts}")
    row_bytes = hidden * ITEM_BYTES[dtype]
    if row_bytes % 16:
        raise ArgumentError(f"hidden: expected rows of a multiple of 16 bytes, got {hidden} elements of {dtype} = "
                            f"{row_bytes} bytes; pad the hidden size to a multiple of {16 // ITEM_BYTES[dtype]}")
    s.num_ranks, s.num_experts, s.num_topk = num_ranks, experts, options["num_topk"]
    s.num_max_tokens, s.hidden, s.row_bytes = options["num_max_tokens_per_rank"], hidden, row_bytes
    rows = options["num_max_recv_tokens"] or max(1, epcy_default_num_rows(&s))
    if rows * (row_bytes + 12 * s.num_topk) > 2**46:
        raise ArgumentError(f"num_max_recv_tokens: {rows} rows of {row_bytes} bytes are more than an address space holds; "
                            "give a smaller num_max_recv_tokens or num_max_tokens_per_rank")
    return {"num_ranks": num_ranks, "num_experts": experts, "num_topk": options["num_topk"], "hidden": hidden,
            "num_max_tokens": options["num_max_tokens_per_rank"], "row_bytes": row_bytes, "num_rows": rows}


cdef class Buffer:
    """Move tokens to their experts and back between the ranks of an MPI communicator.

    Collective, blocking. Every rank of `comm` constructs it with the same options; expert e lives on rank
    e // (num_experts / R).

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks (duplicated here); default COMM_WORLD.
    num_max_tokens_per_rank : int
        M, the most tokens that one rank dispatches in a call.
    hidden : int
        H, elements of a token.
    num_experts : int
        E over all ranks; a multiple of R.
    num_topk : int
        K, lanes of a token.
    **options
        See docs/options.md; each also has an `EPCY_*` variable.

    Attributes
    ----------
    rank, size : int
    comm : mpi4py.MPI.Intracomm
        The Buffer's own copy of the communicator.
    backend : str
    xp : module
        The array module of the results: numpy, or cupy on the nvshmem backend.
    num_local_experts : int
        L = E / R.
    topology : epcy.topology.Topology
    options : dict
        Every option's value.

    Raises
    ------
    ArgumentError, MismatchError, PeerError, PeerTimeoutError, HeapError, BackendUnavailableError, NotSupportedError
    """

    def __init__(self, comm=None, *, num_max_tokens_per_rank=None, hidden=None, num_experts=None, num_topk=None,
                 dtype=None, **options):
        if self._shape is not None:
            raise StateError("Buffer: __init__ was called twice")
        given = dict(num_max_tokens_per_rank=num_max_tokens_per_rank, hidden=hidden, num_experts=num_experts,
                     num_topk=num_topk, dtype=dtype, **options)
        if comm is None:
            from mpi4py import MPI
            comm = MPI.COMM_WORLD
        bootstrap.check(comm)
        values, shape, error, found = {}, None, None, (None, None, None)
        try:
            values = {name: value.value for name, value in resolve(given).items()}
            shape = shape_of(values, comm.Get_size())
            found = backends.find(values["backend"])
        except EpcyError as caught:
            error = caught
        timeout = values.get("timeout", DEF_TIMEOUT)
        self.comm = bootstrap.duplicate(comm, timeout)
        self.rank, self.size, self._pid = self.comm.rank, self.comm.size, getpid()
        try:
            self.construct(values, shape, error, found, timeout)
        except EpcyError as refused:
            if not isinstance(refused, PeerTimeoutError):       # then every rank raises: the copy can go
                self.comm.Free()
            raise
        if values["preinitialize"]:
            self.warmup()

    def construct(self, dict values, dict shape, error, found, timeout):
        """Agree with the other ranks and make the backend; what fails here fails on every rank."""
        identities = bootstrap.agree(self.comm, self.compared(values), error, timeout)
        self.topology = topology.discover(self.comm)
        if self.topology.num_nodes > 1:
            raise NotSupportedError(
                f"comm: backend 'host' works inside one machine, the ranks lie on {self.topology.num_nodes} "
                f"({', '.join(self.topology.hostnames)}); use a sub-communicator of Split_type(COMM_TYPE_SHARED)")
        self.backend, backend_class, self.xp = found
        values["backend"] = self.backend
        values["num_max_recv_tokens"] = shape["num_rows"]
        values["num_sms"] = values["num_sms"] or 1
        if values["spin_us"] is None:
            values["spin_us"] = 50.0 if self.size <= len(os.sched_getaffinity(0)) else 2.0
        self.options, self._shape, self._token = values, shape, object()
        self._num_max_tokens, self._hidden = shape["num_max_tokens"], shape["hidden"]
        self._num_experts, self._num_topk = shape["num_experts"], shape["num_topk"]
        self.num_local_experts = self._num_experts // self.size
        self._backend = backend_class(self.comm, shape, values, identities, self._token)

    @staticmethod
    def compared(values):
        """The options on which the ranks must agree."""
        from epcy.options import OPTIONS
        return {option.name: values.get(option.name) for option in OPTIONS if option.compared}

    @staticmethod
    def size_hint(num_ranks, *, num_max_tokens_per_rank, hidden, num_experts, num_topk, dtype="bfloat16",
                  num_max_recv_tokens=None):
        """Tell how much symmetric memory a rank's Buffer would take, without allocating.

        Local, blocking.

        Returns
        -------
        dict of str to int
            Bytes a rank: "control", "receive" (two areas), "combine" (two areas) and their "total".
        """
        if not isinstance(num_ranks, int) or num_ranks < 1:
            raise ArgumentError(f"num_ranks: expected a positive whole number, got {num_ranks!r}")
        given = dict(num_max_tokens_per_rank=num_max_tokens_per_rank, hidden=hidden, num_experts=num_experts,
                     num_topk=num_topk, dtype=dtype, num_max_recv_tokens=num_max_recv_tokens)
        return heap_layout(shape_of({name: value.value for name, value in resolve(given).items()}, num_ranks))

    @property
    def num_sms(self):
        """How much of the machine a call uses: threads a rank on the host backend."""
        return self.options["num_sms"]

    # ---- the calls ------------------------------------------------------------------------------------------

    def dispatch(self, x, topk_idx=None, topk_weights=None, *, handle=None, layout=None, expert_alignment=None,
                 num_worst_tokens=0, previous_event=None, async_finish=False, stream=None, out=None):
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
        num_worst_tokens : int
            N > 0: results of N rows whatever comes; rows past the count have recv_topk_idx -1; what goes wrong is
            raised by `handle.check()`, `check()` or the next call that waits.
        previous_event, async_finish, stream
            Order with other work; nothing to order on the host backend.
        out : True, array (>= N, H), or a pair of arrays
            Give the result in the user's own arrays instead of views into the Buffer.

        Returns
        -------
        Dispatch

        Raises
        ------
        ArgumentError, CapacityError, MismatchError, PeerError, PeerTimeoutError, StateError
        """
        self.enter("dispatch")
        try:
            try:
                self.check_order(previous_event, stream)
                call = self.check_dispatch(x, topk_idx, topk_weights, handle, layout, expert_alignment, num_worst_tokens,
                                           out)
            except BaseException as error:
                self._backend.refuse(OP_DISPATCH, str(error) or type(error).__name__)
                raise
            return self._backend.dispatch(call)
        finally:
            self._busy = False

    def combine(self, x, handle, topk_weights=None, *, bias=None, previous_event=None, async_finish=False, stream=None,
                out=None):
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
        out : array (T, H)

        Returns
        -------
        Combine
            Sums in float32 in rank order, rounded once (docs/numerics.md).

        Raises
        ------
        ArgumentError, MismatchError, PeerError, PeerTimeoutError, StateError
        """
        self.enter("combine")
        try:
            try:
                self.check_order(previous_event, stream)
                call = self.check_combine(x, handle, topk_weights, bias, out)
                self._backend.prepare_combine(call)
            except BaseException as error:
                self._backend.refuse(OP_COMBINE, str(error) or type(error).__name__)
                raise
            return self._backend.combine(call)
        finally:
            self._busy = False

    def combine_input(self, handle, dtype=None):
        """Get memory for the experts' output, so that combine copies nothing.

        Local, does not block. The array is taken until the combine that gets it; two may be out at a time.

        Returns
        -------
        array (N, H) of `dtype` (default: the Buffer's)

        Raises
        ------
        ArgumentError, StateError
        """
        self.enter("combine_input")
        try:
            checked = self.check_handle(handle)
            try:
                kind = {v: k for k, v in DTYPES.items() if k <= KIND_FP32}.get(np.dtype(
                    DTYPES[("bfloat16", "float16", "float32").index(self.options["dtype"])] if dtype is None else dtype))
            except TypeError:
                kind = None
            if kind is None or not self._backend.dtype_fits(kind):
                raise self.wrong("dtype", f"bfloat16, float16 or float32, no wider than the Buffer's "
                                 f"({self.options['dtype']})", repr(dtype))
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
        """
        self.enter("get_dispatch_layout")
        try:
            lanes = self.check_lanes(topk_idx, "topk_idx", -1, True)
            idx = np.asarray(lanes.owner)
            bad = (idx < -1) | (idx >= self._num_experts)
            if bad.any():
                token, lane = np.argwhere(bad)[0].tolist()
                raise self.wrong(f"topk_idx[{token}, {lane}]", f"an expert id in 0..{self._num_experts - 1} or -1",
                                 int(idx[token, lane]))
            token, lane = np.nonzero(idx >= 0)
            experts = idx[token, lane]
            in_rank = np.zeros((idx.shape[0], self.size), np.bool_)
            in_rank[token, experts // self.num_local_experts] = True
            nodes = np.asarray(self.topology.node_of_rank)
            in_node = np.stack([in_rank[:, nodes == node].any(1) for node in range(self.topology.num_nodes)], 1)
            return (in_rank.sum(0, dtype=np.int64), in_node.sum(0, dtype=np.int64),
                    np.bincount(experts, minlength=self._num_experts).astype(np.int64), in_rank)
        finally:
            self._busy = False

    def barrier(self):
        """Wait until every rank has called this.

        Collective, blocking.
        """
        self.enter("barrier")
        try:
            self._backend.barrier()
        finally:
            self._busy = False

    def check(self):
        """Raise what went wrong in an earlier call that did not wait.

        Local, blocking. Each error is raised once.

        Raises
        ------
        ArgumentError, CapacityError, PeerError
        """
        self.enter("check")
        self._busy = False
        error = self._backend.take_deferred()
        if error is not None:
            raise error

    def capture(self):
        """Mark this point of the current stream.

        Local, does not block.

        Returns
        -------
        Event
        """
        return completed()

    def warmup(self):
        """Make the next call cost what any call costs: touch the memory and every kernel.

        Collective, blocking. It dispatches twice: results of earlier dispatches are given up.
        """
        cdef int64_t rows = min(self._shape["num_rows"], self.size * self._num_max_tokens)
        self.enter("warmup")
        self._busy = False
        self._backend.touch(rows)
        dtype = DTYPES[("bfloat16", "float16", "float32").index(self.options["dtype"])]
        x, idx = np.zeros((0, self._hidden), dtype), np.zeros((0, self._num_topk), np.int64)
        for layout in ("rank", "expert"):
            r = self.dispatch(x, idx, layout=layout)
            self.combine(r.recv_x, r.handle)
        self.barrier()

    # ---- life -----------------------------------------------------------------------------------------------

    def reset(self):
        """Make a broken Buffer usable again: after a PeerTimeoutError or an interrupted call.

        Collective, blocking; every rank must call it. Earlier results are given up.

        Raises
        ------
        PeerTimeoutError
            Not every rank came within `timeout`; it may be called again.
        """
        self.enter("reset")
        try:
            self._backend.reset()
        finally:
            self._busy = False

    def free(self):
        """Give the memory back; arrays that look into the Buffer die with it.

        Collective, blocking; the same order of Buffers on every rank. Calling it again does nothing. A broken Buffer
        only leaves: its memory goes when the process ends.
        """
        self.leave(True)

    def leave(self, bint together):
        if self._freed or self._backend is None:
            self._freed = True
            return
        if self._pid != getpid():
            raise StateError(f"free: this Buffer belongs to process {self._pid}; a fork cannot use it")
        if self._busy:
            raise StateError(f"free: another thread is in a call of this Buffer (rank {self.rank})")
        from mpi4py import MPI

        self._freed = True
        backend = self._backend
        backend.close(together and not backend.broken and not MPI.Is_finalized())
        self._backend = None

    def __enter__(self):
        self.enter("__enter__")
        self._busy = False
        return self

    def __exit__(self, kind, value, traceback):
        # With an exception the other ranks may be anywhere: nothing collective.
        self.leave(kind is None)

    def __del__(self):
        if not self._freed and self._backend is not None and self._pid == getpid():
            warnings.warn(f"{self!r} was never freed; call free() on all ranks or use `with`", ResourceWarning, 2, self)

    def __bool__(self):
        return not self._freed and self._backend is not None and not self._backend.broken

    def __repr__(self):
        state = "freed" if self._freed else "broken" if self._backend is not None and self._backend.broken else "alive"
        return (f"<epcy.Buffer: rank {self.rank} of {self.size}, backend {self.backend}, {self._num_experts} experts, "
                f"hidden {self._hidden}, {state}>")

    def __reduce__(self):
        raise NotSupportedError("a Buffer cannot be pickled or copied: it belongs to this process; "
                                "construct one on every rank")

    # ---- checks ---------------------------------------------------------------------------------------------

    cdef int enter(self, str name) except -1:
        """Refuse a call that the Buffer's state does not allow; mark it busy."""
        if self._freed or self._backend is None:
            raise StateError(f"{name}: this Buffer was freed (rank {self.rank}); construct a new one")
        if self._pid != getpid():
            raise StateError(f"{name}: this Buffer belongs to process {self._pid}, a fork cannot use it; "
                             "construct one after the fork")
        if self._busy:
            raise StateError(f"{name}: another thread is in a call of this Buffer (rank {self.rank}); "
                             "give each thread its own Buffer")
        if self._backend.broken and name != "reset":
            raise StateError(f"{name}: an earlier call on this Buffer did not end (rank {self.rank}); "
                             "call reset() on all ranks first")
        if mpi_finalized():
            raise StateError(f"{name}: MPI was finalized, and the Buffer's memory went with it (rank {self.rank})")
        self._busy = True
        return 0

    cdef object wrong(self, str name, str expected, seen, str remedy=""):
        return ArgumentError(f"{name}: expected {expected}, got {seen} (rank {self.rank})"
                             + (f"; {remedy}" if remedy else ""))

    cdef int64_t check_number(self, value, str name, int64_t least) except -1:
        try:
            number = value.__index__()
        except AttributeError:
            raise self.wrong(name, "a whole number", repr(value)) from None
        if not least <= number <= self._shape["num_rows"]:
            raise self.wrong(name, f"a whole number from {least} to the rows of a receive area "
                             f"(num_max_recv_tokens={self._shape['num_rows']})", number)
        return number

    cdef int check_order(self, previous_event, stream) except -1:
        if stream is not None:
            raise self.wrong("stream", "None: backend 'host' has no streams", repr(stream))
        if previous_event is not None and not isinstance(previous_event, Event):
            raise self.wrong("previous_event", "an epcy.Event or None", repr(previous_event))
        return 0

    cdef Handle check_handle(self, handle):
        if not isinstance(handle, Handle):
            raise self.wrong("handle", "the handle of a dispatch", type(handle).__name__)
        if (<Handle>handle).buffer_token is not self._token:
            raise self.wrong("handle", "a handle of this Buffer", "one of another Buffer")
        return handle

    cdef Array look(self, obj, str name):
        try:
            return describe(obj, name)
        except EpcyError as error:
            raise type(error)(f"{error} (rank {self.rank})") from None

    cdef Array check_rows(self, obj, str name, int64_t num_rows, int kind):
        """A payload array (T, H); num_rows -1: any; kind -1: any payload."""
        cdef Array a = self.look(obj, name)
        if a.ndim != 2 or a.shape[1] != self._hidden or num_rows >= 0 and a.shape[0] != num_rows:
            rows = "T" if num_rows < 0 else num_rows
            raise self.wrong(name, f"shape ({rows}, {self._hidden})", f"shape {a.owner.shape}")
        if kind >= 0 and a.kind != kind:
            raise self.wrong(name, f"dtype {DTYPES[kind]}", f"dtype {a.owner.dtype}")
        if not 0 <= a.kind <= KIND_FP32 and kind != KIND_FP8:
            raise self.wrong(name, "bfloat16, float16 or float32, or for dispatch a pair (float8_e4m3fn, scales)",
                             f"dtype {a.owner.dtype}")
        if a.shape[1] * a.item_bytes() > <int64_t>self._shape["row_bytes"]:
            raise self.wrong(name, f"dtype no wider than the Buffer's {self.options['dtype']}", f"dtype {a.owner.dtype}",
                             f"construct the Buffer with dtype={str(a.owner.dtype)!r}")
        if a.shape[1] * a.item_bytes() % 16:
            raise self.wrong(name, "rows of a multiple of 16 bytes", f"{a.shape[1] * a.item_bytes()} bytes")
        return with_rows(a)

    cdef Array check_lanes(self, obj, str name, int64_t num_rows, bint is_idx):
        """topk_idx or topk_weights (T, K)."""
        cdef Array a = self.look(obj, name)
        if a.ndim != 2 or a.shape[1] != self._num_topk or num_rows >= 0 and a.shape[0] != num_rows:
            rows = "T" if num_rows < 0 else num_rows
            raise self.wrong(name, f"shape ({rows}, {self._num_topk})", f"shape {a.owner.shape}")
        if is_idx and a.kind != KIND_INT64 and a.kind != KIND_INT32:
            raise self.wrong(name, "dtype int64 or int32", f"dtype {a.owner.dtype}")
        if not is_idx and a.kind != KIND_FP32:
            raise self.wrong(name, "dtype float32", f"dtype {a.owner.dtype}")
        return contiguous(a)

    cdef DispatchCall check_dispatch(self, x, topk_idx, topk_weights, handle, layout, expert_alignment,
                                     num_worst_tokens, out):
        cdef DispatchCall call = DispatchCall.__new__(DispatchCall)
        cdef int64_t num_tokens
        if isinstance(x, (tuple, list)):
            if len(x) != 2:
                raise self.wrong("x", "an array or a pair (payload, scales)", f"{len(x)} items")
            call.x = self.check_rows(x[0], "x[0]", -1, KIND_FP8)
            call.scales = contiguous(self.look(x[1], "x[1]"))
            scales = (call.x.shape[0], epcy_num_scales(self._hidden))
            if call.scales.owner.shape != scales or call.scales.kind != KIND_FP32:
                raise self.wrong("x[1]", f"scales of shape {scales} and dtype float32",
                                 f"shape {call.scales.owner.shape}, dtype {call.scales.owner.dtype}")
        else:
            call.x = self.check_rows(x, "x", -1, -1)
        num_tokens = call.x.shape[0]
        if num_tokens > self._num_max_tokens:
            raise CapacityError(f"x: {num_tokens} tokens on rank {self.rank}, the Buffer has room for "
                                f"num_max_tokens_per_rank={self._num_max_tokens}; send fewer, or construct it with more")
        if handle is not None:
            call.handle = self.check_handle(handle)
            if topk_idx is not None:
                raise self.wrong("topk_idx", "None with handle= (the handle holds the routing)", "an array")
            if num_tokens != call.handle.num_tokens:
                raise self.wrong("x", f"the handle's {call.handle.num_tokens} tokens", f"{num_tokens}")
            for name, value, known in (("layout", layout, call.handle.layout),
                                       ("expert_alignment", expert_alignment, call.handle.expert_alignment),
                                       ("num_worst_tokens", num_worst_tokens or None, call.handle.num_worst_tokens)):
                if value is not None and value != known:
                    raise self.wrong(name, f"the handle's {known!r}, or nothing", repr(value))
            call.layout, call.expert_alignment = call.handle.layout, call.handle.expert_alignment
            call.num_worst_tokens = call.handle.num_worst_tokens
        else:
            if topk_idx is None:
                raise self.wrong("topk_idx", f"an array ({num_tokens}, {self._num_topk}), or handle=", "None")
            call.topk_idx = self.check_lanes(topk_idx, "topk_idx", num_tokens, True)
            if layout is not None and layout != "rank" and layout != "expert":
                raise self.wrong("layout", "'rank' or 'expert'", repr(layout))
            call.layout = "rank" if layout is None else layout
            call.expert_alignment = 1 if expert_alignment is None else self.check_number(
                expert_alignment, "expert_alignment", 1)
            if call.layout == "rank" and call.expert_alignment != 1:
                raise self.wrong("expert_alignment", "1 in the rank layout", f"{call.expert_alignment}",
                                 "use layout='expert'")
            call.num_worst_tokens = self.check_number(num_worst_tokens, "num_worst_tokens", 0)
        if topk_weights is not None:
            call.topk_weights = self.check_lanes(topk_weights, "topk_weights", num_tokens, False)
        if out is not None:
            self.check_dispatch_out(out, call)
            call.out = out
        if call.num_worst_tokens == 0:
            error = self._backend.take_deferred()
            if error is not None:
                raise error
        return call

    cdef int check_dispatch_out(self, out, DispatchCall call) except -1:
        cdef Array a
        if out is True:
            return 0
        pair = isinstance(out, (tuple, list))
        if pair != (call.scales is not None) or pair and len(out) != 2:
            raise self.wrong("out", "True, or an array (a pair of arrays where x is a pair)", type(out).__name__)
        for i, array in enumerate(out if pair else (out,)):
            name, width = (f"out[{i}]" if pair else "out"), (epcy_num_scales(self._hidden) if i else self._hidden)
            if not isinstance(array, np.ndarray):
                raise self.wrong(name, "a NumPy array", type(array).__name__)
            a = describe(array, name)
            if a.ndim != 2 or a.shape[1] != width or a.kind != (call.scales.kind if i else call.x.kind) or not a.is_writable:
                raise self.wrong(name, f"a writable array (>= N, {width}) of x's dtype",
                                 f"shape {array.shape}, dtype {array.dtype}")
        return 0

    cdef CombineCall check_combine(self, x, handle, topk_weights, bias, out):
        cdef CombineCall call = CombineCall.__new__(CombineCall)
        cdef Handle checked = self.check_handle(handle)
        cdef int64_t num_tokens = checked.num_tokens
        cdef bint rank_layout = checked.layout == "rank"
        call.handle = checked
        if isinstance(x, (tuple, list)):
            raise self.wrong("x", "an array of bfloat16, float16 or float32", type(x).__name__,
                             "fp8 pairs are for dispatch")
        call.x = self.check_rows(x, "x", checked.num_rows, -1)
        if topk_weights is not None:
            call.topk_weights = self.check_lanes(topk_weights, "topk_weights",
                                                 checked.num_rows if rank_layout else num_tokens, False)
            if rank_layout:
                call.out_weights = describe(np.empty((num_tokens, self._num_topk), np.float32), "")
        if bias is not None:
            biases = bias if isinstance(bias, (tuple, list)) else (bias,)
            if not 1 <= len(biases) <= 2:
                raise self.wrong("bias", "an array or a pair of arrays", f"{len(biases)} items")
            call.bias0 = contiguous(self.check_rows(biases[0], "bias", num_tokens, call.x.kind))
            if len(biases) == 2:
                call.bias1 = contiguous(self.check_rows(biases[1], "bias[1]", num_tokens, call.x.kind))
        if out is None:
            out = np.empty((num_tokens, self._hidden), DTYPES[call.x.kind])
        elif not isinstance(out, np.ndarray):
            raise self.wrong("out", "a NumPy array", type(out).__name__)
        call.out = self.check_rows(out, "out", num_tokens, call.x.kind)
        if call.out.owner is not out or not call.out.is_writable or not call.out.is_contiguous:
            raise self.wrong("out", "a writable C-contiguous array", "one that is not")
        return call


cdef object _is_finalized = None


cdef bint mpi_finalized():
    global _is_finalized
    if _is_finalized is None:
        from mpi4py import MPI
        _is_finalized = MPI.Is_finalized
    return _is_finalized()
