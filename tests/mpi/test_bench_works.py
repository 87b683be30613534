"""The works that the GPU bench times, on every backend: no row wrong, and a row that is wrong is seen."""

import numpy as np
import pytest

import epcy
from epcy.bench import lines, overlap, settings
from epcy.bench.arguments import Arguments
from epcy.bench.calls import HighThroughput
from epcy.bench.clocks import HostClock, Run, prime, time_work
from epcy.bench.cupy_baseline import CupyExchange
from epcy.bench.datasets import Setting, draw_sets
from epcy.bench.workload import Shape
from epcy.bench.works import WORKS

CASES = ["dispatch", "combine", "roundtrip"]


class Alltoallv:
    """What NCCL does for the CuPy baseline, by MPI."""

    def __init__(self, comm):
        self.comm = comm

    def exchange(self, sent, send_bytes, received, recv_bytes):
        def message(array, counts):
            return [array.reshape(-1).view(np.uint8), (counts, np.cumsum(counts) - counts)]

        self.comm.Alltoallv(message(sent, send_bytes), message(received, recv_bytes))


class Replay:
    """A graph that makes its calls anew."""

    def __init__(self, issue):
        self.launch = issue
        issue()


class ReplayClock(HostClock):
    """Runs as those of clocks.GraphClock, without a GPU."""

    def open(self, work):
        work.open(Replay)
        prime(self, work)

        def issue():
            work.issue()
            work.collect()

        self.graph = Replay(issue)

    def run(self, work):
        self.buf.barrier()
        self.graph.launch()
        return Run(1.0, 1.0)


def setting_of(comm, xp, given):
    shape = Shape(11, given.hidden, given.topk, given.experts, given.dtype)
    return Setting(xp, shape, given.routing, given.mode, given.layout, given.expert_alignment, given.reduction,
                   comm.rank, comm.size)  # fmt: skip


@pytest.fixture
def bench(comm, backend, failed):
    made = lines.Bench(comm, backend)
    yield made
    if not failed():
        made.close()


@pytest.mark.host_only("a GPU is measured by tests/gpu/test_bench_gpu.py")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"cached": True},
        {"dtype": "fp8"},
        {"dtype": "fp16", "combine_from": "array"},
        {"dtype": "fp32", "routing": "one-hot"},
        {"layout": "expert", "expert_alignment": 8},
        {"layout": "expert", "expert_alignment": 8, "combine_from": "array", "routing": "skewed"},
        {"layout": "expert", "cached": True, "dtype": "fp8"},
    ],
    ids=str,
)
def test_no_row_is_wrong(comm, bench, case, how):
    given = Arguments(runs=4, warmup=2, hidden=272, topk=3, experts=4 * comm.size, **how)
    row = bench.measure(given, case, 11)
    assert row.wrong == 0
    assert 0 < row.us_min <= row.us_p50 <= row.us_p99
    assert row.bytes_wire == 0 or comm.size > 1


@pytest.mark.host_only("it needs no GPU")
@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_wrong_bit_is_seen(comm, make_buffer, case, num_slots):
    buf = make_buffer(num_max_tokens_per_rank=11, hidden=272, num_topk=3, num_experts=4 * comm.size)
    given = Arguments(hidden=272, topk=3, experts=4 * comm.size)
    sets = draw_sets(setting_of(comm, np, given), 5, 2, 1 if case == "combine" else num_slots, False)
    num_calls = 1 if case == "combine" else num_slots
    where = {"from_heap": case == "combine", "gives_back": case == "roundtrip"}
    work = WORKS[case](HighThroughput(buf, "rank", 1, 0), sets, num_calls=num_calls, **where)
    measured = time_work(comm, HostClock(buf), work, runs=3, warmup=1, check=True)
    assert measured.wrong == 0
    assert work.wrong() == 0
    rows = work.got[-1][1].parts[0] if case == "dispatch" else work.sums[-1][1]
    if len(rows):
        rows.view(np.uint16)[-1, 7] ^= 1
        assert work.wrong() == 1
    work.generation = 1 - work.generation
    assert work.wrong() > 0
    buf.barrier()


@pytest.mark.host_only("it needs no GPU")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("from_heap", [False, True])
def test_worst_case_calls_as_in_a_graph(comm, make_buffer, case, layout, from_heap):
    given = Arguments(hidden=272, topk=3, experts=4 * comm.size, layout=layout, expert_alignment=4)
    setting = setting_of(comm, np, given)
    options = settings.buffer_options(given, setting.shape, comm.size)
    buf = make_buffer(**options)
    sets = draw_sets(setting, 5, 2, 1 if case == "combine" else 3, False)
    calls = HighThroughput(buf, layout, 4, options["num_max_recv_tokens"])
    gives_back = case == "roundtrip" and from_heap
    work = WORKS[case](calls, sets, num_calls=5, from_heap=from_heap, gives_back=gives_back)
    assert time_work(comm, ReplayClock(buf), work, runs=4, warmup=1, check=True).wrong == 0


