"""A third party's module: calls epcy's Python API on typed objects, and its C arithmetic without the GIL."""

from libc.stdint cimport int64_t

from epcy.buffer cimport Buffer
from epcy.handle cimport Handle
from epcy.layout cimport epcy_rank_of_expert

cdef extern from *:
    """
    #include <stdint.h>
    int64_t rows_of_rank(int64_t expert, int64_t num_local);
    """
    int64_t rows_of_rank(int64_t expert, int64_t num_local) nogil


def owners(Buffer buffer, const int64_t[:, ::1] topk_idx):
    """The rank of each lane's expert, -1 for unused lanes."""
    cdef int64_t t, k, rank, num_local = buffer.num_local_experts
    result = [[-1] * topk_idx.shape[1] for _ in range(topk_idx.shape[0])]
    for t in range(topk_idx.shape[0]):
        for k in range(topk_idx.shape[1]):
            if topk_idx[t, k] >= 0:
                with nogil:
                    rank = epcy_rank_of_expert(topk_idx[t, k], num_local)
                assert rank == rows_of_rank(topk_idx[t, k], num_local)
                result[t][k] = rank
    return result


def roundtrip(Buffer buffer, x, topk_idx):
    """Send x to its experts and back; return the combined tokens and the rows that were received here."""
    r = buffer.dispatch(x, topk_idx)
    cdef Handle handle = r.handle
    cdef int64_t num_rows = handle.num_rows
    return buffer.combine(r.recv_x, handle).combined_x, num_rows
