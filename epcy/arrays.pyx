"""Any array -> pointer, shape, strides and element kind, without copying where the layout allows it."""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t, uintptr_t

import ml_dtypes
import numpy as np

from epcy.errors import ArgumentError, NotSupportedError

# The C side of NumPy's __array_struct__ (the array interface protocol, version 3).
cdef struct PyArrayInterface:
    int two
    int nd
    char typekind
    int itemsize
    int flags
    Py_ssize_t *shape
    Py_ssize_t *strides
    void *data

cdef enum:
    FLAG_C_CONTIGUOUS = 0x1
    FLAG_ALIGNED = 0x100
    FLAG_WRITEABLE = 0x400

# DLPack (dlpack.h, version 0.x: what __dlpack__() without arguments hands out).
cdef struct DLTensor:
    void *data
    int32_t device_type, device_id
    int32_t ndim
    uint8_t code, bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides
    uint64_t byte_offset

cdef struct DLManagedTensor:
    DLTensor tensor

cdef enum:
    DL_CPU = 1
    DL_CUDA = 2
    DL_CUDA_HOST = 3
    DL_CUDA_MANAGED = 13

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {KIND_BF16: BFLOAT16, KIND_FP16: np.dtype(np.float16), KIND_FP32: np.dtype(np.float32),
          KIND_FP8: np.dtype(np.uint8), KIND_INT32: np.dtype(np.int32), KIND_INT64: np.dtype(np.int64)}
cdef dict _kinds = {dtype: kind for kind, dtype in DTYPES.items()}
_kinds[np.dtype(ml_dtypes.float8_e4m3fn)] = KIND_FP8
cdef dict _dlpack = {(4, 16): BFLOAT16, (2, 16): np.dtype(np.float16), (2, 32): np.dtype(np.float32),
                     (10, 8): np.dtype(np.uint8), (1, 8): np.dtype(np.uint8), (0, 32): np.dtype(np.int32),
                     (0, 64): np.dtype(np.int64)}
cdef object ndarray = np.ndarray


cdef class Array:
    """Somebody's array, as C sees it."""


cdef class Memory:
    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data, self.nbytes, 0, flags)
        self.num_exports += 1

    def __releasebuffer__(self, Py_buffer *buffer):
        self.num_exports -= 1


cdef Memory memory_at(char *data, Py_ssize_t nbytes, object owner):
    cdef Memory memory = Memory.__new__(Memory)
    memory.data, memory.nbytes, memory.owner = data, nbytes, owner
    return memory


@cython.final
cdef class _Capsule:
    """Holds a DLPack capsule; its own destructor calls the producer's deleter."""

    cdef object capsule


cdef object from_dlpack(object obj, str name):
    """An ndarray over a DLPack exporter's memory (NumPy's own from_dlpack knows neither bfloat16 nor float8)."""
    cdef object capsule
    try:
        capsule = obj.__dlpack__()
    except Exception as error:      # a tensor that requires a gradient, a read-only array, ...
        raise ArgumentError(f"{name}: expected an array that can be read, {type(obj).__name__}.__dlpack__() raised "
                            f"{type(error).__name__}: {error}") from None
    if not PyCapsule_IsValid(capsule, "dltensor"):
        raise ArgumentError(f"{name}: expected a DLPack capsule named 'dltensor', got {capsule!r}")
    cdef DLTensor *t = &(<DLManagedTensor *>PyCapsule_GetPointer(capsule, "dltensor")).tensor
    if t.device_type != DL_CPU and t.device_type != DL_CUDA_HOST:
        raise ArgumentError(f"{name}: expected host memory on backend 'host', got a DLPack device of type "
                            f"{t.device_type}")
    dtype = _dlpack.get((t.code, t.bits))
    if dtype is None or t.lanes != 1:
        raise ArgumentError(f"{name}: unknown DLPack element (code {t.code}, {t.bits} bits, {t.lanes} lanes)")
    shape = tuple([t.shape[i] for i in range(t.ndim)])
    if 0 in shape:
        return np.empty(shape, dtype)
    itemsize = dtype.itemsize
    if t.strides == NULL:
        strides = tuple([itemsize * n for n in np.cumprod((1, *shape[:0:-1]))[::-1].tolist()])[:len(shape)]
    else:
        strides = tuple([t.strides[i] * itemsize for i in range(t.ndim)])
    if min(strides, default=0) < 0:
        raise NotSupportedError(f"{name}: a DLPack tensor with negative strides; pass a contiguous one")
    nbytes = itemsize + sum([(n - 1) * s for n, s in zip(shape, strides)])
    cdef _Capsule holder = _Capsule()
    holder.capsule = capsule
    return ndarray(shape, dtype, memory_at(<char *>t.data + t.byte_offset, nbytes, holder), 0, strides)


