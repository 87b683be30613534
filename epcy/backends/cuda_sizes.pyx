"""Sizes of the nvshmem backend's memory, out of its headers: plain C, so that a machine without CUDA knows them too."""

from epcy.backends.cuda cimport epcy_control_layout
from epcy.backends.cuda_low_latency cimport epcy_low_latency_wire, epcy_low_latency_wire_layout
from epcy.backends.cuda_put cimport epcy_put_layout
from epcy.layout cimport epcy_heap_layout, epcy_shape, region_bytes, shape_of


def heap_layout(dict sizes, num_far_ranks=0):
    """Bytes of the regions of a rank's allocation, by name; `num_far_ranks` are reached by puts."""
    cdef epcy_shape s = shape_of(sizes)
    control_bytes = epcy_control_layout(&s).bytes
    cdef epcy_low_latency_wire wire = epcy_low_latency_wire_layout(&s, control_bytes)
    wire_bytes = wire.bytes + epcy_put_layout(&s, &wire, num_far_ranks).bytes
    return region_bytes(epcy_heap_layout(&s, control_bytes + wire_bytes), control_bytes)
