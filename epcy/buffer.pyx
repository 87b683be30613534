# cython: boundscheck=False, wraparound=False
"""Buffer: keeps the ranks in step, and makes one call into the backend per operation."""

import warnings
from contextlib import nullcontext

from libc.stdint cimport int64_t
from posix.unistd cimport getpid

import numpy as np

from epcy.backends.call cimport CombineCall, DispatchCall
from epcy.layout cimport epcy_default_num_rows, epcy_num_scales, epcy_shape
from epcy.low_latency cimport LowLatencyCalls
from epcy.low_latency_checks cimport LowLatencyChecker
from epcy.observers cimport close_range, is_recorded, open_range, recorded

from epcy import backends, model, startup, topology
from epcy.arrays import DTYPES
from epcy.backends import bootstrap, cuda_sizes
from epcy.backends.host_heap import heap_layout
from epcy.errors import (
    ArgumentError, EpcyError, HeapError, NotSupportedError, PeerTimeoutError, StateError)
from epcy.faults import parse as parse_faults
from epcy.options import BY_NAME, OPTIONS, resolve
from epcy.options import DTYPES as DTYPE_NAMES
from epcy.status import OPERATIONS
from epcy.tune import lookup as tuned

OP_DISPATCH, OP_COMBINE = OPERATIONS.index("dispatch"), OPERATIONS.index("combine")
OP_BARRIER = OPERATIONS.index("barrier")


def shape_of(dict options, int64_t num_ranks):
    """The numbers that fix a Buffer's memory; ArgumentError where they do not go together."""
    cdef epcy_shape s
    experts, hidden, dtype = options["num_experts"], options["hidden"], options["dtype"]
    if experts % num_ranks:
        raise ArgumentError(f"num_experts: expected a multiple of the number of ranks ({num_ranks}), got {experts}")
    item_bytes = DTYPES[DTYPE_NAMES.index(dtype)].itemsize
    row_bytes = hidden * item_bytes
    if row_bytes % 16:
        raise ArgumentError(f"hidden: expected rows of a multiple of 16 bytes, got {hidden} elements of {dtype} = "
                            f"{row_bytes} bytes; pad the hidden size to a multiple of {16 // item_bytes}")
    s.num_ranks, s.num_experts, s.num_topk = num_ranks, experts, options["num_topk"]
    s.num_max_tokens, s.hidden, s.row_bytes = options["num_max_tokens_per_rank"], hidden, row_bytes
    low_latency = 0
    if options["low_latency_mode"]:
        low_latency = options["num_max_low_latency_tokens_per_rank"] or max(1, min(s.num_max_tokens, 256))
        rows = experts * low_latency
        if rows * row_bytes > 2**46:
            raise ArgumentError(f"num_max_low_latency_tokens_per_rank: {rows} rows of {row_bytes} bytes are more than "
                                "an address space holds; give a smaller one")
        if low_latency * options["num_topk"] > 2**31 - 1:
            raise ArgumentError(f"num_max_low_latency_tokens_per_rank: {low_latency} tokens of {options['num_topk']} "
                                f"lanes are more than {2**31 - 1} lanes; give a smaller one")
    rows = options["num_max_recv_tokens"] or max(1, epcy_default_num_rows(&s))
    if rows * (row_bytes + 12 * s.num_topk) > 2**46:
        raise ArgumentError(f"num_max_recv_tokens: {rows} rows of {row_bytes} bytes are more than an address space "
                            "holds; give a smaller num_max_recv_tokens or num_max_tokens_per_rank")
    return {"num_ranks": num_ranks, "num_experts": experts, "num_topk": options["num_topk"], "hidden": hidden,
            "num_max_tokens": options["num_max_tokens_per_rank"], "row_bytes": row_bytes, "num_rows": rows,
            "num_low_latency_tokens": low_latency}


