"""Knobs and predictions: set_num_sms, num_sms= of a call, explain, calibrate, tune; what the cache folder keeps."""

import json
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest

import epcy
from epcy import calibrate, measured, model, tune
from epcy.__main__ import Progress, main
from mpi.cases import assert_bits, draw, mine, settle

E = 4
SIZES = {"hidden": 512, "num_topk": 2}


@pytest.fixture(autouse=True)
def cache(same, tmp_path, monkeypatch):
    """A cache folder of this test's own, the same on all ranks."""
    folder = same(str(tmp_path / "cache"))
    monkeypatch.setenv("EPCY_CACHE_DIR", folder)
    return folder


def results(buf, sent, **options):
    x, idx, weights = mine(buf, sent)
    r = buf.dispatch(x, idx, weights, out=True, **options)
    return r.recv_x, buf.combine(r.recv_x, r.handle, **options).combined_x


def test_num_sms_changes_no_bit(comm, make_buffer):
    buf = make_buffer(num_max_tokens_per_rank=64)
    sent = draw(3, comm.size, 64, num_experts=E * comm.size)
    expected = results(buf, sent)
    usual = buf.num_sms
    for given in (1, 4, 2, 3):
        assert_bits(results(buf, sent, num_sms=given), expected, f"num_sms={given}")
        assert buf.num_sms == usual
    for given in (4, 1, 2):
        buf.set_num_sms(given)
        assert buf.num_sms == buf.options["num_sms"] == given
        assert_bits(results(buf, sent), expected, f"set_num_sms({given})")
    if comm.rank == 0:
        buf.set_num_sms(3)  # ranks may differ
    assert_bits(results(buf, sent), expected, "ranks that differ")


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "4", 10**6])
def test_wrong_num_sms(comm, make_buffer, wrong):
    buf = make_buffer()
    sent = draw(3, comm.size, 4, num_experts=E * comm.size)
    with pytest.raises(epcy.ArgumentError, match="num_sms: expected"):
        buf.set_num_sms(wrong)
    x, idx, weights = mine(buf, sent)
    with pytest.raises(epcy.ArgumentError if comm.rank == 0 else epcy.PeerError, match="num_sms: expected"):
        buf.dispatch(x, idx, weights, num_sms=wrong if comm.rank == 0 else None)
    results(buf, sent)


def test_explain_without_calibration(comm, make_buffer):
    buf = make_buffer()
    before = buf.explain("dispatch", 16)
    assert before.predicted_us is before.dominant is before.floor_us is before.measured_us is None
    assert before.load.row_bytes == 1024 and before.load.num_ranks == comm.size
    assert "python -m epcy calibrate" in str(before)
    results(buf, draw(3, comm.size, 8, num_experts=E * comm.size))
    settle(buf)
    after = buf.explain("combine", 16)
    assert after.num_measured == 1 and after.measured_us > 0 and "measured" in str(after)


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (("sort", 1), {}, "op: expected one of"),
        (("dispatch", -1), {}, "num_tokens: expected"),
        (("dispatch", True), {}, "num_tokens: expected"),
        (("dispatch", 1), {"dtype": "int4"}, "dtype: expected one of"),
        (("dispatch", 1), {"layout": "node"}, "layout: expected 'rank' or 'expert'"),
        (("dispatch", 1), {"num_sms": 0}, "num_sms: expected a whole number, at least 1"),
    ],
)
def test_explain_arguments(make_buffer, arguments, options, text):
    buf = make_buffer()
    with pytest.raises(epcy.ArgumentError, match=text):
        buf.explain(*arguments, **options)


def test_load_is_that_of_random_routing():
    load = model.load_of("dispatch", 1000, 4, 16, 3, 100)
    rng = np.random.default_rng(0)
    drawn = np.argsort(rng.random((20000, 16)), axis=1)[:, :3] // 4
    share = (drawn == 1).any(axis=1).mean()
    assert load.rows_to_peer == pytest.approx(1000 * share, rel=0.02)
    assert load.num_bytes == pytest.approx(4 * load.bytes_to_peer)
    assert model.load_of("dispatch", 10, 1, 8, 2, 100).rows_to_peer == 10
    # A row for each lane is written, one a rank crosses.
    for subject in ("dispatch expert", "low_latency_combine"):
        by_lane = model.load_of(subject, 1000, 4, 16, 3, 100)
        assert by_lane.rows_to_peer == load.rows_to_peer and by_lane.rows_moved == 3000


