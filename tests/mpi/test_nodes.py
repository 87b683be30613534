"""Several nodes, virtual ones made by num_max_nvl_peers: rows, sums, bytes between nodes, and the smallest buffers."""

import time

import numpy as np
import pytest

import epcy
from epcy import reference
from mpi import low_latency_cases as low_latency
from mpi.cases import check_combine, check_dispatch, counted_rows, draw, raised, to_device, to_host, works

PATHS = ("hierarchical", "direct")
SMALLEST = {"node_chunk_tokens": 1, "num_node_buffers": 1}


@pytest.fixture(params=[1, 2, 4], ids=lambda peers: f"{peers} ranks a node")
def peers(request, comm):
    if comm.size <= request.param or comm.size % request.param:
        pytest.skip("nodes of one size, two at least")
    return request.param


@pytest.fixture
def nodes_of(peers, make_buffer):
    """A function that makes a Buffer over virtual nodes."""
    return lambda **options: make_buffer(num_max_nvl_peers=peers, **options)


def rows_between(buf, routing):
    """By source and rank of another node: the rows that a dispatch must send."""
    nodes = reference.ranks_by_node(buf.size, node_of_rank=buf.topology.node_of_rank)
    return reference.crossings(routing, nodes, buf.options["path"])


@pytest.mark.parametrize("path", [*PATHS, None])
def test_the_option(comm, peers, nodes_of, path):
    buf = nodes_of(path=path)
    assert buf.options["path"] == (path or "hierarchical")
    assert buf.topology.num_nodes == comm.size // peers and buf.topology.is_virtual
    assert str(buf.topology).startswith(f"{comm.size} ranks on {comm.size // peers} virtual nodes\n")
    works(buf)


def test_one_node_takes_either_path(comm, make_buffer):
    for path in PATHS:
        buf = make_buffer(path=path)
        works(buf)
        assert buf.stats().bytes_between_nodes == buf.stats().metadata_bytes_between_nodes == 0
    assert make_buffer().options["path"] == "direct"


