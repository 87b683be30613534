"""The arithmetic of the bench: bytes, percentiles, routings, the table, the command line."""

import json
import platform
from xml.etree import ElementTree

import numpy as np
import pytest

MPI = pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from epcy.bench import arguments, checking, environment, measure, prediction, table, workload  # noqa: E402

SHAPE = workload.Shape(num_tokens=6, hidden=256, num_topk=2, num_experts=8, dtype="bf16")


def make_row(**changes):
    times, moved = measure.Times(50.0, 100.0, 200.0), measure.Bytes(wire=1_000_000, moved=4_000_000)
    given = {
        "case": "dispatch",
        "mode": "ht",
        "backend": "host",
        "ranks": 2,
        "tokens": 6,
        "hidden": 256,
        "topk": 2,
        "experts": 8,
        "dtype": "bf16",
        "layout": "rank",
        "routing": "random",
        "cached": False,
        "graph": False,
        "num_sms": 1,
        "runs": 30,
        "wrong": 0,
    }
    return table.Row(**(given | table.figures(times, moved, peer_copy_gbps=80.0) | changes))


# ---- bytes


def test_a_token_counts_once_for_each_rank_and_not_for_its_own():
    # Two experts a rank, four ranks; we are rank 1, which owns experts 2 and 3.
    topk_idx = np.array([[0, 1], [2, 3], [1, 2], [6, -1], [-1, -1], [0, 7]])
    assert measure.count_rows(topk_idx, 2, 1, 4, "rank") == (1 + 1 + 2 + 1 + 0 + 2, 1 + 0 + 1 + 1 + 0 + 2)


def test_expert_layout_has_a_row_for_each_lane_but_crosses_once():
    topk_idx = np.array([[0, 1], [2, 3]])
    assert measure.count_rows(topk_idx, 2, 1, 4, "expert") == (4, 1)


@pytest.mark.parametrize(
    ("dtype", "there", "back"), [("bf16", 512, 512), ("fp32", 1024, 1024), ("fp8", 264, 512)]
)
def test_bytes_of_a_row_include_scales(dtype, there, back):
    shape = workload.Shape(6, 256, 2, 8, dtype)
    assert (shape.row_bytes, shape.returned_row_bytes) == (there, back)
    topk_idx = np.zeros((6, 2), np.int64)
    counted = {case: measure.count_bytes(case, shape, topk_idx, MPI.COMM_SELF) for case in arguments.CASES}
    assert counted["dispatch"] == measure.Bytes(wire=0, moved=2 * 6 * there)
    assert counted["combine"] == measure.Bytes(wire=0, moved=2 * 6 * back)
    assert counted["roundtrip"] == measure.Bytes(wire=0, moved=2 * 6 * (there + back))


# ---- times


def test_a_run_is_as_slow_as_its_slowest_rank():
    us = np.array([[1.0, 5.0, 3.0], [2.0, 4.0, 9.0]])
    assert measure.summarize(us) == measure.Times(us_min=2.0, us_p50=5.0, us_p99=9.0)


def test_p99_is_a_time_that_occurred():
    us = np.arange(1.0, 201.0)[None]
    assert measure.summarize(us).us_p99 in us
    assert measure.summarize(us).us_p99 == pytest.approx(198, abs=1)


def test_warmup_is_run_and_not_counted():
    calls = []
    timed = measure.Timed(lambda: calls.append("prepare"), lambda: calls.append("run"))
    times = measure.time_runs(MPI.COMM_SELF, lambda: calls.append("align"), timed, runs=3, warmup=2)
    assert calls == ["prepare", "align", "run"] * 5
    assert 0 <= times.us_min <= times.us_p50 <= times.us_p99


def test_memcpy_rate_is_plausible():
    assert 0.01 < measure.measure_memcpy(MPI.COMM_SELF, num_bytes=2**20, runs=3) < 100_000


# ---- routings and inputs


def test_inputs_are_those_of_the_rank_wherever_they_are_drawn():
    first, again, other = (workload.draw_inputs(SHAPE, "random", 7, rank) for rank in (3, 3, 4))
    assert np.array_equal(first.x.view(np.uint16), again.x.view(np.uint16))
    assert np.array_equal(first.topk_idx, again.topk_idx)
    assert not np.array_equal(first.x.view(np.uint16), other.x.view(np.uint16))


