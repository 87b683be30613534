"""Dispatch and combine of the host backend between nodes."""

from libc.stdint cimport int64_t

from epcy.backends.host cimport HostHandle
from epcy.backends.host_kernels cimport *
from epcy.backends.host_nodes cimport HostNodes
from epcy.backends.node_waits cimport NodeWait
from epcy.backends.nodes_kernels cimport *


cdef class Relayed:
    """What one dispatch sends over each link, and what comes over it: a handle keeps it for combine."""

    cdef int num_links
    cdef int64_t *num_out               # by link: tokens of this rank with rows beyond
    cdef int64_t *num_in                # by link: tokens of the rank there with rows in this node
    cdef epcy_route **routes            # by link: theirs, (num_in, K)

    cdef int open(self, int link, int64_t num_in, int64_t num_topk) except -1


cdef class Streams:
    """How far the streams of one call are, by link."""

    cdef int64_t num_links
    cdef int64_t *to_send               # tokens to send in all, and sent so far; -1: not even their number
    cdef int64_t *num_sent
    cdef int64_t *to_come               # likewise of those that come
    cdef int64_t *num_come
    cdef epcy_stream *out
    # Of a combine:
    cdef epcy_stream *weights_out
    cdef int64_t *num_weights           # weights that came
    cdef float **weights                # (num_in, K)
    cdef const char **messages          # with the sums that are summed next
    cdef int64_t *next

    cdef bint are_over(self) noexcept


cdef class HostRelay(HostNodes):
    """Rows of other nodes: sent, passed on inside this node, and summed before they go back."""

    cdef char *scratch                  # a row for each rank of this node

    cdef epcy_message *next_message(self, int link) except? NULL
    cdef int take_rows(self, int link, epcy_host_dispatch *d, Relayed relayed, Streams s, bint uncached) except -1
    cdef int send_rows(self, int link, epcy_host_dispatch *d, Streams s, bint uncached) except -1
    cdef int move_own(self, epcy_host_dispatch *d, int64_t first) except -1
    cdef int take_sums(self, int link, Streams s, bint weighted) except -1
    cdef int send_sums(self, int link, epcy_host_combine *c, Relayed relayed, Streams s, bint weighted) except -1
    cdef int count_bytes(self, int64_t payload, int64_t all_bytes) except -1
    cdef int look(self, NodeWait wait, Streams s) except -1
