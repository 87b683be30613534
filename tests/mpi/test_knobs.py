"""The knobs of the documentation: for each, that it changes something, and that the change can be seen."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from epcy.options import BY_NAME
from mpi import low_latency_cases
from mpi.cases import check_combine, check_dispatch, draw, to_device, to_host
from parallel import ROOT

KNOBS = (
    "num_max_nvl_peers",
    "allow_nvlink_for_low_latency_mode",
    "num_qps_per_rank",
    "rdma_transport",
    "preinitialize",
)
E = 4


@pytest.mark.parametrize("peers", [1, 2, 3, 100])
def test_num_max_nvl_peers(comm, make_buffer, backend, peers):
    nodes = [rank // peers for rank in range(comm.size)]
    even = comm.size % peers == 0 or peers > comm.size
    buf = make_buffer(num_max_nvl_peers=peers, path=None if even else "direct")
    assert buf.topology.node_of_rank == tuple(nodes) and buf.topology.num_machines == 1
    assert buf.topology.num_nodes == max(nodes) + 1 and buf.topology.is_virtual == (max(nodes) > 0)
    if max(nodes):
        assert str(buf.topology).startswith(f"{comm.size} ranks on {max(nodes) + 1} virtual nodes")
    sent = draw(1, comm.size, 6, num_experts=E * comm.size)
    idx = sent.idxs[comm.rank]
    per_node = to_host(buf.get_dispatch_layout(to_device(buf, idx))[1])
    owner = np.where(idx >= 0, idx // E // peers, -1)
    assert per_node.tolist() == [(owner == node).any(1).sum() for node in range(max(nodes) + 1)]
    r, routing = check_dispatch(buf, sent)  # not a bit of a row changes
    check_combine(buf, r.handle, routing, 2)


def test_allow_nvlink_for_low_latency_mode(comm, make_buffer, backend):
    """It chooses what rows travel by, and changes no bit."""
    for allowed, name in ((True, "NVLink"), (False, "NVSHMEM put")):
        buf = make_buffer(low_latency_mode=True, allow_nvlink_for_low_latency_mode=allowed)
        assert buf.options["allow_nvlink_for_low_latency_mode"] is allowed
        # the host backend has nothing else to choose from
        assert buf.low_latency_transport == ("shared memory" if backend == "host" else name)
        sent = draw(3, comm.size, 6, num_experts=E * comm.size)
        handle, routing = low_latency_cases.check_dispatch(buf, sent)
        low_latency_cases.check_combine(buf, handle, routing, 3, dispatched=sent.weights)


@pytest.mark.host_only("settings of the process: on nvshmem they would be those of every test")
def test_settings_of_the_process_do_nothing_here(comm, make_buffer):
    before = {name: value for name, value in os.environ.items() if name.startswith("NVSHMEM_")}
    for knobs in ({"num_qps_per_rank": 4, "rdma_transport": "proxy"}, {"num_qps_per_rank": 8}):
        buf = make_buffer(**knobs)
        assert {name: buf.options[name] for name in knobs} == knobs
    assert {name: value for name, value in os.environ.items() if name.startswith("NVSHMEM_")} == before


@pytest.mark.parametrize("low_latency", [False, True])
def test_preinitialize(make_buffer, low_latency):
    cold = make_buffer(low_latency_mode=low_latency).stats()
    warm = make_buffer(low_latency_mode=low_latency, preinitialize=True).stats()
    assert cold.num_calls == 0 and cold.heap["receive"].high_water_bytes == 0
    assert warm.num_calls > 0 and warm.heap["receive"].high_water_bytes > 0
    assert {"dispatch", "combine"} <= set(warm.kernels)
    assert ("low_latency_dispatch" in warm.kernels) == low_latency


@pytest.mark.host_only("one command")
def test_the_command_tells(comm):
    if comm.size > 1:
        pytest.skip("run with one rank")
    values = dict(zip(KNOBS, (16, False, 4, "ibgda", True), strict=True))
    env = {BY_NAME[name].env: str(value) for name, value in values.items()}
    done = subprocess.run(
        [sys.executable, "-m", "epcy", "--json"], env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    options = {one["name"]: one for one in json.loads(done.stdout)["options"]}
    for name, value in values.items():
        assert (options[name]["value"], options[name]["origin"]) == (value, BY_NAME[name].env)


def test_the_page_has_every_knob():
    page = (ROOT / "docs/knobs.md").read_text()
    for name in KNOBS:
        assert f"| `{name}` |" in page