@pytest.mark.host_only("it stands in for CuPy")
@pytest.mark.parametrize("routing", ["random", "one-hot"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp8"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("known", [False, True])
def test_the_cupy_baseline_gives_the_same_bits(comm, make_buffer, case, dtype, routing, known):
    buf = make_buffer()
    given = Arguments(hidden=272, topk=3, experts=4 * comm.size, dtype=dtype, routing=routing)
    exchange = CupyExchange(np, Alltoallv(comm), comm, given.experts, given.hidden)
    sets = draw_sets(setting_of(comm, np, given), 5, 3, 1, known)
    work = WORKS[case](exchange, sets, known=known, gives_back=case == "roundtrip" and dtype != "fp8")
    assert time_work(comm, HostClock(buf), work, runs=3, warmup=1, check=True).wrong == 0


@pytest.mark.host_only("low latency on a GPU is measured by tests/gpu/test_bench_gpu.py")
@pytest.mark.skipif(
    not hasattr(epcy.Buffer, "low_latency_dispatch"), reason="no low-latency calls in this build"
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "how",
    [{"dtype": "fp8"}, {}, {"reduction": "source"}, {"combine_from": "array", "reduction": "source"}],
    ids=str,
)
def test_no_low_latency_row_is_wrong(comm, bench, case, how):
    given = Arguments(mode="ll", runs=3, warmup=1, calls=4, hidden=256, topk=3, experts=4 * comm.size, **how)
    assert bench.measure(given, case, 11).wrong == 0


@pytest.mark.host_only("low latency on a GPU is measured by tests/gpu/test_bench_gpu.py")
@pytest.mark.parametrize(
    "how",
    [
        {"dtype": "fp8", "round_scale": True},
        {"dtype": "fp8", "round_scale": True, "use_ue8m0": True},
        {"use_logfmt": True},
        {"use_logfmt": True, "reduction": "source"},
    ],
    ids=str,
)
def test_no_row_of_a_low_latency_option_is_wrong(comm, bench, how):
    given = Arguments(mode="ll", runs=3, warmup=1, calls=4, hidden=512, topk=3, experts=4 * comm.size, **how)
    row = bench.measure(given, "roundtrip", 11)
    assert row.wrong == 0
    assert (row.round_scale, row.use_logfmt) == (
        how.get("round_scale", False),
        how.get("use_logfmt", False),
    ) or (given.dtype == "bf16" and row.round_scale is None)


@pytest.mark.host_only("low latency on a GPU is measured by tests/gpu/test_bench_gpu.py")
@pytest.mark.parametrize(
    "how", [{}, {"dtype": "fp8", "combine_from": "array"}, {"reduction": "source"}], ids=str
)
@pytest.mark.parametrize("calls", [2, 6])
def test_overlap_moves_the_same_rows(comm, bench, how, calls):
    given = Arguments(
        mode="ll", runs=3, warmup=1, calls=calls, hidden=256, topk=3, experts=4 * comm.size, inner=8, **how
    )
    row = bench.measure(given, "overlap", 11)
    assert row.wrong == 0 and row.inner == 8
    assert row.hidden_share == pytest.approx((row.us_sequence_p50 - row.us_p50) / row.us_communication_p50)


@pytest.mark.host_only("it needs no GPU")
def test_a_wrong_bit_is_seen_behind_hooks(comm, make_buffer):
    given = Arguments(mode="ll", calls=4, hidden=256, topk=3, experts=4 * comm.size)
    setting = setting_of(comm, np, given)
    buf = make_buffer(**settings.buffer_options(given, setting.shape, comm.size))
    sets = draw_sets(setting, 5, 2, 3, False)
    work = overlap.Overlap(settings.calls_of(given, buf, True, 0), sets, inner=8, num_calls=4, from_heap=True)
    work.order = "overlapped"
    assert time_work(comm, HostClock(buf), work, runs=3, warmup=1, check=True).wrong == 0
    work.sums[-1][1].view(np.uint16)[-1, 7] ^= 1
    assert work.wrong() == 1
    buf.barrier()


@pytest.mark.host_only("first calls of a GPU are measured by tests/gpu/test_bench_gpu.py")
@pytest.mark.parametrize(
    "how",
    [{}, {"dtype": "fp8"}, {"layout": "expert"}, {"mode": "ll"}, {"mode": "ll", "dtype": "fp8"}],
    ids=str,
)
def test_first_calls_are_right(comm, bench, how):
    given = Arguments(runs=3, warmup=1, hidden=256, topk=3, experts=4 * comm.size, **how)
    row = bench.measure(given, "first-call", 11)
    assert row.wrong == 0 and row.case == "first-call"
    assert all(
        us > 0 for us in (row.cold_us, row.warmed_us, row.preinitialized_us, row.warmup_us, row.us_p50)
    )
