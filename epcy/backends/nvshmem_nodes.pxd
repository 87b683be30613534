"""The nvshmem backend between nodes."""

from libc.stdint cimport uint32_t, uintptr_t

from epcy.backends.cuda cimport epcy_peers
from epcy.backends.cuda_handle cimport CudaHandle
from epcy.backends.cuda_nodes cimport epcy_nodes_call, epcy_nodes_map, epcy_nodes_routing, epcy_nodes_wire
from epcy.backends.nvshmem_low_latency cimport LowLatencyNvshmemBackend


cdef class NodesRouting:
    """What a handle keeps beside a CudaHandle's arrays."""

    cdef epcy_nodes_routing routing
    cdef object memory                  # one CuPy allocation


cdef class NodesNvshmemBackend(LowLatencyNvshmemBackend):
    cdef object nodes                   # topology.Topology
    cdef epcy_nodes_wire nodes_wire
    cdef epcy_nodes_map map
    cdef int node_blocks                # for each thing that a kernel does
    cdef int blocks_each                # of them on a multiprocessor
    cdef CudaHandle last_handle         # of the last dispatch, whose failure may be told
    cdef object node_bytes              # as last read
    cdef uintptr_t leave_stream         # waits for nothing

    cdef int open_call(self, epcy_nodes_call *c, const epcy_peers *peers) except -1