cdef class Buffer(LowLatencyCalls):
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
        Which ranks share a node.
    options : dict
        Every option's value, computed defaults filled in.

    Raises
    ------
    ArgumentError, MismatchError, PeerError, PeerTimeoutError, HeapError, BackendUnavailableError, NotSupportedError
        See docs/errors.md. A constructor that raises on one rank raises on all of them, but for a `comm` that
        is none and for a rank that never comes.

    Notes
    -----
    `with` frees the Buffer at its end (when an exception leaves it, without waiting for the others). `bool(buf)` tells
    whether calls are possible: not freed, not broken. A Buffer is for one thread at a time, and is neither pickled nor
    used after a fork.
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
        values, shape, error, known, found = {}, None, None, {}, (None, None, None)
        try:
            values = {name: value.value for name, value in resolve(given).items()}
            shape = shape_of(values, comm.Get_size())
            parse_faults(values["faults"] or "")
            found = backends.find(values["backend"])
            values["backend"] = found[0]
            startup.check(found[0], values)
            for name, best in tuned(found[0], comm.Get_size(), values).items():
                values[name] = best
            if values["num_sms"] is None:
                known = model.all_stored(found[0], comm.Get_size(), 1)
        except EpcyError as caught:
            error = caught
        timeout = values.get("timeout", BY_NAME["timeout"].default)
        self.comm = bootstrap.duplicate(comm, timeout)
        self.rank, self.size, self._pid = self.comm.rank, self.comm.size, getpid()
        try:
            self._construct(values, shape, error, found, timeout)
        except EpcyError as refused:
            if not isinstance(refused, PeerTimeoutError):       # then every rank raises: the copy can go
                self.comm.Free()
            raise
        if self._num_sms is None:
            self._make_plan(known)
        if values["preinitialize"]:
            self.warmup()

    def _construct(self, dict values, dict shape, error, found, timeout):
        """Agree with the other ranks and make the backend; what fails here fails on every rank."""
        identities = bootstrap.agree(self.comm, self._compared(values), error, timeout)
        self.topology = topology.discover(self.comm, values["num_max_nvl_peers"])
        if self.topology.num_machines > 1:
            raise NotSupportedError(
                f"comm: backend {found[0]!r} works inside one machine, the ranks lie on {self.topology.num_machines} "
                f"({', '.join(dict.fromkeys(self.topology.hostnames))}); use a sub-communicator of "
                "Split_type(COMM_TYPE_SHARED)")
        if self.topology.num_nodes > 1 and found[0] == "nvshmem":
            raise NotSupportedError(
                f"num_max_nvl_peers: {values['num_max_nvl_peers']} makes {self.topology.num_nodes} nodes of the "
                f"{self.size} ranks, and this build has no path between nodes on GPUs; leave it out, or use "
                "backend='host'")
        startup.settle(found[0], values)
        self.backend, backend_class, self.xp = found
        values["num_max_recv_tokens"] = shape["num_rows"]
        values["num_max_low_latency_tokens_per_rank"] = shape["num_low_latency_tokens"] or None
        if values["spin_us"] is None:
            values["spin_us"] = 2.0 if self.topology.is_oversubscribed else 50.0
        self.options, self._shape, self._token, self._num_sms = values, shape, object(), values["num_sms"]
        self._num_max_tokens, self._hidden = shape["num_max_tokens"], shape["hidden"]
        self._num_experts, self._num_topk = shape["num_experts"], shape["num_topk"]
        self.num_local_experts = self._num_experts // self.size
        self._backend = backend_class(self.comm, shape, values, identities, self._token)
        self._checker = LowLatencyChecker(self._backend, shape, values)

    @staticmethod
    def _compared(values):
        """The options on which the ranks must agree."""
        return {option.name: values.get(option.name) for option in OPTIONS if option.compared}

    @staticmethod
    def size_hint(num_ranks, *, num_max_tokens_per_rank, hidden, num_experts, num_topk, dtype="bfloat16",
                  num_max_recv_tokens=None, low_latency_mode=None, num_max_low_latency_tokens_per_rank=None,
                  backend=None):
        """Tell how much symmetric memory a rank's Buffer would take, without allocating.

        Local, blocking. It loads neither MPI nor CUDA.

        Parameters
        ----------
        num_ranks : int
        num_max_tokens_per_rank, hidden, num_experts, num_topk, and the other sizes
            As the constructor takes them.
        backend : "host" or "nvshmem", optional
            Whose memory; by default that of `EPCY_BACKEND`, else the host's.

        Returns
        -------
        dict of str to int
            Bytes a rank: "control", "receive" (two areas), "combine" (two areas), "low_latency" (four areas and what
            rows travel through; 0 without the mode) and their "total".

        Raises
        ------
        ArgumentError
            A value out of bounds, or sizes that do not go together; as the constructor would.
        """
        if not isinstance(num_ranks, int) or num_ranks < 1:
            raise ArgumentError(f"num_ranks: expected a positive whole number, got {num_ranks!r}")
        given = dict(num_max_tokens_per_rank=num_max_tokens_per_rank, hidden=hidden, num_experts=num_experts,
                     num_topk=num_topk, dtype=dtype, num_max_recv_tokens=num_max_recv_tokens,
                     low_latency_mode=low_latency_mode, backend=backend,
                     num_max_low_latency_tokens_per_rank=num_max_low_latency_tokens_per_rank)
        values = {name: value.value for name, value in resolve(given).items()}
        sizes = shape_of(values, num_ranks)
        return cuda_sizes.heap_layout(sizes) if values["backend"] == "nvshmem" else heap_layout(sizes)

    @property
    def num_sms(self):
        """How much of the machine a call uses where it is not said: threads a rank on the host backend."""
        return self.options["num_sms"]

    def set_num_sms(self, num_sms):
        """Use another part of the machine for the calls that follow.

        Local: ranks may differ. The bits of the results do not depend on it. See docs/tuning.md for when to give
        multiprocessors back to computation.

        Parameters
        ----------
        num_sms : int or None
            Threads a rank on the host backend, multiprocessors on nvshmem; 1 to 1024. None: what the model says of each
            call's size, where `python -m epcy calibrate` has measured this machine, else the backend's own choice.

        Raises
        ------
        ArgumentError, HeapError, StateError
        """
        self.enter("set_num_sms")
        try:
            if num_sms is None:
                known = model.all_stored(self.backend, self.size, self.topology.num_nodes)
                self._use_usual_sms()
                self._make_plan(known)
            else:
                self._use_sms(num_sms)
                self.options["num_sms"] = self._num_sms = int(num_sms)
                self._plan = None
        finally:
            self._busy = False

    def _use_sms(self, num_sms):
        resolved = resolve({"num_max_tokens_per_rank": 0, "hidden": 1, "num_experts": 1, "num_topk": 1,
                            "num_sms": num_sms}, {})
        self._backend.use_sms(resolved["num_sms"].value)

    cdef object _make_plan(self, dict found):
        """Work out the SMs of each call from what was measured of this machine: never while calls run."""
        subjects = {model.subject_of(op, layout): (op, layout) for op in ("dispatch", "combine")
                    for layout in ("rank", "expert")}
        found = {subject: constants for subject, constants in found.items() if subject in subjects}
        most = {subject: self._most_sms(*subjects[subject]) for subject in found}
        usual = {subject: self._backend.num_blocks(*subjects[subject]) for subject in found}
        row_bytes = self._shape["row_bytes"]
        plan = model.Plan(found, lambda subject, num_tokens: model.load_of(
            subject, num_tokens, self.size, self._num_experts, self._num_topk, row_bytes), most, self._num_max_tokens)
        self._plan = None
        if not plan.says_only(usual):
            try:
                self._backend.use_sms(plan.most)        # threads are started here, and not by a call
                self._plan = plan
            except HeapError:                           # this rank has none to give: its calls take what they took
                pass
            self._backend.use_sms(None)

    cdef object _planned(self, str op, str layout, int64_t num_tokens):
        """Let the call that follows take what the plan says; None where that is what it would take anyway."""
        num_sms = self._plan.num_sms(f"{op} expert" if layout == "expert" else op, num_tokens)
        if num_sms is not None:
            self._backend.use_sms(num_sms)
        return num_sms

    def explain(self, op, num_tokens, *, dtype=None, layout="rank", num_sms=None):
        """Tell what a call moves and how long it should take, by term, and how long such calls took.

        Local. The prediction needs constants of this machine and topology: `mpiexec -n R python -m epcy calibrate`.
        Routing is taken for random; what was measured is of all calls of the operation, of either layout.

        Parameters
        ----------
        op : "dispatch", "combine", "low_latency_dispatch" or "low_latency_combine"
        num_tokens : int
            T of every rank.
        dtype : "bfloat16", "float16", "float32" or "fp8", optional
            Of the rows; default the Buffer's. "fp8" of low_latency_dispatch is its `use_fp8`, the cast included.
        layout : "rank" or "expert"
            Of dispatch and combine.
        num_sms : int, optional
            What the call has; default what it would get.

        Returns
        -------
        epcy.model.Explanation

        Raises
        ------
        ArgumentError
            A wrong argument, or a calibration that cannot be read.
        StateError
        """
        self.enter("explain")
        self._busy = False
        if op not in model.OPERATIONS:
            raise ArgumentError(f"op: expected one of {', '.join(model.OPERATIONS)}, got {op!r} (rank {self.rank})")
        for name, value, least in (("num_tokens", num_tokens, 0), ("num_sms", 1 if num_sms is None else num_sms, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ArgumentError(f"{name}: expected a whole number, at least {least}, got {value!r} "
                                    f"(rank {self.rank})")
        widths = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "fp8": 1 + 4 / 128}
        if dtype is not None and dtype not in widths:
            raise ArgumentError(f"dtype: expected one of {', '.join(widths)}, got {dtype!r} (rank {self.rank})")
        if layout not in ("rank", "expert"):
            raise ArgumentError(f"layout: expected 'rank' or 'expert', got {layout!r} (rank {self.rank})")
        subject, row_bytes = model.subject_of(op, layout), int(self._hidden * widths[dtype or self.options["dtype"]])
        num_cast = num_tokens * self._hidden if dtype == "fp8" and op == "low_latency_dispatch" else 0
        load = model.load_of(subject, num_tokens, self.size, self._num_experts, self._num_topk, row_bytes, num_cast)
        constants = model.stored(subject, self.backend, self.size, self.topology.num_nodes)
        if num_sms is None and op in model.OPERATIONS[:2]:
            num_sms = None if self._plan is None else self._plan.num_sms(subject, num_tokens)
            num_sms = num_sms or self._backend.num_blocks(op, layout)
        kernels, rows = {}, ()
        if self._backend.meter is not None:
            stats = self._backend.meter.read()
            kernels, rows = stats.kernels, stats.tokens_to_rank
        return model.explain(subject, load, constants, num_sms, kernels, rows)

    # ---- the calls ------------------------------------------------------------------------------------------

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
        self.enter("dispatch")
        open_range("dispatch")
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
            self.leave()
            close_range()

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
        self.enter("combine")
        open_range("combine")
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
            self.leave()
            close_range()

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
        self.enter("barrier")
        open_range("barrier")
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
            self.leave()
            close_range()

    def check(self):
        """Raise what went wrong in an earlier call that did not wait.

        Local, blocking. Each error is raised once.

        Raises
        ------
        ArgumentError, CapacityError, PeerError
        """
        self.enter("check")
        self._busy = False
        self._backend.wait_all()
        self._backend.inspect("check")
        self._raise_late()

    def stats(self, *, reset=False):
        """Tell what this rank's Buffer did: memory, tokens, waits, times.

        Local. It waits for nothing on the host backend; on nvshmem it copies a few kilobytes from the GPU. Works on a
        broken Buffer too.

        Parameters
        ----------
        reset : bool
            Count anew from here on. What is returned is of the time before.

        Returns
        -------
        epcy.stats.Stats

        Raises
        ------
        StateError
            The Buffer was freed, or was made with `stats=False`.
        """
        if self._freed or self._backend is None:
            raise StateError(f"stats: this Buffer was freed (rank {self.rank}); ask before free()")
        if self._backend.meter is None:
            raise StateError(f"stats: this Buffer counts nothing (rank {self.rank}); construct it with stats=True")
        found = self._backend.meter.read()
        if reset:
            self._backend.meter.set_back()
        return found

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

    def warmup(self):
        """Make the next call cost what any call costs: every kernel, the memory of handles and results, every page.

        Collective, blocking, of both modes. Results of earlier dispatches are given up. On the host backend pages are
        those of `num_max_recv_tokens` rows, at most those of twice a balanced load.

        Raises
        ------
        MismatchError, PeerError, PeerTimeoutError, StateError
        """
        self.enter("warmup")
        self._busy, self._unrecorded = False, True
        try:
            self._warm()
        finally:
            self._unrecorded = False

    def _warm(self):
        self._backend.touch()
        with nullcontext() if self.xp is np else self.xp.cuda.Device(self.options["device"]):
            x, idx, weights = self.warm_tokens(self._num_max_tokens)
            for layout in ("rank", "expert"):
                r = self.dispatch(x, idx, weights, layout=layout)
                self.combine(r.recv_x, r.handle, r.recv_topk_weights if layout == "rank" else weights)
                self.dispatch(x, handle=r.handle)
            scales = self.xp.ones((len(x), epcy_num_scales(self._hidden)), np.float32)
            self.dispatch((self.xp.zeros(x.shape, np.uint8), scales), idx)
            if self._backend.low_latency is not None:
                x, idx, weights = self.warm_tokens(self._shape["num_low_latency_tokens"])
                self.warm_low_latency(x, idx, weights)
            self.barrier()

    cdef tuple warm_tokens(self, int64_t most):
        """Tokens, ids and weights: as many as a call may have, with one lane each while the areas have room."""
        cdef int64_t num_sent = min(most, self._shape["num_rows"] // self.size)
        xp = self.xp
        idx = np.full((most, self._num_topk), -1, np.int64)
        idx[:num_sent, 0] = (np.arange(num_sent) + self.rank * self.num_local_experts) % self._num_experts
        weights = np.zeros((most, self._num_topk), np.float32)
        x = xp.zeros((most, self._hidden), DTYPES[self._checker.payload_kind(None)])
        return x, xp.asarray(idx), xp.asarray(weights)

    # ---- what epcy.bench alone calls, on the nvshmem backend ---------------------------------------------------

    def _align(self, stream):
        """Let what follows on a stream begin on all ranks at once. Collective, stream-ordered."""
        self.enter("_align")
        try:
            self._backend.align(self._checker.stream_pointer(stream))
        finally:
            self._busy = False

    def _peer_address(self, rank):
        """Where a rank's symmetric memory starts, as this GPU reaches it. Local, does not block."""
        self.enter("_peer_address")
        self._busy = False
        return self._backend.peer_address(rank)

    # ---- what the bench, calibrate and tune call ----------------------------------------------------------------

    def _num_blocks(self, op, layout):
        """How many multiprocessors a dispatch or combine takes. Local, does not block."""
        return self._backend.num_blocks(op, layout)

    def _most_sms(self, op, layout):
        """How many could be of use to one. Local, does not block."""
        cores = min(self.topology.cpus_per_node) // max(self.topology.ranks_per_node)
        return self._backend.most_sms(op, layout, max(1, cores))

    def _use_knobs(self, **values):
        """Take other values of the options that `epcy.tune.KNOBS` names, from now on. Local, does not block."""
        if "num_sms" in values:
            self.set_num_sms(values.pop("num_sms"))
        self.options.update(values)
        self._backend.use_knobs(self.options)

    def _use_usual_sms(self):
        """Let calls take what the backend chooses, whatever was measured. Local, does not block."""
        self._backend.use_sms(None)
        self._num_sms = self._plan = None
        self.options["num_sms"] = max(self._backend.num_blocks(op, "rank") for op in ("dispatch", "combine"))

    # ---- life -----------------------------------------------------------------------------------------------

    def reset(self, timeout=None):
        """Make a broken Buffer usable again: after a PeerTimeoutError or an interrupted call.

        Collective, blocking; every rank that is not masked must call it. Earlier results are given up.

        Parameters
        ----------
        timeout : float, optional
            Seconds that it may wait; by default the Buffer's.

        Raises
        ------
        PeerTimeoutError
            Not every rank came within `timeout`; it may be called again, and goes on where it was.
        """
        self.enter("reset")
        try:
            self.limit(timeout)
            self._backend.reset()
        finally:
            self._busy = False

    def free(self, timeout=None):
        """Give the memory back; arrays that look into the Buffer die with it.

        Collective, blocking; the same order of Buffers on every rank. Calling it again does nothing. A broken Buffer
        only leaves: its memory goes when the process ends. So does one with masked ranks.

        Parameters
        ----------
        timeout : float, optional
            Seconds that it may wait; by default the Buffer's.

        Raises
        ------
        MismatchError, PeerError, PeerTimeoutError
            The other ranks do something else; this rank has left all the same.
        StateError
            Called in a forked process, or while another thread is in a call.
        """
        self._leave(True, timeout)

    def _leave(self, bint together, timeout=None):
        if self._freed or self._backend is None:
            self._freed = True
            return
        if self._pid != getpid():
            raise StateError(f"free: this Buffer belongs to process {self._pid}; a fork cannot use it")
        if self._busy:
            raise StateError(f"free: another thread is in a call of this Buffer (rank {self.rank})")
        from mpi4py import MPI

        backend = self._backend
        backend.set_timeout(backend.default_timeout)
        self.limit(timeout)
        self._freed = True
        backend.close(together and not backend.broken and not backend.num_masked() and not MPI.Is_finalized())
        self._backend = self._checker = None

    def __enter__(self):
        self.enter("__enter__")
        self._busy = False
        return self

    def __exit__(self, kind, value, traceback):
        # With an exception the other ranks may be anywhere: nothing collective.
        self._leave(kind is None)

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

    def _raise_late(self):
        """Raise what went wrong in an earlier call that did not wait; this one is over on all ranks."""
        error = self._backend.take_deferred()
        if error is not None:
            raise error
