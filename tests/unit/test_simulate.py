"""The simulator: bytes are conserved and the least possible, times hand-computed, monotone, and the same for a seed."""

from dataclasses import replace

import numpy as np
import pytest

from epcy import recording
from epcy.errors import ArgumentError
from epcy.options import resolve
from epcy.recording.checks import PLACES
from epcy.simulate import MACHINES, Workload, simulate
from epcy.simulate.engine import Simulation
from epcy.simulate.paths import Cluster, combine, dispatch, low_latency_combine, low_latency_dispatch
from epcy.simulate.predict import OPERATIONS, routing_of
from epcy.simulate.traffic import count, draw

SMALL = Workload(2, 4, 48, hidden=256, num_experts=32, num_topk=6)
MACHINE = MACHINES["h200"]
# A machine whose times are whole numbers: 1 GB/s is 1000 bytes a microsecond.
PLAIN = replace(
    MACHINE, push_gbps=1.0, pull_gbps=1.0, flag_us=1.0, sm_gbps=2.0, copy_gbps=4.0, nic_gbps=0.5, nic_us=3.0,
    message_ns=0.0, launch_us=5.0, count_us=0.0, dispatch_us=7.0, combine_us=9.0,
)  # fmt: skip


def destinations(idx, experts_of_one):
    """Count, the plain way, the different owners of a token's experts, over all tokens."""
    return [sorted({int(e) // experts_of_one for e in token if e >= 0}) for token in idx]


def cluster_of(operation, work, blocks=3, machine=MACHINE):
    ids, num_experts = routing_of(work)
    cluster = Cluster(machine, work.num_ranks, work.num_sms)
    traffic = count(ids, num_experts, work.num_nodes, blocks)
    operation(cluster, traffic, work.path, 100)
    cluster.simulation.run()
    return cluster, ids


# --- the engine


def test_one_server_serves_in_order():
    s = Simulation()
    server = s.server(gbps=1.0, item_us=0.5, delay_us=2.0)
    first, second = s.piece((server,), (1000,)), s.piece((server,), (3000,), num_items=2)
    assert s.run() == pytest.approx(1.5 + 4.0 + 2.0)
    assert s.end_us[first] == pytest.approx(3.5) and s.end_us[second] == pytest.approx(7.5)
    assert s.busy_us[server] == pytest.approx(5.5) and s.num_bytes[server] == 4000


def test_places_work_at_the_same_time():
    s = Simulation()
    server = s.server(gbps=1.0, num_places=2)
    for _ in range(3):
        s.piece((server,), (1000,))
    assert s.run() == pytest.approx(2.0)


def test_a_piece_waits_for_all_that_come_before_it():
    s = Simulation()
    fast, slow, last = s.server(2.0), s.server(1.0), s.server(1.0)
    both = s.piece((fast,), (2000,)), s.piece((slow,), (5000,))
    joined = s.piece((last,), (1000,), after=both)
    assert s.run() == pytest.approx(6.0) and s.end_us[joined] == pytest.approx(6.0)


def test_no_pieces_take_no_time():
    assert Simulation().run() == 0.0


# --- bytes


@pytest.mark.parametrize("operation", [dispatch, combine])
def test_hierarchical_bytes_between_nodes_are_the_deduplicated_minimum(operation):
    cluster, ids = cluster_of(operation, SMALL)
    least = sum(
        node != rank // 4 for rank, idx in enumerate(ids) for nodes in destinations(idx, 16) for node in nodes
    )
    sent = sum(cluster.simulation.num_bytes[rank.send] for rank in cluster.ranks)
    assert sent == 100 * least > 0


@pytest.mark.parametrize("operation", [dispatch, combine, low_latency_dispatch, low_latency_combine])
@pytest.mark.parametrize("path", ["direct", "expert"])
def test_direct_bytes_between_nodes_are_one_row_for_each_rank_or_lane(operation, path):
    cluster, ids = cluster_of(operation, replace(SMALL, path=path))
    rows = sum(
        owner // 4 != rank // 4
        for rank, idx in enumerate(ids)
        for token, ranks in zip(idx, destinations(idx, 4), strict=True)
        for owner in (ranks if path == "direct" else [int(e) // 4 for e in token])
    )
    assert sum(cluster.simulation.num_bytes[rank.send] for rank in cluster.ranks) == 100 * rows > 0


@pytest.mark.parametrize(
    ("operation", "path"),
    [
        *((operation, path) for operation in (dispatch, combine) for path in ("direct", "hierarchical", "expert")),
        *((low_latency_dispatch, path) for path in ("direct", "expert")),
        *((low_latency_combine, path) for path in ("direct", "expert")),
    ],
)  # fmt: skip
def test_what_leaves_arrives(operation, path):
    cluster, _ = cluster_of(operation, replace(SMALL, path=path))
    num_bytes, ranks = cluster.simulation.num_bytes, cluster.ranks
    assert sum(num_bytes[r.send] for r in ranks) == sum(num_bytes[r.receive] for r in ranks)
    left = sum(num_bytes[r.push] + num_bytes[r.pull] for r in ranks)
    assert left == sum(num_bytes[r.arrive] for r in ranks) > 0
    assert min(cluster.simulation.end_us) >= 0  # every piece has come to its end


@pytest.mark.parametrize("operation", [dispatch, combine])
def test_every_row_passes_through_the_sms_of_its_path(operation):
    """Every (token, destination rank) is stored, or summed, once by somebody's SMs."""
    cluster, ids = cluster_of(operation, SMALL)
    rows = sum(len(ranks) for idx in ids for ranks in destinations(idx, 4))
    crossing = sum(
        n != rank // 4 for rank, idx in enumerate(ids) for nodes in destinations(idx, 16) for n in nodes
    )
    # And the source sums what comes from each node.
    expected = rows + (crossing if operation is combine else 0)
    assert sum(cluster.simulation.num_bytes[r.sms] for r in cluster.ranks) == 100 * expected


def test_blocks_change_no_byte():
    totals = {
        tuple(
            sum(cluster.simulation.num_bytes[getattr(r, kind)] for r in cluster.ranks)
            for kind in ("send", "push", "sms")
        )
        for cluster in (cluster_of(dispatch, SMALL, blocks)[0] for blocks in (1, 5, 48))
    }
    assert len(totals) == 1


# --- times


def test_a_tiny_dispatch_by_hand():
    """Two ranks of a node; each sends one row of 1000 bytes to the other: an SM, the link, and the link's other end."""
    work = Workload(1, 2, 1, hidden=500, num_experts=2, num_topk=1, path="direct", num_sms=1)
    one = simulate("dispatch", work, PLAIN, ([np.array([[1]]), np.array([[0]])], 2))
    assert one.fixed_us == 5.0 + 1.0 + 1.0
    assert one.us == pytest.approx(7.0 + 0.5 + 1.0 + 1.0)
    assert one.nvlink_bytes == 2000 and one.nic_bytes == 0 and one.bottleneck == "NVLink"


def test_a_tiny_hierarchical_dispatch_by_hand():
    """Two nodes of two ranks; rank 0 sends one token to ranks 2 and 3: NIC once, then rank 2 copies and forwards."""
    work = Workload(2, 2, 1, hidden=500, num_experts=4, num_topk=2, num_sms=1)
    unused = np.array([[-1, -1]])
    ids = [np.array([[2, 3]]), unused, unused, unused], 4
    one = simulate("dispatch", work, PLAIN, ids)
    # NIC out 2, on the way 3, NIC in 2; rank 2's only SM takes the row for rank 3 (0.5) first, which then takes the
    # link and arrives (1 + 1), and its own (0.5) meanwhile.
    assert one.us - one.fixed_us == pytest.approx(2.0 + 3.0 + 2.0 + 0.5 + 1.0 + 1.0)
    assert one.nic_bytes == 1000 and one.nvlink_bytes == 1000
    direct = simulate("dispatch", replace(work, path="direct"), PLAIN, ids)
    assert direct.nic_bytes == 2000 and direct.nvlink_bytes == 0
    assert direct.us - direct.fixed_us == pytest.approx(4.0 + 3.0 + 2.0)


def test_a_tiny_hierarchical_combine_by_hand():
    """The way back: rank 2 pulls rank 3's row (1 + 1), sums it (0.5); then NIC out 2, 3, NIC in 2, and a sum of 0.5."""
    work = Workload(2, 2, 1, hidden=500, num_experts=4, num_topk=2, num_sms=1)
    unused = np.array([[-1, -1]])
    one = simulate("combine", work, PLAIN, ([np.array([[2, 3]]), unused, unused, unused], 4))
    assert one.us - one.fixed_us == pytest.approx(2.0 + 0.5 + 2.0 + 3.0 + 2.0 + 0.5)


def test_a_tiny_low_latency_dispatch_by_hand():
    """One row to both experts of the other rank: 1120 bytes are 1280 in lines, there and at its end; written twice."""
    work = Workload(1, 2, 1, hidden=560, num_experts=4, num_topk=2, path="direct")
    ids = [np.array([[2, 3]]), np.array([[-1, -1]])], 4
    one = simulate("low_latency_dispatch", work, PLAIN, ids)
    assert one.us == pytest.approx(7.0 + 1.28 + 1.28 + 2 * 1.12 / 4)


@pytest.mark.parametrize("operation", list(OPERATIONS))
@pytest.mark.parametrize("rate", ["nic_gbps", "push_gbps", "pull_gbps", "sm_gbps", "copy_gbps"])
def test_more_bandwidth_never_takes_longer(operation, rate):
    work = replace(SMALL, path="direct" if "low" in operation else "hierarchical")
    times = [
        simulate(operation, work, replace(MACHINE, **{rate: getattr(MACHINE, rate) * share})).us
        for share in (0.02, 0.1, 0.5, 1.0, 4.0)
    ]
    # Another order at a server may cost a piece or two (Graham's anomaly), never more than that.
    assert all(after <= before * 1.02 for before, after in zip(times, times[1:], strict=False))
    assert times[-1] <= times[0]


@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_no_faster_than_the_busiest_server(operation):
    work = replace(SMALL, path="direct" if "low" in operation else "hierarchical")
    one = simulate(operation, work, MACHINE)
    assert one.us >= one.floor_us > one.fixed_us
    assert max(one.busy.values()) <= 1.0 + 1e-9


def test_a_seed_says_everything():
    assert simulate("dispatch", SMALL, MACHINE) == simulate("dispatch", SMALL, MACHINE)
    assert simulate("dispatch", SMALL, MACHINE) != simulate("dispatch", replace(SMALL, seed=1), MACHINE)


# --- routing


def test_drawn_experts_are_distinct_and_group_limited():
    idx = draw(200, 32, 6, seed=3, rank=1, num_groups=4, most_groups=2)
    assert all(len(set(token)) == 6 for token in idx.tolist())
    assert max(len(nodes) for nodes in destinations(idx, 8)) == 2
    free = draw(200, 32, 6, seed=3, rank=1, num_groups=4, most_groups=4)
    assert max(len(nodes) for nodes in destinations(free, 8)) > 2
    assert draw(3, 4, 4, 0, 0, 1, 1).tolist() == [[0, 1, 2, 3]] * 3


def test_a_recording_gives_the_routing(tmp_path):
    rng = np.random.default_rng(5)
    ids = [rng.integers(0, 8, (tokens, 2)).astype(np.int16) for tokens in (5, 9)]
    sizes = {
        "num_max_tokens_per_rank": 16,
        "hidden": 64,
        "num_experts": 8,
        "num_topk": 2,
        "num_max_recv_tokens": 32,
    }
    options = {name: value.value for name, value in resolve(sizes, {}).items() if name not in PLACES}
    args = {
        "dtype": "bfloat16", "has_weights": True, "layout": "rank", "expert_alignment": 1, "num_worst_tokens": 0,
        "num_sms": None, "own_output": False,
    }  # fmt: skip
    call = recording.Call(0, 0, "dispatch", [args] * 2, None, [5, 9], [0, 1], np.zeros((2, 2), np.int64))
    job = recording.Recording(2, "host", [recording.Recorded((0, 1), options)], [call], ids)
    recording.write(tmp_path / "run.npz", job)
    work = Workload(1, 2, 1, hidden=64, num_topk=2, path="direct", routing=str(tmp_path / "run.npz"))
    found, num_experts = routing_of(work)
    assert num_experts == 8 and [idx.tolist() for idx in found] == [idx.tolist() for idx in ids]
    wider, _ = routing_of(replace(work, num_nodes=2))
    assert sum(len(idx) for idx in wider) == 14 and len(wider) == 4
    assert simulate("dispatch", work, MACHINE).num_rows == pytest.approx(
        sum(len(ranks) for idx in ids for ranks in destinations(idx, 4)) / 2
    )
    with pytest.raises(ArgumentError, match="routing"):
        routing_of(replace(work, routing=str(tmp_path / "none.npz")))