def constants(**changes):
    rates = {"sizes_bytes": (1e5, 1e6, 1e7), "gbps": (8.0, 8.0, 4.0)}
    few = {"usual_sms": 1, "sm_gbps": 2.0, "most_gbps": 8.0, "wake_us": 5.0}
    return model.Constants(**{"fixed_us": 20.0, "lane_ns": 3.0, "element_ps": 0.0, **few, **rates, **changes})


def test_a_rate_between_two_sizes():
    c = constants()
    assert [model.rate_gbps(c, n) for n in (1.0, 1e5, 1e6, 1e7, 1e9)] == pytest.approx([8, 8, 8, 4, 4])
    assert model.rate_gbps(c, 10**6.5) == pytest.approx(6)
    assert model.rate_gbps(c, 1e6, 2) == pytest.approx(16) and model.rate_gbps(c, 1e6, 99) == pytest.approx(
        32
    )


def test_sms_follow_the_size_of_the_work():
    """Few for calls that a launch dominates, as many as fill the links for large ones; waking costs."""
    c = constants()
    load = [model.load_of("dispatch", n, 2, 32, 8, 4096) for n in (0, 1, 64, 100000)]
    assert [model.choose(c, one, 128) for one in load] == [1, 1, 4, 4]
    assert model.choose(c, load[3], 3) == 3
    plan = model.Plan(
        {"dispatch": c}, lambda _, n: model.load_of("dispatch", n, 2, 32, 8, 4096), {"dispatch": 128}, 4096
    )
    chosen = [plan.num_sms("dispatch", n) for n in (0, 1, 2, 16, 64, 4096, 10**6)]
    assert chosen[0] == 1 and chosen == sorted(chosen) and chosen[-1] == plan.most == 4
    assert plan.num_sms("combine", 7) is None and not plan.says_only({"dispatch": 1})
    assert model.Plan({}, lambda _, n: load[0], {}, 0).says_only({})


def test_constants_are_found_again():
    """Times that follow the model give back its constants."""
    gbps, fp8_bytes = {64: 8.0, 512: 8.0, 4096: 4.0}, 100
    points = {}

    def put(name, hidden, num_tokens, rate, more_us=0.0, subject="dispatch"):
        load = model.load_of(subject, num_tokens, 2, 32, calibrate.NUM_TOPK, hidden * 2)
        us = 20.0 + load.num_lanes * 3e-3 + load.num_bytes / rate / 1e3 + more_us
        points[name] = load, us

    put("fixed", 2048, 0, 1.0)
    put("thin", 64, 2048, 8.0)
    for num_tokens, rate in gbps.items():
        put(f"{num_tokens} tokens", 2048, num_tokens, rate)
    put("asleep", 64, 64, 8.0)
    put("awake", 64, 64, 8.0, 7.0)
    put("few 1", 2048, 512, 8.0)
    put("many 16", 2048, 512, 10.0)
    load = model.load_of("dispatch", 64, 2, 32, 8, fp8_bytes, num_cast=64 * 2048)
    points["cast"] = load, 20.0 + load.num_lanes * 3e-3 + load.num_bytes / 8e3 + load.num_cast * 50 / 1e6
    found = calibrate.constants_of(points, 1)
    assert (
        found.fixed_us == 20
        and found.lane_ns == pytest.approx(3, rel=0.05)
        and found.gbps == pytest.approx((8, 8, 4), rel=0.02)
    )
    assert found.wake_us == pytest.approx(7) and found.element_ps == pytest.approx(50, rel=0.05)
    assert found.sm_gbps == pytest.approx(8, rel=0.02) and found.most_gbps == pytest.approx(10, rel=0.02)
    for name in ("64 tokens", "4096 tokens", "cast"):
        assert sum(model.predict(found, points[name][0]).values()) == pytest.approx(points[name][1], rel=0.02)


def keep(backend, num_ranks, subject, c):
    measured.put("calibration", measured.key_of(backend, num_ranks, 1, subject), asdict(c))