cdef object without_torch_types(object obj, str name):
    """What others can read of a torch tensor: e4m3 as its bytes, since not every version exports it by DLPack."""
    if getattr(obj, "requires_grad", False) is True:
        raise ArgumentError(f"{name}: expected a tensor that does not require a gradient, got one that does; pass its "
                            "detach()")
    if str(getattr(obj, "dtype", "")) == "torch.float8_e4m3fn":
        import torch
        return obj.view(torch.uint8)
    return obj


cdef object is_on_gpu(object obj):
    """Whether an array's memory is a GPU's; None where it does not say. Torch's CUDA array interface may only raise."""
    if hasattr(obj, "__dlpack_device__"):
        return obj.__dlpack_device__()[0] in (DL_CUDA, DL_CUDA_MANAGED)
    return True if hasattr(obj, "__cuda_array_interface__") else None


cdef object as_ndarray(object obj, str name):
    if isinstance(obj, ndarray):
        return obj
    if is_on_gpu(obj):
        raise ArgumentError(f"{name}: expected an array in host memory on backend 'host', got one on a GPU "
                            f"({type(obj).__name__}); copy it to the host or use backend='nvshmem'")
    if hasattr(obj, "__dlpack__"):
        return from_dlpack(without_torch_types(obj, name), name)
    if hasattr(obj, "__array_interface__") or hasattr(obj, "__array_struct__"):
        return np.asarray(obj)
    try:
        return np.asarray(memoryview(obj))
    except TypeError:
        raise ArgumentError(f"{name}: expected an array (NumPy, DLPack or buffer protocol), "
                            f"got {type(obj).__name__}") from None


cdef Array describe(object obj, str name):
    """Look at an array of at most three dimensions; only a misaligned one is copied."""
    cdef object a = obj if type(obj) is ndarray else as_ndarray(obj, name)
    cdef object capsule = a.__array_struct__
    cdef PyArrayInterface *interface = <PyArrayInterface *>PyCapsule_GetPointer(capsule, NULL)
    cdef Array array = Array.__new__(Array)
    cdef int i
    if interface.nd > 3:
        raise ArgumentError(f"{name}: expected at most 3 dimensions, got shape {a.shape}")
    if not interface.flags & FLAG_ALIGNED and a.dtype in _kinds:       # others, structures say, have no kind anyway
        return describe(np.array(a, order="C"), name)
    array.owner, array.device = a, -1
    array.data = <char *>interface.data
    array.ndim = interface.nd
    array.shape[0] = array.shape[1] = array.shape[2] = 1
    for i in range(interface.nd):
        array.shape[i] = interface.shape[i]
        array.strides[i] = interface.strides[i]
    array.kind = _kinds.get(a.dtype, KIND_OTHER)
    array.is_contiguous = (interface.flags & FLAG_C_CONTIGUOUS) != 0
    array.is_writable = (interface.flags & FLAG_WRITEABLE) != 0
    return array


cdef object cupy_ndarray = None