@pytest.mark.parametrize("routing", ["random", "skewed"])
def test_experts_of_a_token_are_distinct(routing):
    shape = workload.Shape(2000, 8, 4, 16, "fp32")
    topk_idx = workload.draw_inputs(shape, routing, 0, 0).topk_idx
    assert topk_idx.shape == (2000, 4)
    assert all(len(set(ids)) == 4 for ids in topk_idx.tolist())
    load = np.bincount(topk_idx.ravel(), minlength=16)
    if routing == "random":
        assert load.min() > 0.8 * load.mean()
    else:
        assert load[0] > 2 * load[7] > 2 * load[15] > 0


def test_one_hot_goes_to_one_expert():
    topk_idx = workload.draw_inputs(SHAPE, "one-hot", 0, 5).topk_idx
    assert np.array_equal(topk_idx, [[0, -1]] * 6)


def test_recorded_routing_is_repeated(tmp_path):
    np.save(tmp_path / "two.npy", np.array([[0, 1], [2, 3], [4, -1], [6, 7]], np.int32))
    topk_idx = workload.draw_inputs(SHAPE, str(tmp_path / "two.npy"), 0, 1).topk_idx
    assert topk_idx[:, 0].tolist() == [4, 6, 0, 2, 4, 6]  # from token 6 on
    np.save(tmp_path / "three.npy", np.array([[[0, 1]], [[2, 3]]]))
    topk_idx = workload.draw_inputs(SHAPE, str(tmp_path / "three.npy"), 0, 1).topk_idx
    assert np.array_equal(topk_idx, [[2, 3]] * 6)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (np.zeros((4, 3), np.int64), "3 lanes"),
        (np.full((4, 2), 8), "allows -1 to 7"),
        (np.full((4, 2), -2), "from -2"),
        (np.zeros((4, 2)), "integers"),
        (np.zeros((0, 2), np.int64), "shape"),
    ],
)
def test_recorded_routing_that_does_not_fit(tmp_path, content, text):
    np.save(tmp_path / "ids.npy", content)
    with pytest.raises(ValueError, match=text):
        workload.load_routing(tmp_path / "ids.npy", 2, 8)


def test_routing_that_is_no_array(tmp_path):
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(ValueError, match=r"not a \.npy file"):
        workload.load_routing(tmp_path / "text.npy", 2, 8)
    with pytest.raises(ValueError, match="neither one of random"):
        workload.load_routing(tmp_path / "absent.npy", 2, 8)


# ---- the check


def test_rows_differ_by_bits():
    nan, zero = np.array([[np.nan], [0.0]], np.float32), np.array([[np.nan], [-0.0]], np.float32)
    assert checking.differ(nan, zero).tolist() == [False, True]
    assert checking.differ(nan, zero[:1]).tolist() == [True, True]
    assert checking.differ(nan[:, 0], zero[:, 0]).tolist() == [False, True]
    assert checking.differ(nan, None).all()


def test_expected_finds_one_wrong_row():
    expected = checking.Expected(SHAPE, "random", 3, 0, 1, "rank")
    x = expected.inputs.x.copy()
    assert not expected.wrong_rows(x).any()
    x.view(np.uint16)[4, 100] ^= 1
    assert expected.wrong_rows(x).nonzero()[0].tolist() == [4]
    assert expected.wrong_rows(x[:5]).all()
    y = expected.fill(np.empty_like(x))
    assert not expected.wrong_tokens(y).any()  # one rank: combine returns what it got
    y[2] = 0
    assert expected.wrong_tokens(y).nonzero()[0].tolist() == [2]


# ---- the table and the file


def test_table_columns_stand_under_their_headings():
    for changes in (
        {},
        {
            "baseline": "b",
            "baseline_us_p50": 1.0,
            "baseline_wrong": 0,
            "speedup": 0.01,
        },
    ):
        above, units = table.heading(bool(changes)).splitlines()
        below = table.line(make_row(**changes)).rstrip("\n")
        assert above.startswith("#")
        assert units.startswith("#")
        assert len(above) == len(below)
        assert below.split()[:3] == ["dispatch", "6", "1000000"]


def test_rates_are_those_of_the_median():
    row = make_row()
    assert row.gbps_wire == pytest.approx(10.0)
    assert row.gbps_moved == pytest.approx(40.0)
    assert row.peer_copy_share == pytest.approx(0.5)
    assert row.floor_us == pytest.approx(50.0)
    assert table.baseline_figures("b", measure.Times(1, 300.0, 400), row.us_p50)["speedup"] == 3.0


