"""The bench as users run it: every row right, the file as documented, refusals on all ranks."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import epcy
from epcy import measured, model
from epcy.bench import suites
from epcy.bench.__main__ import main

SMALL = ["-b", "3", "-e", "12", "-f", "4", "-n", "3", "-w", "1", "--hidden", "256", "--topk", "2",
         "--backend", "host"]  # fmt: skip


@pytest.fixture
def small(comm):
    return [*SMALL, "--experts", str(4 * comm.size)]


@pytest.mark.parametrize(
    "options",
    [
        ["--baseline"],
        ["--cached", "--baseline"],
        ["--layout", "expert"],
        ["--dtype", "fp8", "--baseline"],
        ["--dtype", "fp16", "--routing", "one-hot"],
        ["--dtype", "fp32", "--routing", "skewed", "--layout", "expert"],
        ["--routing", "one-hot", "--layout", "expert", "--cached"],
        ["--num-sms", "2"],
    ],
    ids=" ".join,
)
def test_no_row_is_wrong(comm, same, tmp_path, small, options):
    path = same(str(tmp_path / "rows.json"))
    assert main([*small, *options, "--json", path]) == 0
    comm.Barrier()
    with open(path, encoding="utf-8") as file:
        written = json.load(file)
    assert written["schema"] == 1
    assert [(row["case"], row["tokens"]) for row in written["rows"]] == [
        (case, tokens) for case in ("dispatch", "combine", "roundtrip") for tokens in (3, 12)
    ]
    for row in written["rows"]:
        assert row["wrong"] == 0
        assert row["ranks"] == comm.size
        assert 0 < row["us_min"] <= row["us_p50"] <= row["us_p99"]
        if "--baseline" in options:
            assert row["baseline_wrong"] == 0
            assert row["speedup"] == pytest.approx(row["baseline_us_p50"] / row["us_p50"], rel=1e-2)


@pytest.mark.parametrize("options", [[], ["--layout", "expert"], ["--mode", "ll"]], ids=" ".join)
def test_no_row_is_wrong_between_nodes(comm, same, tmp_path, small, monkeypatch, options):
    """The sums are those of the path that the Buffer takes there."""
    if comm.size == 1 or comm.size % 2:
        pytest.skip("two nodes of one size")
    monkeypatch.setenv("EPCY_NUM_MAX_NVL_PEERS", str(comm.size // 2))
    path = same(str(tmp_path / "rows.json"))
    assert main([*small, "--topk", "7", *options, "--json", path]) == 0
    comm.Barrier()
    with open(path, encoding="utf-8") as file:
        assert [row["wrong"] for row in json.load(file)["rows"]].count(0) > 3


@pytest.mark.parametrize(
    "options",
    [
        ["overlap", "--mode", "ll", "--calls", "4", "--inner", "16"],
        ["first-call"],
        ["first-call", "--mode", "ll", "--dtype", "fp8"],
        ["dispatch", "combine", "--mode", "ll", "--use-logfmt"],
        ["dispatch", "--mode", "ll", "--dtype", "fp8", "--round-scale"],
    ],
    ids=" ".join,
)
def test_cases_of_decoding(comm, same, tmp_path, capsys, small, options):
    path = same(str(tmp_path / "rows.json"))
    assert main([*options, *small, "--json", path]) == 0
    out = capsys.readouterr().out
    comm.Barrier()
    with open(path, encoding="utf-8") as file:
        written = json.load(file)
    assert written["schema"] == 1 and all(row["wrong"] == 0 for row in written["rows"])
    assert len(written["rows"]) == 2 * sum(
        word in ("overlap", "first-call", "dispatch", "combine") for word in options
    )
    if comm.rank == 0 and options[0] == "overlap":
        assert out.count("% of it hidden") == 2
        assert all(row["hidden_share"] is not None for row in written["rows"])
    if comm.rank == 0 and options[0] == "first-call":
        assert out.count("after warmup()") == out.count("steady median") == 2
        assert all(row["cold_us"] > 0 and row["preinitialized_us"] > 0 for row in written["rows"])


def test_the_suite_of_decoding(comm, monkeypatch, capsys):
    small = "--mode ll --hidden 512 --topk 2 --experts 24 -b 3 -e 3"
    lines = [line.replace(suites.SMALL, small) for line in suites.DECODING]
    lines[0] = "first-call --hidden 256 --topk 2 --experts 24 -b 3 -e 3"
    monkeypatch.setitem(suites.SETS, "decoding", tuple(lines))
    assert main(["--suite", "decoding", "--backend", "host", "-n", "2", "-w", "1"]) == 0
    assert ("ll overlap bf16" in capsys.readouterr().out) == (comm.rank == 0)


@pytest.fixture
def cache(same, tmp_path, monkeypatch):
    folder = same(str(tmp_path / "cache"))
    monkeypatch.setenv("EPCY_CACHE_DIR", folder)
    return folder


@pytest.mark.parametrize(
    "options",
    [[], ["--layout", "expert"], ["dispatch", "combine", "--mode", "ll", "--dtype", "fp8"]],
    ids=" ".join,
)
def test_prediction_beside_the_clock(comm, same, tmp_path, capsys, small, cache, options):
    assert main([*small, *options, "--predict"]) == 2  # nothing is known yet
    assert ("python -m mpi4py -m epcy calibrate" in capsys.readouterr().err) == (comm.rank == 0)
    if comm.rank == 0:
        known = model.Constants(10.0, 1.0, 2.0, 0.0, 1, 1.0, 1.0, (1e3, 1e6), (2.0, 4.0))
        for subject in model.SUBJECTS:
            measured.put("calibration", measured.key_of("host", comm.size, 1, subject), asdict(known))
    comm.Barrier()
    path = same(str(tmp_path / "rows.json"))
    assert main([*small, *options, "--predict", "--json", path]) == 0
    out = capsys.readouterr().out
    comm.Barrier()
    with open(path, encoding="utf-8") as file:
        rows = json.load(file)["rows"]
    for row in rows:
        calls = 2 if row["case"] == "roundtrip" else 1
        assert row["predicted_terms_us"]["fixed"] == 10 * calls
        assert row["predicted_us"] == pytest.approx(sum(row["predicted_terms_us"].values()), rel=1e-3)
        assert row["prediction_error"] == pytest.approx(row["predicted_us"] / row["us_p50"] - 1, abs=0.01)
        assert ("cast" in row["predicted_terms_us"]) == (row["mode"] == "ll" and row["case"] == "dispatch")
    assert out.count("#   predicted ") == (len(rows) if comm.rank == 0 else 0)
    told = out.count("# prediction: within 15%")
    assert told in ((2, 3) if comm.rank == 0 else (0,))  # a third one where runs went undisturbed
    beside = out.count("# beside calibrate, times as long: dispatch of ")
    assert beside == (1 if comm.rank == 0 else 0)


def test_pictures_of_a_run(comm, same, tmp_path, capsys, small):
    pytest.importorskip("matplotlib")
    path = same(str(tmp_path / "run.png"))
    options = ["dispatch", "overlap", "--mode", "ll", "--calls", "4", "--inner", "16", "--routing", "skewed"]
    assert main([*options, *small, "--plot", path]) == 0
    out = capsys.readouterr().out
    comm.Barrier()
    for picture in ("run.png", "run-routing.png", "run-overlap.png"):
        assert Path(path).with_name(picture).stat().st_size > 5000
        assert (picture in out) == (comm.rank == 0)


def test_recorded_routing(comm, same, tmp_path, small):
    path = same(str(tmp_path / "ids.npy"))
    if comm.rank == 0:
        np.save(path, np.array([[0, 1], [2, -1], [4 * comm.size - 1, 0]]))
    comm.Barrier()
    assert main(["roundtrip", *small, "--routing", path]) == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--graph"], "--graph:"),
        (["--suite", "figures"], "--suite:"),
        (["--baseline", "cupy"], "--baseline:"),
        (["--hidden", "0"], "argument --hidden:"),
    ],
)
def test_refusals_reach_every_rank_once(comm, capsys, small, options, text):
    assert main([*small, *options]) == 2
    err = capsys.readouterr().err
    assert (text in err) == (comm.rank == 0)


@pytest.mark.parametrize("mode", [[], ["--mode", "ll"]], ids=["ht", "ll"])
def test_cost_of_check(comm, same, tmp_path, small, mode, capfd):
    """Each line again with the Buffer's option check: the same rows, a time of its own."""
    path = same(str(tmp_path / "rows.json"))
    assert main(["dispatch", "combine", *small, *mode, "--check-cost", "--json", path]) == 0
    comm.Barrier()
    with open(path, encoding="utf-8") as file:
        rows = json.load(file)["rows"]
    assert len(rows) == 4 and all(row["wrong"] == 0 and row["check_us_p50"] > 0 for row in rows)
    if comm.rank == 0:
        told = [line for line in capfd.readouterr().out.splitlines() if "with EPCY_CHECK=1: median" in line]
        assert len(told) == 4
    made = []
    init = epcy.Buffer.__init__

    def watch(self, *args, **options):
        made.append(options.get("check"))
        init(self, *args, **options)

    class Watched(epcy.Buffer):
        __init__ = watch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epcy, "Buffer", Watched)
        assert main(["combine", *small, *mode, "--check-cost"]) == 0
    assert made == [False, True] * 2
