"""epcy.bench_kineto: means of named kernels, clear errors, traces."""

import time

import numpy as np
import pytest

import epcy
from mpi.cases import draw, mine
from mpi.trace_format import check


@pytest.fixture
def step(comm, make_buffer):
    buf = make_buffer()
    x, idx, weights = mine(buf, draw(3, comm.size, 8, num_experts=4 * comm.size))

    def run():
        r = buf.dispatch(x, idx, weights)
        buf.combine(r.recv_x, r.handle)

    run.buf = buf
    return run


NAMES = {"host": ("dispatch", "combine"), "nvshmem": ("dispatch_rows", "combine_rows")}


def test_one_name_and_several(step, backend):
    names = NAMES[backend]
    one = epcy.bench_kineto(step, names[0], num_tests=5)
    assert isinstance(one, float) and 0 < one < 1
    both = epcy.bench_kineto(step, names, num_tests=5, barrier=step.buf.barrier, suppress_output=True)
    assert isinstance(both, tuple) and len(both) == 2 and all(0 < t < 1 for t in both)


@pytest.mark.host_only("phases are spans of the host backend")
def test_phases_and_periods(step):
    whole, send, reduce = epcy.bench_kineto(
        step, ("dispatch", "dispatch.send", "combine.reduce"), num_tests=4
    )
    assert 0 < send < whole and reduce > 0

    def twice():
        step()
        time.sleep(0.001)
        step()

    pair = epcy.bench_kineto(twice, "dispatch", num_tests=6, num_kernels_per_period=2)
    assert isinstance(pair, list) and len(pair) == 2 and all(t > 0 for t in pair)
    with pytest.raises(epcy.ArgumentError, match="num_kernels_per_period: 'dispatch' ran 10 times"):
        epcy.bench_kineto(twice, "dispatch", num_tests=5, num_kernels_per_period=3)


def test_a_name_that_never_ran(step, backend):
    if backend == "nvshmem":
        pytest.importorskip("cupti", reason="names of kernels come from CUPTI")
    with pytest.raises(epcy.ArgumentError) as caught:
        epcy.bench_kineto(step, ("sort_rows",), num_tests=2)
    for text in ("kernel_names: 'sort_rows' ran never", "what ran is", NAMES[backend][0]):
        assert text in str(caught.value)


@pytest.mark.host_only("names of spans")
def test_a_part_of_several_names(step):
    with pytest.raises(epcy.ArgumentError, match=r"'disp' is part of the names of \d+ kernels"):
        epcy.bench_kineto(step, "disp", num_tests=2)
    assert epcy.bench_kineto(step, "combine.red", num_tests=2) > 0


def test_trace(step, backend, comm, same, tmp_path):
    folder = same(str(tmp_path))
    epcy.bench_kineto(step, NAMES[backend][0], num_tests=3, trace_path=f"{folder}/kernels.json")
    content = check(f"{folder}/kernels{f'.rank{comm.rank}' if comm.rank else ''}.json")
    assert len(content["traceEvents"]) >= 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"kernel_names": ()}, "kernel_names: expected a name"),
        ({"kernel_names": ("",)}, "kernel_names: expected a name"),
        ({"kernel_names": "dispatch", "num_tests": 0}, "num_tests: expected a positive"),
        ({"kernel_names": "dispatch", "num_kernels_per_period": 0}, "num_kernels_per_period: expected"),
    ],
)
def test_arguments(arguments, text):
    with pytest.raises(epcy.ArgumentError, match=text):
        epcy.bench_kineto(lambda: None, **arguments)


@pytest.mark.host_only("the ring of the host backend")
def test_more_than_the_ring_holds(step):
    with pytest.raises(epcy.StateError, match=r"num_tests: \d+ spans were recorded"):
        epcy.bench_kineto(step, "dispatch", num_tests=1000)


@pytest.mark.host_only("what is printed")
def test_output_is_held_back(step, capfd):
    def loud():
        print("loud")
        step()

    epcy.bench_kineto(loud, "dispatch", num_tests=2, suppress_output=True)
    assert "loud" not in capfd.readouterr().out
    epcy.bench_kineto(loud, "dispatch", num_tests=2)
    assert np.char.count(capfd.readouterr().out, "loud") == 3
