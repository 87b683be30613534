"""The cases of the low-latency mode once more, with rows that go by NVSHMEM's put: the same bits, errors and states."""

import pytest

import epcy
from gpu.test_low_latency import (  # noqa: F401
    test_a_replay_between_send_and_hook,
    test_graphs_replay_with_new_data_and_routing,
    test_hooks_inside_a_graph,
    test_lanes_and_tokens_beyond_a_grid,
    test_rows_of_any_length,
    test_streams_are_chained,
    test_x_that_16_byte_loads_cannot_read,
)
from mpi import cases as rows
from mpi.cases import draw, mine, to_host
from mpi.low_latency_cases import check_combine, check_dispatch, late_error, works
from mpi.test_low_latency import (  # noqa: F401
    test_a_rank_with_nothing,
    test_a_repeated_expert,
    test_all_to_one_expert,
    test_beside_the_other_calls,
    test_combine,
    test_dispatch,
    test_events_and_async,
    test_m_of_1024_and_rows_that_nobody_reads,
    test_nobody_has_a_token,
    test_odd_hidden,
    test_odd_numbers_of_lanes_and_experts,
    test_odd_numbers_of_tokens,
    test_out_and_handles_live_on,
    test_preinitialize_and_warmup,
    test_stats,
    test_the_input_is_freed_at_once,
    test_the_same_bits_every_time,
    test_unused_lanes,
    test_unused_lanes_of_weights_given_here,
)
from mpi.test_low_latency_errors import (  # noqa: F401
    test_bad_ids,
    test_calls_differ,
    test_too_many_tokens,
    test_wrong_arguments,
    two_ranks,
)
from mpi.test_low_latency_states import (  # noqa: F401
    test_combine_before_the_dispatch_is_received,
    test_double_batch_overlap,
    test_free_with_calls_in_flight,
    test_reset_gives_up_what_is_in_flight,
    test_skew_between_ranks,
    test_two_combines_in_flight,
    test_two_dispatches_in_flight,
)


@pytest.fixture
def make(make_buffer, backend):
    if backend != "nvshmem":
        pytest.skip("puts are the GPU backend's")

    def build(**options):
        options = {"timeout": 20, "low_latency_mode": True, **options}
        return make_buffer(allow_nvlink_for_low_latency_mode=False, **options)

    return build


def test_both_ways_on_one_job(comm, make, make_buffer):
    """Buffers with and without NVLink beside each other: what comes is the same to the bit."""
    buffers = [make(), make_buffer(low_latency_mode=True)]
    assert [buf.low_latency_transport for buf in buffers] == ["NVSHMEM put", "NVLink"]
    for seed in range(4):
        sent = draw(seed, comm.size, [3 + rank for rank in range(comm.size)], num_experts=4 * comm.size)
        sums = []
        for buf in buffers:
            handle, routing = check_dispatch(buf, sent, hook=seed % 2 == 1)
            sums.append(
                check_combine(buf, handle, routing, seed, dispatched=sent.weights, use_logfmt=seed > 1)
            )
        assert to_host(sums[0]).tobytes() == to_host(sums[1]).tobytes()


@pytest.mark.parametrize("peers", [1, 2, 3])
def test_between_virtual_nodes(comm, make_buffer, backend, peers):
    """Stores inside a node, puts between them; and the other mode in turn."""
    if backend != "nvshmem":
        pytest.skip("puts are the GPU backend's")
    path = "direct" if comm.size % peers else None  # nodes of different sizes
    buf = make_buffer(
        low_latency_mode=True, num_max_nvl_peers=peers, path=path, preinitialize=True, timeout=20
    )
    several = comm.size > peers
    assert ("between nodes: NVSHMEM put" in str(buf.topology)) == several
    assert buf.low_latency_transport == ("NVLink, between nodes NVSHMEM put" if several else "NVLink")
    assert f"low-latency calls: {buf.low_latency_transport}" in str(buf.topology)
    for seed in range(4):
        sent = draw(seed, comm.size, [3 + 2 * rank for rank in range(comm.size)], num_experts=4 * comm.size)
        handle, routing = check_dispatch(buf, sent, hook=seed % 2 == 1)
        for reduction in ("rank", "source"):
            check_combine(buf, handle, routing, seed, dispatched=sent.weights, reduction=reduction)
        r, routed = rows.check_dispatch(buf, sent)
        rows.check_combine(buf, r.handle, routed, seed)
    buf.barrier()
    buf.reset()
    works(buf)


def test_a_late_rank_and_a_reset(comm, make):
    if comm.size == 1:
        pytest.skip("two ranks")
    buf = make(timeout=0.5)
    works(buf)
    late = comm.size - 1
    sent = draw(1, comm.size, 5, num_experts=4 * comm.size)
    if comm.rank != late:
        x, idx, weights = mine(buf, sent)
        error = late_error(buf, lambda: buf.low_latency_dispatch(x, idx, weights))
        assert type(error) is epcy.PeerTimeoutError and error.phase == "arrival", repr(error)
        # one that waits for the late rank tells the others that it has left
        assert error.ranks and comm.rank not in error.ranks
    comm.Barrier()
    buf.reset()
    for seed in range(3):
        works(buf, seed)


def test_without_tokens_of_a_rank_and_back(comm, make):
    """T changes from call to call, 0 included: mirrors hold rows of earlier calls, which nobody takes for new ones."""
    buf = make()
    for seed in range(8):
        tokens = [(seed * 7 + 5 * rank) % 17 if (seed + rank) % 3 else 0 for rank in range(comm.size)]
        sent = draw(seed, comm.size, tokens, num_experts=4 * comm.size, unused=0.3)
        handle, routing = check_dispatch(buf, sent, use_fp8=seed % 2 == 0, hook=seed % 3 == 0)
        for reduction in ("rank", "source"):
            given = draw(seed + 50, comm.size, tokens, num_experts=4 * comm.size).weights
            check_combine(
                buf, handle, routing, seed, dispatched=sent.weights, weights=given if seed % 2 else None,
                reduction=reduction, hook=seed % 4 == 1,
            )  # fmt: skip