def test_the_plan_is_used_and_gives_way(comm, backend, make_buffer):
    """Calls without num_sms take what the model says of their size; num_sms wins; results are the same."""
    sent = draw(3, comm.size, 64, num_experts=E * comm.size)
    plain = make_buffer(num_max_tokens_per_rank=64)
    usual = plain._num_blocks("dispatch", "rank")
    expected = results(plain, sent)
    if comm.rank == 0:
        # slower than it is, so that all cores seem of use even to small calls
        slow = constants(wake_us=0.0, sm_gbps=1e-3, most_gbps=1.0, usual_sms=usual, gbps=(1e-3,) * 3)
        for subject in ("dispatch", "combine"):
            keep(backend, comm.size, subject, slow)
    comm.Barrier()
    buf = make_buffer(num_max_tokens_per_rank=64)
    most = buf._most_sms("dispatch", "rank")
    assert buf.explain("dispatch", 64).num_sms == most and buf.explain("dispatch", 0).num_sms == 1
    assert_bits(results(buf, sent), expected, "planned")
    assert buf._num_blocks("dispatch", "rank") == usual  # what the plan said was of those calls alone
    buf.set_num_sms(1)
    assert buf.explain("dispatch", 64).num_sms == buf._num_blocks("dispatch", "rank")
    assert_bits(results(buf, sent), expected, "set")
    buf.set_num_sms(None)
    assert buf.explain("dispatch", 64).num_sms == most
    assert_bits(results(buf, sent), expected, "planned again")


def test_explain_knows_each_operation(comm, backend, make_buffer):
    if comm.rank == 0:
        for number, subject in enumerate(model.SUBJECTS):
            keep(backend, comm.size, subject, constants(fixed_us=100.0 + number, element_ps=1e3))
    comm.Barrier()
    buf = make_buffer(low_latency_mode=True, num_max_tokens_per_rank=16)
    fixed = {
        (op, layout): buf.explain(op, 16, layout=layout, num_sms=1).terms_us["fixed"]
        for op in model.OPERATIONS
        for layout in ("rank", "expert")
    }
    assert (
        fixed["dispatch", "rank"] == 100
        and fixed["dispatch", "expert"] == 102
        and fixed["combine", "expert"] == 103
    )
    assert fixed["low_latency_dispatch", "rank"] == fixed["low_latency_dispatch", "expert"] == 104
    told = buf.explain("low_latency_dispatch", 16, dtype="fp8")
    assert told.terms_us["cast"] == pytest.approx(16 * SIZES["hidden"] / 1e3) and told.dominant == "fixed"
    assert told.num_sms is None and "low-latency slots" in str(told) and "cast" in str(told)
    assert "cast" not in buf.explain("dispatch", 16, dtype="fp8").terms_us
    assert "expert layout, num_sms" in str(buf.explain("combine", 16, layout="expert"))


def test_a_bad_calibration_is_told_by_all_ranks(comm, backend, make_buffer):
    if comm.rank == 0:
        keep(backend, comm.size, "dispatch", constants(gbps=(8.0, 8.0)))
    comm.Barrier()
    with pytest.raises(epcy.ArgumentError, match="expected positive rates of ascending sizes"):
        make_buffer()
    comm.Barrier()
    make_buffer(num_sms=2).barrier()


def test_the_points_of_a_calibration(comm, backend, monkeypatch):
    """As many as the time is divided by; fewer only where SMs cannot change or calls have no jump."""
    names = []
    monkeypatch.setattr(
        calibrate, "time_calls", lambda buf, kind, *_: dict.fromkeys((kind.there, kind.back), (1.0, True))
    )
    for kind in (*calibrate.HIGH_THROUGHPUT, calibrate.LOW_LATENCY):
        run = calibrate.Calibration(comm, backend, 0.0, names.append)
        names.clear()
        run.measure(kind)
        assert len(names) == len(set(names)) <= calibrate.most_points(kind)
        assert len(names) >= 2 + len(calibrate.SIZES_BYTES) or kind.is_low_latency
        if kind.is_low_latency and backend == "nvshmem":
            assert len(names) == calibrate.most_points(kind)


