"""Sizes of the nvshmem backend's memory, out of its headers: plain C, so that a machine without CUDA knows them too."""

from epcy.backends.cuda cimport epcy_control_layout
from epcy.backends.cuda_low_latency cimport epcy_low_latency_wire, epcy_low_latency_wire_layout
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


def heap_layout(dict sizes, num_far_ranks=0):
    """Bytes of the regions of a rank's allocation, by name; `num_far_ranks` are reached by puts."""
    cdef epcy_shape s = shape_of(sizes)
    control_bytes = epcy_control_layout(&s).bytes
    cdef epcy_low_latency_wire wire = epcy_low_latency_wire_layout(&s, control_bytes)
    wire_bytes = wire.bytes + epcy_put_layout(&s, &wire, num_far_ranks).bytes
    return region_bytes(epcy_heap_layout(&s, control_bytes + wire_bytes), control_bytes)
