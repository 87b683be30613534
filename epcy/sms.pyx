# cython: boundscheck=False, wraparound=False
"""How much of the machine calls take, as given or as the model says: threads on the host backend, else SMs."""

from libc.stdint cimport int64_t

from epcy import links, model
from epcy.errors import ArgumentError, HeapError
from epcy.options import resolve


cdef class SmsPlan(LowLatencyCalls):

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

    def explain(self, op, num_tokens, *, dtype=None, layout="rank", num_sms=None, is_staged=False):
        """Tell what a call moves and how long it should take, by term, and how long such calls took.

        Local. The prediction needs constants of this machine and topology: `mpiexec -n R python -m epcy calibrate`.
        Routing is taken for random; what was measured is of all calls of the operation, of either layout. Between nodes
        it says what crosses each kind of link, and where the network was not measured takes it from a data sheet.

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
        is_staged : bool
            Whether the rows of a combine lie in an array of the caller's, and not where `combine_input` or dispatch put
            them: they are copied first.

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
        nodes = network = None
        if self.topology.num_nodes > 1:
            nodes = links.Nodes(self.topology.num_nodes, len(self.topology.ranks_of_node(self.topology.node)),
                                self.options["path"], self.backend)
            network = links.stored(self.backend, self.size, self.topology.num_nodes) or links.of_data_sheet()
        load = model.load_of(subject, num_tokens, self.size, self._num_experts, self._num_topk, row_bytes, num_cast,
                             bool(is_staged), nodes)
        constants = model.stored(subject, self.backend, self.size, self.topology.num_nodes)
        if num_sms is None and op in model.OPERATIONS[:2]:
            num_sms = None if self._plan is None else self._plan.num_sms(subject, num_tokens)
            num_sms = num_sms or self._backend.num_blocks(op, layout)
        kernels, rows = {}, ()
        if self._backend.meter is not None:
            stats = self._backend.meter.read()
            kernels, rows = stats.kernels, stats.tokens_to_rank
        return model.explain(subject, load, constants, num_sms, kernels, rows, nodes, network)

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