@pytest.mark.slow
def test_calibrate_and_explain(comm, backend, make_buffer):
    found = calibrate.calibrate(comm, backend, seconds=1.0)
    comm.Barrier()
    buf = make_buffer()
    for operation in ("dispatch", "combine"):
        told = buf.explain(operation, 256)
        assert told.predicted_us == pytest.approx(sum(told.terms_us.values())) and told.predicted_us > 0
        assert told.dominant in ("fixed", "lanes", "rows") and 0 < told.floor_us <= told.predicted_us
        assert found[operation] == model.stored(operation, backend, comm.size, 1)
        json.dumps(told.as_dict())


@pytest.mark.slow
def test_tune_is_picked_up(comm, backend, make_buffer):
    said, steps = [], []
    options = {**SIZES, "num_experts": E * comm.size, "backend": backend}
    found = tune.tune(comm, 16, seconds=3.0, say=said.append, step=steps.append, **options)
    comm.Barrier()
    assert set(found) <= set(tune.knobs_of(backend)) and all(len(tried) > 1 for tried in found.values())
    assert (
        len(said) == (sum(map(len, found.values())) + 1 if comm.rank == 0 else 0)
        and len(steps) >= len(said) - 1
    )
    best = measured.get("tuning", tune.key_of(backend, comm.size, options), {})
    buf = make_buffer()
    assert {name for name in tune.KNOBS if name in best} == set(found) == set(best["us"])
    for name in found:
        if name != "num_sms" or backend == "host":
            assert buf.options[name] == best[name], name
    assert buf.num_sms >= best.get("num_sms", 1)  # nvshmem: at least a block for each rank
    assert make_buffer(num_sms=3).num_sms >= 3
    if backend == "host":
        buf = make_buffer(stream_bytes=12345, chunk_tokens=3)
        assert (buf.options["stream_bytes"], buf.options["chunk_tokens"]) == (12345, 3)
        assert buf.num_sms == best.get("num_sms", buf.num_sms)


@pytest.mark.host_only("the knobs that nvshmem has are one")
def test_what_is_given_is_neither_tried_nor_kept(comm, backend, make_buffer, monkeypatch):
    """Neither what is given as an argument nor, on any rank, in the environment."""
    if comm.rank == comm.size - 1:
        monkeypatch.setenv("EPCY_CHUNK_TOKENS", "7")
    options = {**SIZES, "num_experts": E * comm.size, "backend": backend}
    found = tune.tune(comm, 4, seconds=0.2, num_sms=2, **options)
    comm.Barrier()
    monkeypatch.delenv("EPCY_CHUNK_TOKENS", raising=False)
    assert list(found) == ["stream_bytes"]
    key = tune.key_of(backend, comm.size, options)
    kept = measured.get("tuning", key, {"stream_bytes": int})
    assert kept is not None and not {"num_sms", "chunk_tokens"} & {*kept, *kept["us"]}
    values = {**SIZES, "num_experts": E * comm.size, **dict.fromkeys(tune.KNOBS)}
    assert tune.lookup(backend, comm.size, values) == {"stream_bytes": kept["stream_bytes"]}
    buf = make_buffer()
    assert buf.options["stream_bytes"] == kept["stream_bytes"] and buf.options["chunk_tokens"] != 7
    said: list[str] = []
    given = {"num_sms": 2, "stream_bytes": 0, "chunk_tokens": 3}
    assert tune.tune(comm, 4, seconds=0.2, say=said.append, **options, **given) == {}
    assert said == (["no knob to try: nothing is kept"] if comm.rank == 0 else [])
    assert measured.get("tuning", key, {}) == kept
    comm.Barrier()


def test_knobs_change_no_bit(comm, make_buffer):
    sent = draw(5, comm.size, 64, num_experts=E * comm.size)
    buf = make_buffer(num_max_tokens_per_rank=64)
    expected = results(buf, sent)
    for num_sms, stream_bytes, chunk_tokens in ((1, 0, 1), (2, 0, 3), (3, 1 << 40, 1), (2, 40000, 64)):
        buf._use_knobs(num_sms=num_sms, stream_bytes=stream_bytes, chunk_tokens=chunk_tokens)
        assert buf.options["stream_bytes"] == stream_bytes
        assert_bits(results(buf, sent), expected, f"{num_sms}, {stream_bytes}, {chunk_tokens}")


