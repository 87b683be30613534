"""The numbers that fix a Buffer's memory."""

from libc.stdint cimport int64_t

from epcy.layout cimport epcy_default_num_rows, epcy_shape

from epcy.arrays import DTYPES
from epcy.errors import ArgumentError
from epcy.options import DTYPES as DTYPE_NAMES


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
