# cython: boundscheck=False, wraparound=False
"""Buffer: how it is made, agreed on with the other ranks, warmed up, brought back and freed.

Its calls are in its base classes: high_throughput.pyx, sms.pyx, low_latency.pyx and state.pyx.
"""

import warnings
from contextlib import nullcontext, suppress
from dataclasses import replace

from libc.stdint cimport int64_t
from posix.unistd cimport getpid

import numpy as np

from epcy.layout cimport epcy_num_scales
from epcy.low_latency_checks cimport LowLatencyChecker

from epcy import backends, model, startup, topology
from epcy.arrays import DTYPES
from epcy.backends import bootstrap, cuda_sizes, verdicts
from epcy.backends.host_heap import heap_layout
from epcy.errors import ArgumentError, EpcyError, NotSupportedError, StateError
from epcy.faults import Faults
from epcy.high_throughput import OP_BARRIER
from epcy.options import BY_NAME, OPTIONS, resolve
from epcy.shape import shape_of
from epcy.tune import lookup as tuned


cdef class Buffer(HighThroughputCalls):
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
        values, asked, shape, error, found, faults = {}, {}, None, None, (None, None, None), None
        try:
            values = {name: value.value for name, value in resolve(given).items()}
            shape = shape_of(values, comm.Get_size())
            faults = Faults(values["faults"] or "", comm.Get_rank())
            faults.take("constructor", "arrival")
            found = backends.find(values["backend"])
            values["backend"] = found[0]
            asked = dict(values)    # what a rank found out by measuring may differ
            for name, best in tuned(found[0], comm.Get_size(), values).items():
                values[name] = best
            if values["num_sms"] is None:
                model.all_stored(found[0], comm.Get_size(), 1)      # a file that cannot be read is told here
            faults.take("constructor", "arrival")
        except Exception as caught:
            error = caught
        timeout = values.get("timeout", BY_NAME["timeout"].default)
        self.comm = bootstrap.duplicate(comm, timeout)
        self.rank, self.size, self._pid = self.comm.rank, self.comm.size, getpid()
        try:
            self._construct(values, asked or values, shape, error, found, timeout, faults)
        except BaseException as caught:
            told, all_raise = bootstrap.tell(self.comm, caught, timeout, "Buffer()")
            if self._backend is not None:
                self._backend.abandon(all_raise)
                self._backend = self._checker = None
            if all_raise:
                self.comm.Free()
            if told is caught:
                raise
            raise told from caught
        if values["preinitialize"]:
            try:
                self.warmup()
            except BaseException as caught:
                with suppress(EpcyError):       # the error that ended the warmup is the one to see
                    self._leave(isinstance(caught, Exception))
                raise

    def _construct(self, dict values, dict asked, dict shape, error, found, timeout, faults):
        """Agree with the other ranks and make the backend; what fails here fails on every rank."""
        identities = bootstrap.agree(self.comm, self._compared(asked), error, timeout)
        if found[0] == "nvshmem":       # after the comparison: ranks that differ hear of that
            startup.agree(self.comm, values, timeout)
        self.topology = topology.discover(self.comm, values["num_max_nvl_peers"])
        startup.settle(found[0], values)
        self.backend, backend_class, self.xp = found
        if self.topology.num_nodes > 1:
            backend_class = backends.between_nodes(self.backend, self.topology, values)
        values["path"] = values["path"] or "direct"
        values["num_max_recv_tokens"] = shape["num_rows"]
        values["num_max_low_latency_tokens_per_rank"] = shape["num_low_latency_tokens"] or None
        if values["spin_us"] is None:
            values["spin_us"] = 2.0 if self.topology.is_oversubscribed else 50.0
        self.options, self._shape, self._token, self._num_sms = values, shape, object(), values["num_sms"]
        self._num_max_tokens, self._hidden = shape["num_max_tokens"], shape["hidden"]
        self._num_experts, self._num_topk = shape["num_experts"], shape["num_topk"]
        self.num_local_experts = self._num_experts // self.size
        self._backend = backend_class(self.comm, shape, values, identities, self._token)
        self.topology = replace(self.topology, low_latency_transport=self._backend.low_latency_transport,
                                transport=self._backend.transport)
        self._checker = LowLatencyChecker(self._backend, shape, values)
        faults.take("constructor", "completion")
        if self._num_sms is None:
            self._make_plan(model.all_stored(self.backend, self.size, self.topology.num_nodes))
        faults.take("constructor", "completion")
        bootstrap.exchange(self.comm, None, None, timeout, "Buffer()")

    @staticmethod
    def _compared(values):
        """The options on which the ranks must agree."""
        return {option.name: values.get(option.name) for option in OPTIONS if option.compared}

    @staticmethod
    def size_hint(num_ranks, *, num_max_tokens_per_rank, hidden, num_experts, num_topk, dtype="bfloat16",
                  num_max_recv_tokens=None, low_latency_mode=None, num_max_low_latency_tokens_per_rank=None,
                  allow_nvlink_for_low_latency_mode=None, num_max_nvl_peers=None, path=None,
                  node_chunk_tokens=None, num_node_buffers=None, backend=None):
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
                     allow_nvlink_for_low_latency_mode=allow_nvlink_for_low_latency_mode,
                     num_max_nvl_peers=num_max_nvl_peers, path=path, node_chunk_tokens=node_chunk_tokens,
                     num_node_buffers=num_node_buffers,
                     num_max_low_latency_tokens_per_rank=num_max_low_latency_tokens_per_rank)
        values = {name: value.value for name, value in resolve(given).items()}
        sizes = shape_of(values, num_ranks)
        if values["backend"] != "nvshmem":
            return heap_layout(sizes)
        return cuda_sizes.heap_layout(sizes, cuda_sizes.num_far_ranks(values, num_ranks),
                                      cuda_sizes.nodes_bytes(sizes, values, num_ranks))

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
        with nullcontext() if self.xp is np else self.xp.cuda.Device(self.options["device"]):
            few = quantized = None
            try:        # all that this rank makes by itself, before the first call
                x, idx, weights = self.warm_tokens(self._num_max_tokens)
                if self._hidden % 16 == 0:      # else no call can send such rows
                    scales = self.xp.ones((len(x), epcy_num_scales(self._hidden)), np.float32)
                    quantized = self.xp.zeros(x.shape, np.uint8), scales
                if self._backend.low_latency is not None:
                    few = self.warm_tokens(self._shape["num_low_latency_tokens"])
                if self._backend.faults is not None:
                    self._backend.faults.take("warmup", "arrival")
            except Exception as caught:
                error = verdicts.as_our_own(caught, "warmup")
                self._backend.refuse(OP_BARRIER, str(error) or type(error).__name__)
                raise error from caught
            self._backend.touch()
            for _ in range(1 if self.xp is np else 2):  # once more: there the host's part of a call is what takes long
                self.warm_high_throughput(x, quantized, idx, weights)
                if few is not None:
                    self.warm_low_latency(few[0], few[1], few[2])
            self.barrier()

    cdef int warm_high_throughput(self, x, quantized, idx, weights) except -1:
        """Run every call of the mode once; `quantized`: the rows in fp8 with their scales, or None."""
        for layout in ("rank", "expert"):
            r = self.dispatch(x, idx, weights, layout=layout)
            self.combine(r.recv_x, r.handle, r.recv_topk_weights if layout == "rank" else weights)
            self.dispatch(x, handle=r.handle)
        if quantized is not None:
            self.dispatch(quantized, idx)
        return 0

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

    def _put_rows(self, rank, num_rows, num_blocks, stream):
        """Put rows to a rank of another node by NVSHMEM's own put alone. Local, stream-ordered."""
        self.enter("_put_rows")
        self._busy = False
        return self._backend.put_rows(rank, num_rows, num_blocks, self._checker.stream_pointer(stream))

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
        only leaves: its memory goes when the process ends. So do one with masked ranks, and those of the ranks that
        others have masked, or that others left so, without an error.

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
