"""Sizes of the nvshmem backend's memory, out of its headers: plain C, so that a machine without CUDA knows them too."""

from epcy.backends.cuda cimport epcy_control_layout
from epcy.backends.cuda_low_latency cimport epcy_low_latency_wire, epcy_low_latency_wire_layout
from epcy.backends.cuda_nodes cimport epcy_nodes_layout
from epcy.backends.cuda_put cimport epcy_put_layout
from epcy.layout cimport epcy_heap_layout, epcy_shape, region_bytes, shape_of


def ranks_by_stores(options, num_ranks):
    """The most ranks that reach each other's memory by plain stores in low-latency calls: consecutive ones."""
    if not options["allow_nvlink_for_low_latency_mode"]:
        return 1
    return min(num_ranks, options["num_max_nvl_peers"] or num_ranks)


def num_far_ranks(options, num_ranks):
    """The most ranks that a rank reaches by puts: those outside the smallest node."""
    node = ranks_by_stores(options, num_ranks)
    return num_ranks - (num_ranks % node or node)


def far_ranks(options, num_ranks, rank):
    """Those of a rank, as bits."""
    node = ranks_by_stores(options, num_ranks)
    return sum([1 << other for other in range(num_ranks) if other // node != rank // node])


USUAL_CHUNK_BYTES, MOST_CHUNK_TOKENS = 1 << 17, 16


def chunk_tokens(options, row_bytes, num_max_tokens):
    """Tokens of a message between nodes."""
    usual = max(1, min(USUAL_CHUNK_BYTES // row_bytes, MOST_CHUNK_TOKENS))
    return min(options["node_chunk_tokens"] or usual, num_max_tokens)


def num_groups(options, num_ranks):
    """What a rank sends to: other nodes, or on the direct path their ranks."""
    node = min(num_ranks, options["num_max_nvl_peers"] or num_ranks)
    if options["path"] == "direct":
        return num_ranks - (num_ranks % node or node)
    return -(-num_ranks // node) - 1


def nodes_bytes(dict sizes, options, num_ranks):
    """Bytes of what calls between nodes need beside."""
    cdef epcy_shape s = shape_of(sizes)
    groups = num_groups(options, num_ranks)
    chunk = chunk_tokens(options, s.row_bytes, s.num_max_tokens)
    return epcy_nodes_layout(&s, 0, groups, options["num_node_buffers"], chunk).bytes


def heap_layout(dict sizes, num_far_ranks=0, nodes_bytes=0):
    """Bytes of the regions of a rank's allocation, by name; low-latency calls reach `num_far_ranks` by puts."""
    cdef epcy_shape s = shape_of(sizes)
    control_bytes = epcy_control_layout(&s).bytes
    cdef epcy_low_latency_wire wire = epcy_low_latency_wire_layout(&s, control_bytes)
    wire_bytes = wire.bytes + epcy_put_layout(&s, &wire, num_far_ranks).bytes
    control_bytes += nodes_bytes
    return region_bytes(epcy_heap_layout(&s, control_bytes + wire_bytes), control_bytes)