cdef Array describe_cuda(object obj, str name, int device):
    """Look at an array on a GPU: no copy, at most three dimensions. Of a call's time on the host this is a good part:
    it asks CuPy for as little as it can."""
    global cupy_ndarray
    cdef object a = obj
    cdef Array array = Array.__new__(Array)
    cdef object memory
    cdef tuple shape, strides
    cdef int64_t expected
    cdef int i
    if type(a) is not cupy_ndarray:
        import cupy
        cupy_ndarray = cupy.ndarray
        if not isinstance(a, cupy_ndarray):
            a = as_cupy(obj, name, cupy)
    shape, strides, memory = a.shape, a.strides, a.data
    array.ndim = len(shape)
    if array.ndim > 3:
        raise ArgumentError(f"{name}: expected at most 3 dimensions, got shape {shape}")
    if memory.device_id != device and a.size:
        raise ArgumentError(f"{name}: expected an array on GPU {device}, the Buffer's, got one on GPU "
                            f"{memory.device_id}; copy it, or construct the Buffer with device={memory.device_id} on "
                            "this rank")
    array.owner, array.device = a, device
    array.data = <char *><uintptr_t>memory.ptr
    array.shape[0] = array.shape[1] = array.shape[2] = 1
    array.kind = _kinds.get(a.dtype, KIND_OTHER)
    for i in range(array.ndim):
        array.shape[i] = shape[i]
        array.strides[i] = strides[i]
    array.is_contiguous, array.is_writable = True, True
    expected = a.dtype.itemsize if array.kind == KIND_OTHER else array.item_bytes()
    for i in range(array.ndim - 1, -1, -1):     # an axis of one element may have any stride; without elements, all
        if array.shape[i] == 0:
            array.is_contiguous = True
            break
        if array.shape[i] != 1 and array.strides[i] != expected:
            array.is_contiguous = False
        expected *= array.shape[i]
    # The kernels load 16 bytes at a time.
    if <uintptr_t>array.data % 16 or array.ndim == 2 and not array.is_contiguous and array.strides[0] % 16:
        return describe_cuda(copy_of(a, device), name, device)
    return array


cdef object as_cupy(object obj, str name, cupy):
    """A CuPy array over the memory of a torch tensor or another exporter."""
    cdef object on_gpu = is_on_gpu(obj)
    if not on_gpu:
        where = "" if on_gpu is None else " in host memory"
        raise ArgumentError(f"{name}: expected an array on a GPU (CuPy, DLPack or CUDA array interface) on backend "
                            f"'nvshmem', got {type(obj).__name__}{where}; copy it there or use backend='host'")
    if not hasattr(obj, "__dlpack__"):
        return cupy.asarray(obj)
    obj = without_torch_types(obj, name)
    try:
        return cupy.from_dlpack(obj)
    except Exception as error:      # a dtype that CuPy does not know, a sparse tensor, ...
        raise ArgumentError(f"{name}: expected an array that can be read, DLPack of {type(obj).__name__} raised "
                            f"{type(error).__name__}: {error}") from None


cdef object copy_of(object a, int device):
    """A C-contiguous copy, on the GPU of the array whichever is the current one."""
    if device < 0:
        return np.array(a, order="C")
    import cupy
    with cupy.cuda.Device(device):      # as whole numbers: CuPy's kernels make every NaN the same
        return a.view(f"u{a.dtype.itemsize}").copy(order="C").view(a.dtype)


cdef Array contiguous(Array array):
    """The array itself, or a C-contiguous copy of it."""
    if array.is_contiguous:
        return array
    return copied(array)


cdef bint overlap(Array array, char *begin, int64_t nbytes) noexcept:
    """Whether an array has an element in these bytes, or between its elements."""
    cdef char *low = array.data
    cdef char *high = array.data + array.item_bytes()
    cdef int i
    for i in range(array.ndim):
        if array.shape[i] == 0:
            return False
        if array.strides[i] < 0:
            low += (array.shape[i] - 1) * array.strides[i]
        else:
            high += (array.shape[i] - 1) * array.strides[i]
    return low < begin + nbytes and begin < high


cdef Array copied(Array array):
    """A C-contiguous copy."""
    cdef object copy = copy_of(array.owner, array.device)
    return describe(copy, "") if array.device < 0 else describe_cuda(copy, "", array.device)


cdef Array with_rows(Array array):
    """The array itself where each row lies in one piece (rows may be any distance apart), or a copy."""
    if array.is_contiguous or array.ndim == 2 and (array.strides[1] == array.item_bytes() or array.shape[1] == 1):
        return array
    return contiguous(array)


def rows_of(obj, str name, int device=-1):
    """Look at a two-dimensional array in host memory or on a GPU, copied if it is not contiguous."""
    cdef Array array = describe(obj, name) if device < 0 else describe_cuda(obj, name, device)
    if array.ndim != 2:
        raise ArgumentError(f"{name}: expected 2 dimensions, got shape {array.owner.shape}")
    return contiguous(array)
