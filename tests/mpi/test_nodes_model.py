"""Several nodes and the model: explain's bytes are those that are counted, constants of the network, --predict."""

import json
from dataclasses import asdict
from itertools import combinations

import numpy as np
import pytest

import epcy
from epcy import calibrate, links, model, reference
from mpi.cases import settle, to_device, to_host
from parallel import ROOT, launch


@pytest.fixture(autouse=True)
def cache(same, tmp_path, monkeypatch):
    """A folder of the test's own, which all ranks share: nothing is known of the machine."""
    monkeypatch.setenv("EPCY_CACHE_DIR", same(str(tmp_path / "cache")))


@pytest.fixture(params=[1, 2])
def peers(request, comm):
    if comm.size <= request.param or comm.size % request.param:
        pytest.skip("nodes of one size, two at least")
    return request.param


def every_pair(comm):
    """Ids of as many tokens as there are pairs of experts: what random routing moves on average, this moves."""
    return np.array(list(combinations(range(4 * comm.size), 2)), np.int64)


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("path", ["hierarchical", "direct"])
def test_bytes_are_those_that_are_counted(comm, make_buffer, peers, path, layout):
    idx = every_pair(comm)
    buf = make_buffer(
        num_max_nvl_peers=peers, path=path, num_max_tokens_per_rank=len(idx), dtype="float16",
        num_max_recv_tokens=2 * len(idx) * comm.size,
    )  # fmt: skip
    x, ids = to_device(buf, (np.ones((len(idx), 512), np.float16), idx))
    buf.stats(reset=True)
    r = buf.dispatch(x, ids, layout=layout)
    settle(buf)  # a GPU's calls count when they end
    seen = {"dispatch": buf.stats(reset=True)}
    y = buf.combine_input(r.handle)
    y[...] = r.recv_x
    buf.combine(y, r.handle)
    settle(buf)
    seen["combine"] = buf.stats(reset=True)
    for op, stats in seen.items():
        inside, between = buf.explain(op, len(idx), layout=layout).crossings
        assert between.kind == "network" and between.num_bytes == pytest.approx(
            stats.bytes_between_nodes, abs=1e-3
        )
        assert inside.kind in ("shared memory", "NVLink")
        if path == "direct":
            assert inside.num_bytes + between.num_bytes == pytest.approx(stats.bytes_moved, abs=1e-3)
        else:  # a partner's rows are passed on, too
            routing = reference.dispatch(
                [to_host(x)] * comm.size, [idx] * comm.size, num_experts=4 * comm.size
            )[1]
            to_other = routing.counts[0][1] if comm.size > 1 else 0
            assert inside.num_rows == pytest.approx(comm.size // peers * (peers - 1) * to_other)


@pytest.mark.host_only("kernels do not count what low-latency calls put")
def test_low_latency_bytes_are_those_that_are_counted(comm, make_buffer, peers):
    idx = every_pair(comm)
    buf = make_buffer(
        num_max_nvl_peers=peers, low_latency_mode=True, num_max_tokens_per_rank=len(idx), dtype="float16",
        num_max_low_latency_tokens_per_rank=len(idx),
    )  # fmt: skip
    x, weights = np.ones((len(idx), 512), np.float16), np.ones(idx.shape, np.float32)
    for dtype in ("fp8", "float16"):
        buf.stats(reset=True)
        handle = buf.low_latency_dispatch(x, idx, weights, use_fp8=dtype == "fp8")[2]
        there = buf.stats(reset=True).bytes_between_nodes
        told = buf.explain("low_latency_dispatch", len(idx), dtype=dtype)
        assert told.crossings[1].num_bytes == pytest.approx(there, abs=1e-3)
        assert f"of {comm.size // peers} nodes, direct" in str(told)
        y = buf.low_latency_combine_input(handle, np.float16)
        buf.low_latency_combine(y, idx, weights, handle, zero_copy=True)
        back = buf.stats(reset=True).bytes_between_nodes
        told = buf.explain("low_latency_combine", len(idx))
        assert told.crossings[1].num_bytes == pytest.approx(back, abs=1e-3)


def constants():
    return model.Constants(20.0, 0.0, 0.0, 0.0, 1, 4.0, 4.0, (1e6,), (4.0,))


def test_the_network_comes_from_a_data_sheet_or_from_calibrate(comm, backend, make_buffer, peers):
    num_nodes = comm.size // peers
    buf = make_buffer(num_max_nvl_peers=peers)
    told = buf.explain("dispatch", 64)
    assert told.predicted_us is None and told.crossings[1].floor_us > 0 and told.crossings[0].floor_us is None
    assert "data sheet" in told.crossings[1].source and "data sheet" in str(told)
    comm.Barrier()
    if comm.rank == 0:
        links.keep(backend, comm.size, num_nodes, links.Network(2.0, 7.0, "measured"))
        model.measured.put(
            "calibration",
            model.measured.key_of(backend, comm.size, num_nodes, "dispatch"),
            json.loads(json.dumps(asdict(constants()))),
        )
    comm.Barrier()
    told = buf.explain("dispatch", 64, num_sms=1)
    between = told.load.rows_between * told.load.row_bytes
    assert told.terms_us["latency"] == 21.0 and told.terms_us["rows"] == pytest.approx(
        told.load.num_bytes / 4e3
    )
    more = between / 2e3 if backend == "host" else max(0.0, between / 2e3 - told.terms_us["rows"])
    assert told.terms_us["network"] == pytest.approx(more)
    assert told.predicted_us == pytest.approx(20 + 21 + told.terms_us["rows"] + more)
    assert told.floor_us == pytest.approx(max(told.load.num_bytes / 4e3, between / 2e3))
    assert "measured by calibrate" in str(told) and "data sheet" not in str(told)
    json.dumps(told.as_dict())


def test_one_node_has_no_network(comm, make_buffer):
    told = make_buffer().explain("dispatch", 16)
    assert told.nodes is None and told.crossings == ()
    assert "network" not in str(told)


@pytest.mark.parametrize(
    "entry", [{"gbps": 0.0, "latency_us": 1.0}, {"gbps": 1.0, "latency_us": -1.0}, {"gbps": "9"}]
)
def test_a_bad_network_is_told(comm, backend, make_buffer, peers, entry):
    buf = make_buffer(num_max_nvl_peers=peers)
    if comm.rank == 0:
        key = model.measured.key_of(backend, comm.size, comm.size // peers, "network")
        model.measured.put("calibration", key, entry)
    comm.Barrier()
    with pytest.raises(epcy.ArgumentError, match="EPCY_CACHE_DIR: .*network"):
        buf.explain("dispatch", 16)


@pytest.mark.slow
@pytest.mark.host_only("of nvshmem the network is not measured")
def test_calibrate_measures_the_network(comm, backend, make_buffer, monkeypatch, peers):
    monkeypatch.setenv("EPCY_NUM_MAX_NVL_PEERS", str(peers))
    said = []
    calibrate.calibrate(comm, backend, seconds=1.0, say=said.append)
    comm.Barrier()
    told = make_buffer().explain("dispatch", 256)
    assert said and said[0].startswith("network: ")
    assert told.crossings[1].source == "measured by calibrate" and told.crossings[1].gbps > 0
    assert {"fixed", "lanes", "rows", "latency", "network"} == set(told.terms_us)


@pytest.mark.slow
def test_the_bench_predicts(comm):
    if comm.size > 1:
        pytest.skip("a job of its own: run with one rank")
    env = {"PYTHONPATH": str(ROOT), "EPCY_NUM_MAX_NVL_PEERS": "1"}
    bench = ["-m", "mpi4py", "-m", "epcy.bench", "dispatch", "combine", "-b", "64", "-e", "64", "-n", "5", "-w", "1",
             "--hidden", "512", "--experts", "8", "--topk", "2", "--backend", "host", "--predict"]  # fmt: skip
    refused = launch(2, bench, timeout=60, env=env)
    assert refused.returncode == 2 and "calibrate" in refused.stderr, refused.stdout + refused.stderr
    done = launch(
        2,
        ["-m", "mpi4py", "-m", "epcy", "calibrate", "--seconds", "1", "--backend", "host"],
        timeout=120,
        env=env,
    )
    assert done.returncode == 0 and "network: " in done.stdout, done.stdout + done.stderr
    done = launch(2, bench, timeout=60, env=env)
    assert done.returncode == 0 and done.stdout.count("network ") >= 2, done.stdout + done.stderr
