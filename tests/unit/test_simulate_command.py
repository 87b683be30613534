"""The simulator's arguments, constants, table of memory and command line."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

import epcy
from epcy.errors import ArgumentError
from epcy.simulate import MACHINES, Workload, footprints, simulate
from epcy.simulate.machines import calibrated, machine_of
from epcy.simulate.predict import OPERATIONS

SMALL = Workload(2, 4, 48, hidden=256, num_experts=32, num_topk=6)
MACHINE = MACHINES["h200"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_nodes": 0}, "num_nodes: expected a whole number from 1, got 0"),
        ({"num_nodes": 1.5}, "num_nodes"),
        ({"num_nodes": 3}, "num_experts: expected a multiple of the 12 ranks, got 32"),
        ({"num_nodes": 1024}, "4096 ranks"),
        ({"num_topk": 33}, "num_topk: expected at most the 32 experts"),
        ({"dtype": "int8"}, "dtype"),
        ({"path": "teleport"}, "path"),
        ({"num_groups": 3}, "num_groups: expected 1 to 2"),
        ({"num_groups": 1, "num_topk": 17}, "num_groups: 1 nodes have fewer"),
        ({"seed": -1}, "seed"),
    ],
)
def test_nonsense_is_an_argument_error(change, words):
    with pytest.raises(ArgumentError, match=words):
        replace(SMALL, **change)


def test_nonsense_for_a_machine():
    with pytest.raises(ArgumentError, match="hierarchical"):
        simulate("low_latency_dispatch", SMALL, MACHINE)
    with pytest.raises(ArgumentError, match="num_sms: expected at most the 132"):
        simulate("dispatch", replace(SMALL, num_sms=133), MACHINE)
    with pytest.raises(ArgumentError, match="operation"):
        simulate("scatter", SMALL, MACHINE)
    with pytest.raises(ArgumentError, match="machine: expected one of"):
        machine_of("abacus")
    for changes in (
        {"nic_gbps": 0.0},
        {"nic_us": -1.0},
        {"nic_us": float("nan")},
        {"colour": 1.0},
        {"num_sms": 1.5},
    ):
        with pytest.raises(ArgumentError, match="set"):
            machine_of("h200", changes)
    assert machine_of("h200", {"nic_gbps": 25.0}).nic_gbps == 25.0


def test_calibrated_constants_take_the_place_of_ours():
    c = epcy.model.Constants(12.0, 0.5, 0.0, 0.0, 16, 40.0, 600.0, (1e6,), (600.0,))
    machine = calibrated(MACHINE, {"dispatch": c, "low_latency_combine": c}, 4)
    assert (
        machine.sm_gbps == 40.0 and machine.push_gbps == pytest.approx(450.0) and machine.combine_us == 12.0
    )
    assert machine.launch_us == pytest.approx(12.0 - 2 * MACHINE.flag_us)
    assert machine.nic_gbps == MACHINE.nic_gbps and machine.pull_gbps == MACHINE.pull_gbps


# --- memory and queue pairs


def test_footprint_is_what_a_buffer_says():
    found = footprints(num_tokens=64, hidden=512, num_experts=64, num_topk=4, num_low_latency_tokens=16)
    assert [one.num_ranks for one in found] == [2**n for n in range(1, 12)]
    for one in found:
        hint = epcy.Buffer.size_hint(
            one.num_ranks, num_max_tokens_per_rank=64, hidden=512, num_experts=one.num_experts, num_topk=4,
            low_latency_mode=True, num_max_low_latency_tokens_per_rank=16, backend="nvshmem",
        )  # fmt: skip
        assert one.total == hint["total"] and one.control == hint["control"]
        assert one.total == one.control + one.receive + one.combine + one.low_latency
        assert one.num_qps == 2 * (one.num_ranks - 1)
        assert one.num_used_qps == 2 * (max(1, one.num_ranks // 8) - 1)
        assert one.bounded_total <= one.total
    with pytest.raises(ArgumentError, match="most_ranks"):
        footprints(most_ranks=4096)
    with pytest.raises(ArgumentError, match="num_qps_per_rank"):
        footprints(num_qps_per_rank=0)
    with pytest.raises(ArgumentError, match="num_experts"):
        footprints(num_experts=0)


# --- the command


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "epcy", "simulate", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_command():
    shape = ("--gpus-per-node", "4", "--tokens", "32", "--experts", "32", "--hidden", "256")
    told = run("--nodes", "2", *shape)
    assert told.returncode == 0, told.stderr
    assert "8 ranks on 2 nodes of 4 h200" in told.stdout and "hierarchical" in told.stdout
    found = json.loads(run("--nodes", "2", *shape, "--json").stdout)
    assert [one["operation"] for one in found["predictions"]] == list(OPERATIONS)
    # The same in another process.
    assert found["predictions"][0]["us"] == simulate("dispatch", Workload(2, 4, 32, 256, 32), MACHINE).us
    wrong = run("--nodes", "3")
    assert wrong.returncode == 2 and wrong.stderr.startswith("epcy: num_experts:")
    assert "2048" in run("--footprint").stdout
    assert "arXiv" in run("--constants").stdout
    assert run("--set", "nic_gbps").returncode == 2
    assert run("--calibration", "/nowhere/calibration.json").returncode == 2
