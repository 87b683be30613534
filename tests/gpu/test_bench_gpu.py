"""The bench on GPUs, small shapes: no row wrong in any case, eager and in graphs, beside each baseline."""

import json

import pytest

from epcy.bench.__main__ import main

cupy = pytest.importorskip("cupy")

SMALL = ["--backend", "nvshmem", "-b", "3", "-e", "48", "-f", "16", "-n", "6", "-w", "2", "--hidden", "512",
         "--topk", "3"]  # fmt: skip


@pytest.fixture
def measure(comm, backend, same, tmp_path):
    """A function `measure(*options)`: the rows of a run."""
    if backend != "nvshmem":
        pytest.skip("the host's runs are in tests/mpi/test_bench_run.py")

    def run(*options):
        path = same(str(tmp_path / "rows.json"))
        assert main([*SMALL, "--experts", str(4 * comm.size), *options, "--json", path]) == 0
        comm.Barrier()
        with open(path, encoding="utf-8") as file:
            return json.load(file)

    return run


def check(written, num_rows):
    assert written["schema"] == 1
    assert len(written["rows"]) == num_rows
    for row in written["rows"]:
        assert row["wrong"] == 0
        assert (row["baseline_wrong"] or 0) == 0
        assert 0 < row["us_min"] <= row["us_p50"] <= row["us_p99"]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--cached"],
        ["--combine-from", "array"],
        ["--dtype", "fp8"],
        ["--dtype", "fp16", "--routing", "skewed"],
        ["--dtype", "fp32", "--routing", "one-hot"],
        ["--layout", "expert", "--expert-alignment", "128"],
        ["--layout", "expert", "--cached", "--combine-from", "array"],
        ["--num-sms", "8"],
        ["--graph"],
        ["--graph", "--cached"],
        ["--graph", "--dtype", "fp8", "--calls", "3"],
        ["--graph", "--layout", "expert", "--expert-alignment", "16", "--calls", "1"],
        ["--graph", "--combine-from", "array"],
    ],
    ids=" ".join,
)
def test_no_row_is_wrong(measure, options):
    check(measure(*options), 6)


@pytest.mark.parametrize("options", [[], ["--cached", "--dtype", "fp8"], ["--graph"]], ids=" ".join)
def test_baselines(measure, comm, options):
    written = measure("--baseline", "cupy,nccl-alltoall", *options)
    check(written, 6)
    if written["env"]["nccl"] is None:
        pytest.skip("NCCL does not start here")
    for row in written["rows"]:
        assert [one["name"] for one in row["baselines"]] == ["cupy", "nccl-alltoall"]
        assert row["baseline_wrong"] == 0
        assert row["speedup"] > 0


def test_the_environment_and_the_links_are_recorded(measure, comm):
    written = measure("dispatch")
    env = written["env"]
    assert len(env["devices"]) == len(env["device_sms"]) == comm.size
    assert all(env[name] for name in ("cuda_driver", "cuda_runtime", "cupy", "nvshmem", "mpi"))
    if comm.size > 1:
        assert all(rate > 0 for rate in written["links"].values())
        assert written["rows"][0]["floor_gbps"] == pytest.approx(
            written["links"]["copy_one_way_gbps"], rel=0.01
        )


@pytest.mark.parametrize("graph", [[], ["--graph"]], ids=["eager", "graph"])
@pytest.mark.parametrize(
    "options",
    [
        ["--dtype", "fp8"],
        ["--dtype", "bf16"],
        ["--dtype", "bf16", "--reduction", "source"],
        ["--dtype", "bf16", "--combine-from", "array", "--calls", "5"],
        ["--dtype", "fp8", "--routing", "one-hot", "--calls", "1"],
    ],
    ids=" ".join,
)
def test_no_low_latency_row_is_wrong(measure, options, graph):
    check(measure("--mode", "ll", *options, *graph), 6)


@pytest.mark.parametrize(
    "options",
    [
        ["roundtrip", "--dtype", "fp8", "--use-ue8m0"],
        ["roundtrip", "--dtype", "bf16", "--use-logfmt"],
        ["overlap", "--dtype", "bf16", "--calls", "4", "--inner", "32"],
        ["overlap", "--dtype", "fp8", "--calls", "4", "--inner", "32"],
        ["first-call", "--dtype", "fp8"],
    ],
    ids=" ".join,
)
def test_cases_of_decoding(measure, options):
    written = measure("--mode", "ll", *options)
    check(written, 2)
    for row in written["rows"]:
        assert (row["hidden_share"] is not None) == (row["case"] == "overlap")
        assert (row["warmed_us"] is not None) == (row["case"] == "first-call")


def test_first_calls_of_high_throughput(measure):
    check(measure("first-call"), 2)
