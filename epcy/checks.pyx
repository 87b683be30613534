# cython: boundscheck=False, wraparound=False
"""The arguments of the calls: every check, once, before anything is sent."""

from libc.stdint cimport int64_t

from epcy.arrays cimport (
    KIND_FP8, KIND_FP32, KIND_INT32, KIND_INT64, Array, contiguous, copied, describe, describe_cuda, overlap, with_rows)
from epcy.backends.base cimport Backend
from epcy.backends.call cimport Call, CombineCall, DispatchCall
from epcy.event cimport Event
from epcy.handle cimport Handle, LowLatencyHandle
from epcy.layout cimport epcy_num_scales

import numpy as np

from epcy.arrays import DTYPES
from epcy.errors import ArgumentError, CapacityError, EpcyError
from epcy.options import DTYPES as DTYPE_NAMES      # by kind


cdef class Checker:
    def __init__(self, Backend backend, dict shape, dict options):
        self.backend, self.rank, self.xp, self.device = backend, backend.rank, backend.xp, backend.device
        self.num_topk, self.hidden, self.num_experts = shape["num_topk"], shape["hidden"], shape["num_experts"]
        self.num_max_tokens, self.num_rows = shape["num_max_tokens"], shape["num_rows"]
        self.row_bytes, self.dtype = shape["row_bytes"], options["dtype"]

    cdef object wrong(self, str name, str expected, seen, str remedy=""):
        return ArgumentError(f"{name}: expected {expected}, got {seen} (rank {self.rank})"
                             + (f"; {remedy}" if remedy else ""))

    cdef int64_t number(self, value, str name, int64_t least) except -1:
        try:
            number = value.__index__()
        except AttributeError:
            raise self.wrong(name, "a whole number", repr(value)) from None
        if not least <= number <= self.num_rows:
            raise self.wrong(name, f"a whole number from {least} to the rows of a receive area "
                             f"(num_max_recv_tokens={self.num_rows})", number)
        return number

    cdef int order(self, Call call, previous_event, bint async_finish, stream) except -1:
        """What the call waits for and what waits for it."""
        if previous_event is not None and not isinstance(previous_event, Event):
            raise self.wrong("previous_event", "an epcy.Event or None", repr(previous_event))
        if stream is not None and self.device < 0:
            raise self.wrong("stream", "None: backend 'host' has no streams", repr(stream))
        call.previous_event, call.async_finish = previous_event, async_finish
        if self.device >= 0:
            call.stream = self.stream_pointer(stream)
        return 0

    def stream_pointer(self, stream):
        """The CUDA stream of CuPy's current one, of any object with __cuda_stream__, or of a plain integer."""
        if stream is None:
            return self.xp.cuda.get_current_stream().ptr
        if hasattr(stream, "__cuda_stream__"):
            return stream.__cuda_stream__()[1]
        pointer = getattr(stream, "ptr", stream)
        if isinstance(pointer, int) and not isinstance(pointer, bool) and pointer >= 0:
            return pointer
        raise self.wrong("stream", "a CuPy stream, an object with __cuda_stream__, or a stream's address", repr(stream))

    cdef Handle handle(self, handle):
        if not isinstance(handle, Handle) or isinstance(handle, LowLatencyHandle):
            raise self.wrong("handle", "the handle of a dispatch", type(handle).__name__)
        if (<Handle>handle).buffer_token is not self.backend.token:
            raise self.wrong("handle", "a handle of this Buffer", "one of another Buffer")
        return handle

    cdef int payload_kind(self, dtype) except -2:
        """The kind of a payload dtype; None: the Buffer's."""
        try:
            wanted = DTYPES[DTYPE_NAMES.index(self.dtype)] if dtype is None else np.dtype(dtype)
        except TypeError:
            wanted = None
        for kind in range(KIND_FP32 + 1):
            if DTYPES[kind] == wanted and self.backend.dtype_fits(kind):
                return kind
        raise self.wrong("dtype", f"bfloat16, float16 or float32, no wider than the Buffer's ({self.dtype})",
                         repr(dtype))

    cdef Array look(self, obj, str name):
        try:
            return describe(obj, name) if self.device < 0 else describe_cuda(obj, name, self.device)
        except EpcyError as error:
            raise type(error)(f"{error} (rank {self.rank})") from None

    cdef Array rows(self, obj, str name, int64_t num_rows, int kind):
        """A payload array (T, H); num_rows -1: any; kind -1: any payload."""
        cdef Array a = self.look(obj, name)
        if a.ndim != 2 or a.shape[1] != self.hidden or num_rows >= 0 and a.shape[0] != num_rows:
            rows = "T" if num_rows < 0 else num_rows
            raise self.wrong(name, f"shape ({rows}, {self.hidden})", f"shape {a.owner.shape}")
        if kind >= 0 and a.kind != kind:
            raise self.wrong(name, f"dtype {DTYPES[kind]}", f"dtype {a.owner.dtype}")
        if not 0 <= a.kind <= KIND_FP32 and kind != KIND_FP8:
            raise self.wrong(name, "bfloat16, float16 or float32, or for dispatch a pair (float8_e4m3fn, scales)",
                             f"dtype {a.owner.dtype}")
        self.row(a, name)
        return with_rows(a)

    cdef int row(self, Array a, str name) except -1:
        """Refuse rows that have no room in the areas, or that no copy of 16 bytes at a time could move."""
        cdef int64_t row_bytes = self.hidden * a.item_bytes()
        if row_bytes > self.row_bytes:
            raise self.wrong(name, f"dtype no wider than the Buffer's {self.dtype}", f"dtype {a.owner.dtype}",
                             f"construct the Buffer with dtype={str(a.owner.dtype)!r}")
        if row_bytes % 16:
            raise self.wrong(name, "rows of a multiple of 16 bytes", f"{row_bytes} bytes")
        return 0

    cdef Array sums(self, out, int64_t num_rows, int kind):
        """Where a combine's sums go: the user's own array, or a new one."""
        cdef Array a
        if out is None:
            out = self.empty(num_rows, self.hidden, DTYPES[kind])
        elif not isinstance(out, self.xp.ndarray):
            raise self.wrong("out", f"an array of {self.xp.__name__}", type(out).__name__)
        a = self.rows(out, "out", num_rows, kind)
        if a.owner is not out or not a.is_writable or not a.is_contiguous:
            raise self.wrong("out", "a writable C-contiguous array", "one that is not")
        return a

    cdef Array lanes(self, obj, str name, int64_t num_rows, bint is_idx):
        """topk_idx or topk_weights (T, K)."""
        cdef Array a = self.look(obj, name)
        if a.ndim != 2 or a.shape[1] != self.num_topk or num_rows >= 0 and a.shape[0] != num_rows:
            rows = "T" if num_rows < 0 else num_rows
            raise self.wrong(name, f"shape ({rows}, {self.num_topk})", f"shape {a.owner.shape}")
        if is_idx and a.kind != KIND_INT64 and a.kind != KIND_INT32:
            raise self.wrong(name, "dtype int64 or int32", f"dtype {a.owner.dtype}")
        if not is_idx and a.kind != KIND_FP32:
            raise self.wrong(name, "dtype float32", f"dtype {a.owner.dtype}")
        return contiguous(a)

    cdef DispatchCall dispatch(self, x, topk_idx, topk_weights, handle, layout, expert_alignment,
                               num_worst_tokens, out):
        cdef DispatchCall call = DispatchCall.__new__(DispatchCall)
        cdef int64_t num_tokens
        if isinstance(x, (tuple, list)):
            if len(x) != 2:
                raise self.wrong("x", "an array or a pair (payload, scales)", f"{len(x)} items")
            call.x = self.rows(x[0], "x[0]", -1, KIND_FP8)
            call.scales = contiguous(self.look(x[1], "x[1]"))
            scales = (call.x.shape[0], epcy_num_scales(self.hidden))
            if call.scales.owner.shape != scales or call.scales.kind != KIND_FP32:
                raise self.wrong("x[1]", f"scales of shape {scales} and dtype float32",
                                 f"shape {call.scales.owner.shape}, dtype {call.scales.owner.dtype}")
        else:
            call.x = self.rows(x, "x", -1, -1)
        num_tokens = call.x.shape[0]
        if num_tokens > self.num_max_tokens:
            raise CapacityError(f"x: {num_tokens} tokens on rank {self.rank}, the Buffer has room for "
                                f"num_max_tokens_per_rank={self.num_max_tokens}; send fewer, or construct it with more")
        if handle is not None:
            call.handle = self.handle(handle)
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
                raise self.wrong("topk_idx", f"an array ({num_tokens}, {self.num_topk}), or handle=", "None")
            call.topk_idx = self.lanes(topk_idx, "topk_idx", num_tokens, True)
            if layout is not None and not (isinstance(layout, str) and layout in ("rank", "expert")):
                raise self.wrong("layout", "'rank' or 'expert'", repr(layout))
            call.layout = "rank" if layout is None else layout
            call.expert_alignment = 1 if expert_alignment is None else self.number(
                expert_alignment, "expert_alignment", 1)
            if call.layout == "rank" and call.expert_alignment != 1:
                raise self.wrong("expert_alignment", "1 in the rank layout", f"{call.expert_alignment}",
                                 "use layout='expert'")
            call.num_worst_tokens = self.number(num_worst_tokens, "num_worst_tokens", 0)
        if topk_weights is not None:
            call.topk_weights = self.lanes(topk_weights, "topk_weights", num_tokens, False)
        if out is not None:
            self.dispatch_out(out, call)
            call.out = out
        return call

    cdef int dispatch_out(self, out, DispatchCall call) except -1:
        cdef Array a
        if out is True:
            return 0
        pair = isinstance(out, (tuple, list))
        if pair != (call.scales is not None) or pair and len(out) != 2:
            raise self.wrong("out", "True, or an array (a pair of arrays where x is a pair)", type(out).__name__)
        for i, array in enumerate(out if pair else (out,)):
            name, width = (f"out[{i}]" if pair else "out"), (epcy_num_scales(self.hidden) if i else self.hidden)
            if not isinstance(array, self.xp.ndarray):
                raise self.wrong(name, f"an array of {self.xp.__name__}", type(array).__name__)
            a = self.look(array, name)
            kind = call.scales.kind if i else call.x.kind
            if a.ndim != 2 or a.shape[1] != width or a.kind != kind or not a.is_writable:
                raise self.wrong(name, f"a writable array (>= N, {width}) of x's dtype",
                                 f"shape {array.shape}, dtype {array.dtype}")
        return 0

    cdef CombineCall combine(self, x, handle, topk_weights, bias, out):
        cdef CombineCall call = CombineCall.__new__(CombineCall)
        cdef Handle checked = self.handle(handle)
        cdef int64_t num_tokens = checked.num_tokens
        cdef bint rank_layout = checked.layout == "rank"
        call.handle = checked
        if isinstance(x, (tuple, list)):
            raise self.wrong("x", "an array of bfloat16, float16 or float32", type(x).__name__,
                             "fp8 pairs are for dispatch")
        call.x = self.rows(x, "x", checked.num_rows, -1)
        if topk_weights is not None:
            call.topk_weights = self.lanes(topk_weights, "topk_weights",
                                           checked.num_rows if rank_layout else num_tokens, False)
            if rank_layout:
                call.out_weights = self.look(self.empty(num_tokens, self.num_topk, np.float32), "out")
        if bias is not None:
            biases = bias if isinstance(bias, (tuple, list)) else (bias,)
            if not 1 <= len(biases) <= 2:
                raise self.wrong("bias", "an array or a pair of arrays", f"{len(biases)} items")
            call.bias0 = contiguous(self.rows(biases[0], "bias", num_tokens, call.x.kind))
            if len(biases) == 2:
                call.bias1 = contiguous(self.rows(biases[1], "bias[1]", num_tokens, call.x.kind))
        call.out = self.sums(out, num_tokens, call.x.kind)
        call.bias0, call.bias1 = self.apart(call.bias0, call.out), self.apart(call.bias1, call.out)
        if not rank_layout:
            call.topk_weights = self.apart(call.topk_weights, call.out)
        return call

    cdef object empty(self, int64_t num_rows, int64_t width, dtype):
        """A new array in the backend's memory, whichever GPU is the current one."""
        if self.device < 0:
            return self.xp.empty((num_rows, width), dtype)
        with self.xp.cuda.Device(self.device):
            return self.xp.empty((num_rows, width), dtype)

    cdef Array apart(self, Array array, Array out):
        """The array, or a copy where writing `out` would change what is still to be read; just over it is fine."""
        cdef int64_t nbytes = out.shape[0] * out.shape[1] * out.item_bytes()
        cdef bint same = array is not None and array.data == out.data and array.shape[1] == out.shape[1]
        if array is None or same or not overlap(array, out.data, nbytes):
            return array
        return copied(array)