def test_json_row_has_every_field_of_the_schema():
    row = make_row().as_json()
    assert {
        *(
            "case",
            "mode",
            "backend",
            "ranks",
            "tokens",
            "hidden",
            "topk",
            "experts",
            "dtype",
            "cached",
            "graph",
        ),
        *("num_sms", "us_min", "us_p50", "us_p99", "bytes_wire", "gbps_wire", "wrong", "peer_copy_gbps"),
        *("floor_us", "baseline", "baseline_us_p50", "speedup"),
    } <= set(row)
    assert json.loads(json.dumps(row)) == row
    assert isinstance(row["bytes_wire"], int)


def test_unchecked_rows_say_so():
    assert " - " in table.line(make_row(wrong=None)).rstrip() + " "


def test_environment_names_no_host_and_no_path():
    env = environment.describe(["dispatch", "--json", "/some/where/a.json"], 2)
    text = json.dumps(env)
    assert env["command"] == "mpiexec -n 2 python -m mpi4py -m epcy.bench dispatch --json a.json"
    assert "/some" not in text
    if len(platform.node()) > 3:
        assert platform.node() not in text
    assert env["cores"] >= 1
    assert env["versions"]["numpy"] == np.__version__


def test_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    from epcy.bench import plot

    rows = [make_row(tokens=tokens, baseline="b", baseline_us_p50=200.0) for tokens in (8, 64)]
    assert plot.draw(rows, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert not plot.draw([make_row(case="first-call")], str(tmp_path / "none.png"))
    assert not (tmp_path / "none.png").exists()


def text_of(path):
    return [node.text or "" for node in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture
def svg(monkeypatch):
    """Pictures whose words can be read."""
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")


def test_curves_have_the_floor_and_every_baseline(svg, tmp_path):
    from epcy.bench import plot

    beside = [{"name": name, "us_p50": 300.0} for name in ("cupy", "nccl-alltoall")]
    rows = [
        make_row(tokens=8, backend="nvshmem", mode="ll", baselines=tuple(beside)),
        make_row(case="combine"),
    ]
    plot.draw(rows, str(tmp_path / "a.svg"))
    words = " ".join(text_of(tmp_path / "a.svg"))
    for word in (
        "cupy",
        "nccl-alltoall",
        "floor",
        "epcy",
        "Time",
        "Bandwidth",
        "tokens a rank",
        "rate of a copy",
    ):
        assert word in words, word
    series = {(name, kind): us for name, kind, _, us in plot._series(rows)}
    assert [kind for name, kind in series if name.startswith("ll")] == [
        "epcy",
        "floor",
        "cupy",
        "nccl-alltoall",
    ]
    assert series["ll dispatch bf16 E8", "cupy"] == [300.0]


def test_heat_map_names_the_busiest_expert(svg, tmp_path):
    from epcy.bench import plot

    counts = np.full((2, 8), 10)
    counts[1, 5] = 70
    plot.draw_routing(counts, str(tmp_path / "a.svg"), "skewed routing")
    words = " ".join(text_of(tmp_path / "a.svg"))
    assert "skewed routing; busiest expert 5: 2.91 of the mean" in words and "from rank" in words


def test_timeline_shows_each_order(svg, tmp_path):
    from epcy.bench import plot

    orders = {"in sequence": [plot.Bar(0, 70, "product", "a"), plot.Bar(70, 90, "dispatch", "a")],
              "overlapped": [plot.Bar(0, 40, "product", "a"), plot.Bar(40, 61, "dispatch receive", "b")]}  # fmt: skip
    plot.draw_timeline(orders, str(tmp_path / "a.svg"), "rank 0")
    words = text_of(tmp_path / "a.svg")
    assert {"in sequence", "overlapped", "rank 0", "a", "b"} <= set(words)
    assert "90 us" in " ".join(words) and "61 us" in " ".join(words)


def test_pictures_are_named_after_the_first():
    from epcy.bench import plot

    assert plot.path_of("some/run.png", "routing") == "some/run-routing.png"


# ---- the prediction


def test_prediction_is_summed_up():
    rows = [
        make_row(tokens=n, predicted_us=us, prediction_error=us / 100 - 1)
        for n, us in ((8, 105.0), (64, 80.0))
    ]
    text = prediction.summary(rows)
    assert "within 15% of the median in 1 of 2 lines; furthest off: dispatch of 64 tokens, -20%" in text
    assert "of the fastest run in 0 of 2 lines; furthest off: dispatch of 8 tokens, +110%" in text
    assert prediction.summary([make_row()]) == ""
    told = make_row(
        predicted_us=105.0, prediction_error=0.05, predicted_terms_us={"fixed": 5.0, "rows": 100.0}
    )
    assert "predicted 105.0 us (+5% of the median): fixed 5.00, rows 100.0" in table.notes(told)
    assert told.as_json()["prediction_error"] == 0.05


@pytest.mark.parametrize(
    "argv", ["--cached", "--routing one-hot", "overlap --mode ll", "first-call", "--suite decoding"]
)
def test_what_the_model_does_not_describe_is_not_predicted(argv):
    with pytest.raises(NotImplementedError, match="--predict: the model describes"):
        prediction.refuse_what_has_none(arguments.parse([*argv.split(), "--predict"], 2))
    prediction.refuse_what_has_none(arguments.parse(["--predict", "dispatch", "--layout", "expert"], 2))


# ---- the command line


def test_defaults_and_sizes():
    given = arguments.parse([], 2)
    assert given.cases == arguments.CASES
    assert given.sizes == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert arguments.parse(["dispatch", "-b", "4096"], 2).sizes == [4096]
    assert arguments.parse(["-b", "1", "-e", "100", "-f", "10"], 1).sizes == [1, 10, 100]
    assert arguments.parse(["-b", "5", "-e", "100", "-f", "1"], 1).sizes == [5]


@pytest.mark.parametrize(
    ("argv", "ranks", "text"),
    [
        (["gather"], 2, "CASE: 'gather'"),
        (["-b", "0"], 2, "-b/--min-tokens"),
        (["-b", "x"], 2, "-b/--min-tokens: expected a whole number from 1 to 2147483647, got 'x'"),
        (["-b", "64", "-e", "8"], 2, "-e/--max-tokens: 8 is less"),
        (["-n", "-1"], 2, "-n/--runs"),
        (["--experts", "10"], 4, "--experts: 10 is not a multiple of the 4 ranks"),
        (["--topk", "9", "--experts", "8"], 2, "--topk: 9"),
        (["--dtype", "int8"], 2, "--dtype"),
        (["--baseline", "--layout", "expert"], 2, "--baseline"),
        (["--baseline", "mpi"], 2, "--baseline: 'mpi' is none of"),
        (["--baseline", "cupy", "--mode", "ll", "--topk", "2"], 2, "--baseline: cupy"),
        (["--expert-alignment", "8"], 2, "--expert-alignment"),
        (["--mode", "ll", "--dtype", "fp16"], 2, "--dtype"),
        (["--mode", "ll", "--cached"], 2, "--mode"),
        (["--calls", "4"], 2, "--calls"),
        (["--suite", "all"], 2, "--suite"),
        (["overlap"], 2, "CASE: overlap"),
        (["overlap", "--mode", "ll", "--calls", "3"], 2, "--calls: overlap"),
        (["overlap", "--mode", "ll", "--baseline", "nccl-alltoall"], 2, "--baseline"),
        (["first-call", "--cached"], 2, "CASE: first-call"),
        (["--round-scale"], 2, "--round-scale"),
        (["--use-ue8m0", "--mode", "ll"], 2, "--use-ue8m0"),
        (["--use-logfmt"], 2, "--use-logfmt"),
        (["--mode", "ll", "--dtype", "fp8", "--use-ue8m0", "--hidden", "256"], 2, "--hidden: 256"),
        (["--inner", "0"], 2, "--inner"),
        (["--hidden", "2000000000"], 2, "--hidden: 2000000000 elements of 1024 tokens"),
        (["--routing", "absent.npy"], 2, "--routing absent.npy"),
        (["--json", "no/such/folder/a.json"], 2, "--json"),
    ],
)
def test_errors_name_the_option(capsys, argv, ranks, text):
    with pytest.raises(SystemExit) as stop:
        arguments.parse(argv, ranks)
    assert stop.value.code == 2
    assert text in capsys.readouterr().err