@pytest.mark.parametrize("smallest", [{}, SMALLEST], ids=["usual", "smallest"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout, alignment", [("rank", 1), ("expert", 1), ("expert", 5)])
def test_exact(comm, nodes_of, layout, alignment, path, smallest):
    buf = nodes_of(path=path, dtype="float32", num_topk=3, num_max_recv_tokens=512, **smallest)
    for seed, dtype in enumerate(("bfloat16", "float16", "float32", "fp8")):
        tokens = [[0, 16, 5, 1][(rank + seed) % 4] for rank in range(comm.size)]
        sent = draw(
            seed, comm.size, tokens, num_experts=4 * comm.size, num_topk=3, dtype=dtype, special=True,
            weights=seed % 2 == 0,
        )  # fmt: skip
        r, routing = check_dispatch(buf, sent, layout=layout, alignment=alignment)
        kind = dtype if dtype != "fp8" else "bfloat16"
        check_combine(buf, r.handle, routing, seed, dtype=kind, special=True, num_biases=seed % 3)
        check_combine(buf, r.handle, routing, seed, dtype=kind, weights=False, staged=False)
        # The same routing with other rows, of another dtype.
        again = draw(
            seed + 9, comm.size, tokens, num_experts=4 * comm.size, num_topk=3, special=True
        )  # fmt: skip
        cached, _ = check_dispatch(buf, again, handle=r.handle, routing=routing)
        check_combine(buf, cached.handle, routing, seed + 1)


@pytest.mark.parametrize("path", PATHS)
def test_handles_are_kept(comm, nodes_of, path):
    buf = nodes_of(path=path)
    layers = [check_dispatch(buf, draw(seed, comm.size, 7, num_experts=4 * comm.size)) for seed in range(4)]
    for seed, (r, routing) in reversed(list(enumerate(layers))):
        check_combine(buf, r.handle, routing, seed, num_biases=1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_worst_case(comm, nodes_of, layout, path):
    buf = nodes_of(path=path, **SMALLEST)
    worst = [[None, 2, 16, 5][rank % 4] for rank in range(comm.size)]
    sent = draw(3, comm.size, [3 + rank for rank in range(comm.size)], num_experts=4 * comm.size)
    r, routing = check_dispatch(buf, sent, layout=layout, worst=worst)
    before = buf.stats().bytes_between_nodes
    assert before == rows_between(buf, routing)[comm.rank].sum() * 1024  # clipped rows do not travel
    check_combine(buf, r.handle, routing, 3)
    assert isinstance(raised(buf.check), epcy.CapacityError) == routing.overflow(comm.rank)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_tokens", [600, 2304])
def test_all_tokens_to_one_expert(comm, nodes_of, num_tokens, path):
    buf = nodes_of(path=path, num_max_tokens_per_rank=num_tokens, hidden=64)
    x, idx = counted_rows(comm, num_tokens, 64), np.zeros((num_tokens, 2), np.int64)
    r = buf.dispatch(*to_device(buf, (x, idx)))
    if comm.rank == 0:
        want = np.concatenate(
            [1 + 16 * (source % 8) + np.arange(num_tokens) % 16 for source in range(comm.size)]
        )
        assert np.array_equal(
            to_host(r.recv_x).astype(np.int64), np.broadcast_to(want[:, None], r.recv_x.shape)
        )
    else:
        assert r.recv_x.shape == (0, 64)
    assert np.array_equal(to_host(buf.combine(r.recv_x, r.handle).combined_x), x)


@pytest.mark.parametrize("smallest", [{}, SMALLEST], ids=["usual", "smallest"])
@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_bytes_between_nodes_are_the_fewest(comm, peers, nodes_of, layout, dtype, smallest):
    """A token crosses once a node, not once a rank or a lane, and so does a node's sum on its way back."""
    buf = nodes_of(num_topk=4, num_max_recv_tokens=1024, **smallest)
    sent = draw(5, comm.size, 16, num_experts=4 * comm.size, num_topk=4, dtype=dtype)
    row_bytes = 512 + 512 // 128 * 4 if dtype == "fp8" else 512 * 2
    fewest = np.zeros(comm.size, np.int64), np.zeros(comm.size, np.int64)  # sent, and sent back, by each rank
    local = comm.rank % peers
    for source, idx in enumerate(sent.idxs):
        for row in idx.tolist():
            for node in {expert // 4 // peers for expert in row if expert >= 0} - {source // peers}:
                fewest[0][source] += 1
                fewest[1][node * peers + source % peers] += 1
    assert (fewest[0] == rows_between(buf, reference.dispatch(
        sent.xs, sent.idxs, num_experts=4 * comm.size, layout=layout)[1]).sum(1)).all()  # fmt: skip
    r, routing = check_dispatch(buf, sent, layout=layout)
    assert buf.stats(reset=True).bytes_between_nodes == fewest[0][comm.rank] * row_bytes
    check_dispatch(buf, sent, handle=r.handle, routing=routing)
    stats = buf.stats(reset=True)
    assert stats.bytes_between_nodes == fewest[0][comm.rank] * row_bytes
    assert "to other nodes" in str(stats)
    check_combine(buf, r.handle, routing, 5, num_biases=1)
    assert buf.stats(reset=True).bytes_between_nodes == fewest[1][comm.rank] * 1024, local
    assert buf.stats().metadata_bytes_between_nodes == 0


def test_the_direct_path_sends_more(comm, nodes_of):
    sent = draw(5, comm.size, 16, num_experts=4 * comm.size, num_topk=4)
    for path in PATHS:
        buf = nodes_of(path=path, num_topk=4)
        _, routing = check_dispatch(buf, sent)
        assert buf.stats().bytes_between_nodes == rows_between(buf, routing)[comm.rank].sum() * 1024


@pytest.mark.parametrize("path", PATHS)
def test_threads_and_warmup(comm, nodes_of, path):
    buf = nodes_of(path=path, preinitialize=True, num_sms=3, check=True)
    for seed in range(5):
        works(buf, seed)
    buf.barrier()


def test_many_calls(comm, nodes_of):
    buf = nodes_of(node_chunk_tokens=3, stats=False)
    sent = draw(1, comm.size, 16, num_experts=4 * comm.size)
    r, routing = check_dispatch(buf, sent)
    for turn in range(100):
        r = buf.dispatch(to_device(buf, sent.xs[comm.rank]), handle=r.handle)
        if turn % 10 == 0:
            check_combine(buf, r.handle, routing, turn)
    works(buf)


# ---- low latency


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("reduction", ["rank", "source"])
def test_low_latency(comm, nodes_of, reduction, hook):
    buf = nodes_of(low_latency_mode=True, num_topk=3, dtype="float32")
    assert "between nodes" in buf.low_latency_transport
    for seed, (dtype, cast) in enumerate(
        (("bfloat16", {}), ("float16", {"use_fp8": False}), ("bfloat16", {"round_scale": True, "use_ue8m0": True}),
         ("float32", {"use_fp8": False}))
    ):  # fmt: skip
        tokens = [[0, 16, 5, 1][(rank + seed) % 4] for rank in range(comm.size)]
        sent = draw(seed, comm.size, tokens, num_experts=4 * comm.size, num_topk=3, dtype=dtype, special=True)
        handle, routing = low_latency.check_dispatch(buf, sent, hook=hook, **cast)
        low_latency.check_combine(
            buf, handle, routing, seed, dtype=dtype, dispatched=sent.weights, hook=hook, reduction=reduction
        )
    if buf.backend == "host":  # kernels do not count what low-latency calls put
        assert buf.stats().bytes_between_nodes > 0


@pytest.mark.host_only("kernels do not count what low-latency calls put")
def test_low_latency_rows_cross_once_a_rank(comm, peers, nodes_of):
    buf = nodes_of(low_latency_mode=True, num_topk=4)
    sent = draw(3, comm.size, 16, num_experts=4 * comm.size, num_topk=4)
    handle, routing = low_latency.check_dispatch(buf, sent, use_fp8=False)
    ranks = [{e // 4 for e in row if e >= 0} for row in sent.idxs[comm.rank].tolist()]
    crossing = sum(rank // peers != comm.rank // peers for row in ranks for rank in row)
    assert buf.stats(reset=True).bytes_between_nodes == crossing * 1024
    low_latency.check_combine(buf, handle, routing, 3, dispatched=sent.weights)
    back = sum(  # a row a lane: the source does the whole sum
        len({e for e in row if e >= 0 and e // 4 == comm.rank})
        for source, idx in enumerate(sent.idxs) if source // peers != comm.rank // peers for row in idx.tolist()
    )  # fmt: skip
    assert buf.stats().bytes_between_nodes == back * 1024


def test_both_modes_in_turn(comm, nodes_of):
    buf = nodes_of(low_latency_mode=True, path="hierarchical", **SMALLEST)
    for seed in range(12):
        sent = draw(seed, comm.size, 9, num_experts=4 * comm.size)
        first, routing = low_latency.check_dispatch(buf, sent, hook=seed % 2 == 1)
        works(buf, seed)
        low_latency.check_combine(buf, first, routing, seed, dispatched=sent.weights, hook=seed % 3 == 1)


@pytest.mark.host_only("of its messages")
@pytest.mark.parametrize("num_experts", [8, 512])
def test_no_call_waits_for_one_that_has_not_begun(comm, nodes_of, num_experts):
    """A record of many experts goes in pieces, each of which leaves alone: the end of a call waits for nobody."""
    num_experts = num_experts // 2 * comm.size
    last, pause = comm.rank == comm.size - 1, 1.6
    buf = nodes_of(
        low_latency_mode=True, num_experts=num_experts, num_max_low_latency_tokens_per_rank=2, timeout=20
    )
    x, idx = np.ones((2, 512), np.float16), np.array([[0, num_experts - 1]] * 2)
    given = idx if last else idx + num_experts
    for name, call in {
        "barrier": buf.barrier,
        "dispatch": lambda: buf.dispatch(x, idx),
        "refusal": lambda: raised(lambda: buf.dispatch(x, given)),
        "low latency": lambda: buf.low_latency_dispatch(x, idx, use_fp8=False),
    }.items():
        comm.Barrier()
        if last and name == "refusal":  # late in this call, which the others have left
            time.sleep(pause / 4)
        start = time.monotonic()
        call()
        took = time.monotonic() - start
        if last != (name == "refusal"):  # outside of MPI, too
            time.sleep(pause)
        assert max(comm.allgather(took)) < pause / 2, name
    works(buf)
