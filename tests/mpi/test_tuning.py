"""Knobs and predictions: set_num_sms, num_sms= of a call, explain, calibrate, tune; what the cache folder keeps."""

import json
import subprocess
import sys

import numpy as np
import pytest

import epcy
from epcy import calibrate, measured, model, tune
from mpi.cases import assert_bits, draw, mine

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
    after = buf.explain("combine", 16)
    assert after.num_measured == 1 and after.measured_us > 0 and "measured" in str(after)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("sort", 1), "op: expected one of"), (("dispatch", -1), "num_tokens: expected"),
     (("dispatch", True), "num_tokens: expected"), (("dispatch", 1, "int4"), "dtype: expected one of")],
)  # fmt: skip
def test_explain_arguments(make_buffer, arguments, text):
    buf = make_buffer()
    op, num_tokens, *dtype = arguments
    with pytest.raises(epcy.ArgumentError, match=text):
        buf.explain(op, num_tokens, dtype=dtype[0] if dtype else None)


def test_load_is_that_of_random_routing():
    load = model.load_of(1000, 4, 16, 3, 100)
    rng = np.random.default_rng(0)
    drawn = np.argsort(rng.random((20000, 16)), axis=1)[:, :3] // 4
    share = (drawn == 1).any(axis=1).mean()
    assert load.rows_to_peer == pytest.approx(1000 * share, rel=0.02)
    assert model.load_of(10, 1, 8, 2, 100).rows_to_peer == 10


def test_constants_are_found_again():
    """Times that follow the model give back its constants."""
    truth = model.Constants(20.0, 3.0, 8.0, 4.0, 0.0, 0.0)
    us = {}
    for name, hidden, num_tokens, gbps in (
        ("fixed", calibrate.HIDDEN, 0, 8.0), ("lanes", calibrate.SMALL_HIDDEN, calibrate.LARGE_TOKENS, 4.0),
        ("small", calibrate.HIDDEN, calibrate.SMALL_TOKENS, 8.0),
        ("large", calibrate.HIDDEN, calibrate.LARGE_TOKENS, 4.0),
    ):  # fmt: skip
        load = model.load_of(num_tokens, 2, 32, calibrate.NUM_TOPK, hidden * 2)
        us[name] = truth.fixed_us + load.num_lanes * truth.lane_ns / 1e3 + load.num_bytes / gbps / 1e3
    found = calibrate.constants_of(us, 2, 32)
    assert found.fixed_us == 20 and found.lane_ns == pytest.approx(3, rel=0.02)
    assert (found.small_gbps, found.large_gbps) == pytest.approx((8, 4), rel=0.02)
    assert sum(model.predict(found, load).values()) == pytest.approx(us["large"], rel=0.01)


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
    said = []
    options = {**SIZES, "num_experts": E * comm.size, "backend": backend}
    found = tune.tune(comm, 16, seconds=2.0, say=said.append, **options)
    comm.Barrier()
    best = tune.choose(found)
    assert len(said) == (len(found) + 1 if comm.rank == 0 else 0)
    assert make_buffer().num_sms >= best  # nvshmem: at least a block for each rank
    assert make_buffer(num_sms=3).num_sms >= 3
    if backend == "host":
        assert make_buffer().num_sms == best and make_buffer(num_sms=3).num_sms == 3


def test_the_smallest_good_one_wins():
    found = {n: {"dispatch": d, "combine": 10.0} for n, d in ((1, 30.0), (2, 10.2), (4, 10.0), (8, 9.9))}
    assert tune.choose(found) == 2


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("not json", "cannot be read as JSON"),
        ("[1]", "expected version 1, got 'list'"),
        ('{"version": 7, "entries": {}}', "expected version 1, got 7"),
        ('{"version": 1, "entries": [1]}', "expected an object of entries"),
        ('{"version": 1, "entries": {"KEY": {"num_sms": "many"}}}', "expected num_sms to be int, got 'many'"),
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
    comm.Barrier()
    make_buffer(num_sms=2).barrier()  # who says what he wants asks no file


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


def test_commands(comm, tmp_path):
    if comm.rank == 0:
        for command in ("calibrate", "tune"):
            done = subprocess.run(
                [sys.executable, "-m", "epcy", command, "--help"], capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0 and "--seconds" in done.stdout
    comm.Barrier()
