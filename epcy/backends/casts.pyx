# distutils: libraries = epcy_host
"""The casts to fp8 and back, and the instruction set that they and the sums use."""

from libc.stdint cimport uint8_t

from epcy.arrays cimport Array, describe
from epcy.backends.host_kernels cimport epcy_cast_from_fp8, epcy_cast_to_fp8, epcy_simd_level, epcy_simd_limit


def simd_level(limit=None):
    """The instruction set in use: 0 portable, 1 AVX2, 2 AVX-512; with `limit`, use no more than that."""
    return epcy_simd_level() if limit is None else epcy_simd_limit(limit)


def to_fp8(Array x, bint power_of_two, payload, scales):
    """Cast the rows of x into the arrays given."""
    cdef Array p = describe(payload, "payload"), s = describe(scales, "scales")
    with nogil:
        epcy_cast_to_fp8(x.data, x.kind, x.shape[0], x.shape[1], power_of_two, <uint8_t *>p.data, <float *>s.data)


def from_fp8(Array payload, Array scales, out):
    """Cast the pair's rows into the array given."""
    cdef Array o = describe(out, "out")
    with nogil:
        epcy_cast_from_fp8(<uint8_t *>payload.data, <float *>scales.data, payload.shape[0], payload.shape[1], o.kind,
                           o.data)
