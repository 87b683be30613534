# cython: boundscheck=False, wraparound=False
"""The arguments of the low-latency calls: every check, once, before anything is sent."""

from libc.stdint cimport int64_t

from epcy.arrays cimport KIND_FP32, KIND_INT32, KIND_INT64, Array, contiguous, copied, overlap
from epcy.backends.base cimport Backend
from epcy.backends.call cimport LowLatencyCombineCall, LowLatencyDispatchCall
from epcy.checks cimport Checker
from epcy.handle cimport LowLatencyHandle

from epcy.backends.names import REDUCTIONS
from epcy.backends.verdicts import bad_id
from epcy.errors import CapacityError, StateError

cdef int64_t GROUP = 128                # elements that share a scale, or an exponent of LogFMT


cdef class LowLatencyChecker(Checker):
    def __init__(self, Backend backend, dict shape, dict options):
        super().__init__(backend, shape, options)
        self.num_local = self.num_experts // shape["num_ranks"]
        self.num_max_low_latency_tokens = shape["num_low_latency_tokens"]
        self.num_slots = shape["num_ranks"] * self.num_max_low_latency_tokens

    cdef LowLatencyDispatchCall low_latency_dispatch(
            self, x, topk_idx, topk_weights, bint use_fp8, bint round_scale, bint use_ue8m0, stats,
            bint return_recv_hook):
        cdef LowLatencyDispatchCall call = LowLatencyDispatchCall.__new__(LowLatencyDispatchCall)
        cdef int64_t num_tokens, multiple
        if isinstance(x, (tuple, list)):
            raise self.wrong("x", "an array of bfloat16, float16 or float32", type(x).__name__,
                             "use_fp8=True casts it on the way")
        call.x = self.rows(x, "x", -1, -1)
        num_tokens = call.x.shape[0]
        if num_tokens > self.num_max_low_latency_tokens:
            raise CapacityError(f"x: {num_tokens} tokens on rank {self.rank}, the low-latency areas have room for "
                                f"num_max_low_latency_tokens_per_rank={self.num_max_low_latency_tokens}; send fewer, "
                                "or construct the Buffer with more")
        call.topk_idx = self.lanes(topk_idx, "topk_idx", num_tokens, True)
        if self.backend.checks:
            self.ids(call.topk_idx.owner)
        if topk_weights is not None:
            call.topk_weights = self.lanes(topk_weights, "topk_weights", num_tokens, False)
        if use_ue8m0 and not round_scale:
            raise self.wrong("use_ue8m0", "round_scale=True beside it", "round_scale=False",
                             "an exponent can only hold a power of two")
        if round_scale and not use_fp8:
            raise self.wrong("round_scale", "False with use_fp8=False (nothing is scaled)", "True")
        multiple = 4 * GROUP if use_ue8m0 else GROUP
        if use_fp8 and self.hidden % multiple:
            raise self.wrong("use_ue8m0" if use_ue8m0 else "use_fp8", f"a hidden size of a multiple of {multiple}",
                             self.hidden, "send x as it is, with use_fp8=False")
        if stats is not None:
            call.stats = self.stats(stats)
        call.use_fp8, call.round_scale, call.use_ue8m0 = use_fp8, round_scale, use_ue8m0
        call.return_recv_hook = return_recv_hook
        return call

    cdef int ids(self, topk_idx) except -1:
        """The option `check`: refuse bad ids at once. On a GPU this waits; in a capture it cannot."""
        if self.device >= 0 and self.xp.cuda.get_current_stream().is_capturing():
            return 0
        bad = (topk_idx < -1) | (topk_idx >= self.num_experts)
        if bad.any():
            token, lane = self.xp.argwhere(bad)[0].tolist()
            raise bad_id(self.rank, token, lane, int(topk_idx[token, lane]), self.num_experts, int(bad.sum()))
        return 0

    cdef Array stats(self, stats):
        cdef Array a = self.look(stats, "stats")
        if a.ndim != 1 or a.shape[0] != self.num_local or a.kind != KIND_INT32 and a.kind != KIND_INT64:
            raise self.wrong("stats", f"shape ({self.num_local},) and dtype int32 or int64",
                             f"shape {a.owner.shape}, dtype {a.owner.dtype}")
        if not isinstance(stats, self.xp.ndarray) or a.owner is not stats or not a.is_writable or not a.is_contiguous:
            raise self.wrong("stats", f"a writable contiguous array of {self.xp.__name__}", "one that is not")
        return a

    cdef LowLatencyHandle low_latency_handle(self, handle):
        if not isinstance(handle, LowLatencyHandle):
            raise self.wrong("handle", "the handle of a low_latency_dispatch", type(handle).__name__)
        if (<LowLatencyHandle>handle).buffer_token is not self.backend.token:
            raise self.wrong("handle", "a handle of this Buffer", "one of another Buffer")
        return handle

    cdef LowLatencyCombineCall low_latency_combine(
            self, x, topk_idx, topk_weights, handle, reduction, bint use_logfmt, out, bint return_recv_hook):
        cdef LowLatencyCombineCall call = LowLatencyCombineCall.__new__(LowLatencyCombineCall)
        cdef LowLatencyHandle checked = self.low_latency_handle(handle)
        call.handle = checked
        call.x = self.slots(x)
        if not checked.received:
            raise StateError(f"handle: the hook of its dispatch has not run (rank {self.rank}); call it first")
        if topk_idx is not None:
            self.lanes(topk_idx, "topk_idx", checked.num_tokens, True)
        if topk_weights is not None:
            call.topk_weights = self.lanes(topk_weights, "topk_weights", checked.num_tokens, False)
        if not isinstance(reduction, str) or reduction not in REDUCTIONS:
            raise self.wrong("reduction", " or ".join([repr(name) for name in REDUCTIONS]), repr(reduction))
        call.reduction = 0 if reduction == "rank" else 1
        if use_logfmt and self.hidden % GROUP:
            raise self.wrong("use_logfmt", f"a hidden size of a multiple of {GROUP}", self.hidden,
                             "send rows as they are, with use_logfmt=False")
        call.use_logfmt, call.return_recv_hook = use_logfmt, return_recv_hook
        call.out = self.sums(out, checked.num_tokens, call.x.kind)
        self.backend.check_out(call.out)
        if overlap(call.x, call.out.data, call.out.shape[0] * self.hidden * call.out.item_bytes()):
            call.x = copied(call.x)
        call.topk_weights = self.apart(call.topk_weights, call.out)
        return call

    cdef Array slots(self, x):
        """The experts' rows (L, R * M', H)."""
        cdef Array a
        if isinstance(x, (tuple, list)):
            raise self.wrong("x", "an array of bfloat16, float16 or float32", type(x).__name__)
        a = self.look(x, "x")
        if a.ndim != 3 or a.shape[0] != self.num_local or a.shape[1] != self.num_slots or a.shape[2] != self.hidden:
            raise self.wrong("x", f"shape ({self.num_local}, {self.num_slots}, {self.hidden})",
                             f"shape {a.owner.shape}")
        if not 0 <= a.kind <= KIND_FP32:
            raise self.wrong("x", "bfloat16, float16 or float32", f"dtype {a.owner.dtype}")
        self.row(a, "x")
        return contiguous(a)