def test_the_smallest_good_one_wins():
    found = {n: {"dispatch": d, "combine": 10.0} for n, d in ((1, 30.0), (2, 10.2), (4, 10.0), (8, 9.9))}
    assert tune.choose(found, None) == 2
    assert tune.choose(found, 4) == 4 and tune.choose(found, 1) == 8 and tune.choose(found, 99) == 8


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("not json", "cannot be read as JSON"),
        ("[1]", "expected version 1, got 'list'"),
        ('{"version": 7, "entries": {}}', "expected version 1, got 7"),
        ('{"version": 1, "entries": [1]}', "expected an object of entries"),
        (
            '{"version": 1, "entries": {"KEY": {"num_sms": "many", "stream_bytes": 1, "chunk_tokens": 1}}}',
            "expected num_sms to be int, got 'many'",
        ),
    ],
)
def test_a_bad_file_is_told_by_all_ranks(comm, backend, make_buffer, cache, content, text):
    values = {**SIZES, "num_experts": E * comm.size}
    if comm.rank == 0:
        key = json.dumps(tune.key_of(backend, comm.size, values))[1:-1]
        measured.folder().mkdir(exist_ok=True)
        (measured.folder() / "tuning.json").write_text(content.replace("KEY", key))
    comm.Barrier()
    with pytest.raises(epcy.ArgumentError) as caught:
        make_buffer()
    assert text in str(caught.value) and "EPCY_CACHE_DIR" in str(caught.value) and cache in str(caught.value)
    assert str(caught.value).endswith(f"(rank {comm.rank})")
    comm.Barrier()
    make_buffer(num_sms=2, stream_bytes=0, chunk_tokens=1).barrier()  # who says what he wants asks no file


def test_files_are_kept_beside_each_other(cache, comm):
    if comm.rank == 0:
        measured.put("calibration", "here", {"a": 1.0})
        measured.put("calibration", "there", {"a": 2})
        assert measured.get("calibration", "here", {"a": float}) == {"a": 1.0}
        assert measured.get("calibration", "there", {"a": float}) == {"a": 2}
        assert measured.get("calibration", "nowhere", {"a": float}) is None
        with pytest.raises(epcy.ArgumentError, match="expected b to be float, got None"):
            measured.get("calibration", "here", {"b": float})
    comm.Barrier()


@pytest.mark.slow
def test_tune_as_a_command(comm, backend, cache, capfd):
    """Lines on standard output, a bar on standard error, both of rank 0 alone; the file where it says."""
    sizes = ["--tokens", "8", "--hidden", "512", "--experts", str(E * comm.size), "--topk", "2"]
    assert main(["tune", *sizes, "--seconds", "1", "--backend", backend]) == 0
    comm.Barrier()
    out, err = capfd.readouterr()
    if comm.rank == 0:
        assert out.count("kept in") == 1 and cache in out and out.count("<- best") >= 1
        assert "of 1 s" in err
    else:
        assert out == err == ""


@pytest.mark.slow
def test_calibrate_as_a_command(comm, backend, capsys):
    assert main(["calibrate", "--seconds", "0.1", "--backend", backend]) == 0
    comm.Barrier()
    out = capsys.readouterr().out
    subjects = [line.partition(":")[0] for line in out.splitlines()]
    assert sorted(subjects) == (sorted(model.SUBJECTS) if comm.rank == 0 else [])


def test_progress_without_tqdm(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    progress = Progress(1.0, is_shown=True)
    progress.step("one")
    progress.say("a line")
    progress.close()
    assert capsys.readouterr() == ("a line\n", "")


def test_commands(comm, tmp_path):
    if comm.rank == 0:
        for command in ("calibrate", "tune"):
            done = subprocess.run(
                [sys.executable, "-m", "epcy", command, "--help"], capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0 and "--seconds" in done.stdout
    comm.Barrier()


def test_what_a_rank_measured_may_differ(comm, backend, make_buffer, tmp_path, monkeypatch):
    """Each rank reads its own files; only what was asked for must be the same on all."""
    monkeypatch.setenv("EPCY_CACHE_DIR", str(tmp_path / f"rank {comm.rank}"))
    if comm.rank == 0:
        measured.put(
            "tuning", tune.key_of(backend, comm.size, {**SIZES, "num_experts": E * comm.size}), {"num_sms": 4}
        )
    buf = make_buffer()
    if comm.rank == 0:
        assert buf.num_sms == 4
    results(buf, draw(3, comm.size, 8, num_experts=E * comm.size))
