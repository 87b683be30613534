"""Bytes of any kind in every file that epcy reads: a clear error or a value that makes sense, and nothing else.

Read are the cache folder's tuning.json and calibration.json, recorded routings of the bench, status pages, and the
record of the build. A mutated good file finds more than random bytes do, so there are both.
"""

from __future__ import annotations

import io
import json
import math
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from epcy import errors, info, measured, model, status, top, tune
from epcy.bench import workload
from epcy.options import BY_NAME

VALUES = {"hidden": 512, "num_experts": 8, "num_topk": 2, **dict.fromkeys(tune.KNOBS)}
CONSTANTS = dict.fromkeys(model.Constants.__dataclass_fields__, 2.5)
CONSTANTS |= {"usual_sms": 2, "sizes_bytes": [1e5, 1e6], "gbps": [8.0, 4.0]}

some = settings(
    deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=bool(os.environ.get("CI")),
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EPCY_CACHE_DIR", str(tmp_path))
    return tmp_path


def mutations(whole: bytes, most: int = 6):
    """The file with some bytes changed, left out or put in."""
    change = st.tuples(
        st.integers(0, len(whole)), st.sampled_from(["set", "cut", "put", "end"]), st.binary(max_size=4)
    )

    def apply(changes):
        raw = whole
        for at, what, new in changes:
            raw = {"set": raw[:at] + new + raw[at + len(new) :], "cut": raw[:at] + raw[at + len(new) :],
                   "put": raw[:at] + new + raw[at:], "end": raw[:at]}[what]  # fmt: skip
        return raw

    return st.lists(change, min_size=1, max_size=most).map(apply)


def numbers():
    return st.one_of(st.integers(-2, 2000), st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=3),
                     st.sampled_from([10**30, 10**400, -0.0, [], {}]))  # fmt: skip


def dumped(content) -> bytes:
    return json.dumps({"version": 1, "entries": content}).encode()


def told(error: errors.ArgumentError, path) -> None:
    """The error names the variable, the file and a remedy, in one line of a size that can be read."""
    text = str(error)
    assert text.startswith("EPCY_CACHE_DIR: ") and ("remove the file" in text or "again" in text), text
    assert path.stem in text, text


def look_for_tuning(path):
    try:
        found = tune.lookup("host", 2, VALUES)
    except errors.ArgumentError as error:
        told(error, path)
    else:
        for name, value in found.items():
            assert type(value) is int and BY_NAME[name].minimum <= value <= BY_NAME[name].maximum


@some
@given(
    raw=st.one_of(st.binary(max_size=200), mutations(dumped({"KEY": {"num_sms": 2, "chunk_tokens": 8}}), 4))
)
@example(raw=b"[" * 100_000)
@example(raw=b'{"version": 1, "entries": ' * 50_000)
@example(raw=b"\xff\xfe{}")
@example(raw=b'{"version": 1e999, "entries": {}}')
@example(raw=b'{"version": 1, "entries": {"KEY": {"num_sms": ' + b"9" * 5000 + b"}}}")
def test_tuning_of_any_bytes(cache, raw):
    path = cache / "tuning.json"
    path.write_bytes(raw.replace(b"KEY", json.dumps(tune.key_of("host", 2, VALUES))[1:-1].encode()))
    look_for_tuning(path)


@some
@given(entry=st.dictionaries(st.sampled_from([*tune.KNOBS, "more"]), numbers(), max_size=3))
def test_tuning_of_any_values(cache, entry):
    path = cache / "tuning.json"
    path.write_bytes(dumped({tune.key_of("host", 2, VALUES): entry}))
    look_for_tuning(path)


def look_for_calibration(path):
    try:
        found = model.stored("dispatch", "host", 2, 1)
    except errors.ArgumentError as error:
        told(error, path)
        return
    if found is not None:
        times = model.predict(found, model.load_of("dispatch", 16, 2, 8, 2, 1024))
        assert all(isinstance(us, float) and not math.isnan(us) for us in times.values()), (found, times)


@some
@given(changes=st.dictionaries(st.sampled_from([*CONSTANTS, "more"]), numbers(), min_size=1, max_size=4))
def test_calibration_of_any_value(cache, changes):
    path = cache / "calibration.json"
    path.write_bytes(dumped({measured.key_of("host", 2, 1, "dispatch"): CONSTANTS | changes}))
    look_for_calibration(path)


@some
@given(raw=mutations(dumped({"KEY": CONSTANTS})))
def test_calibration_of_any_bytes(cache, raw):
    path = cache / "calibration.json"
    path.write_bytes(
        raw.replace(b"KEY", json.dumps(measured.key_of("host", 2, 1, "dispatch"))[1:-1].encode())
    )
    look_for_calibration(path)


@pytest.mark.parametrize("kind", ["folder", "unreadable"])
def test_what_is_no_file(cache, kind):
    path = cache / "tuning.json"
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path)  # a link to itself
        assert tune.lookup("host", 2, VALUES) == {}  # as if it were not there
        return
    with pytest.raises(errors.ArgumentError) as caught:
        tune.lookup("host", 2, VALUES)
    told(caught.value, path)


def test_a_knob_that_was_not_tried_has_no_value(cache):
    measured.put("tuning", tune.key_of("host", 2, VALUES), {"chunk_tokens": 8, "num_tokens": 4})
    assert tune.lookup("host", 2, VALUES) == {"chunk_tokens": 8}
    assert tune.lookup("host", 2, {**VALUES, "chunk_tokens": 2}) == {}


def test_put_keeps_no_half_file(cache, monkeypatch):
    measured.put("tuning", "a", {"num_sms": 1})
    with pytest.raises(TypeError):
        measured.put("tuning", "b", {"num_sms": object()})
    assert [path.name for path in cache.iterdir()] == ["tuning.json"]
    assert measured.get("tuning", "a", {"num_sms": int}) == {"num_sms": 1}


# ---- routings of the bench


def npy(array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(array) -> bytes:
    file = io.BytesIO()
    np.savez(file, array)
    return file.getvalue()


GOOD = npy(np.array([[0, 1], [2, 7], [4, -1]]))


def load(path):
    try:
        got = workload.load_routing(path, 2, 8)
    except ValueError as error:
        assert str(error).startswith(f"--routing {path.name}: "), error
        return
    assert got.dtype == np.int64 and got.shape[-1] == 2 and got.ndim in (2, 3) and got.size
    assert got.min() >= -1 and got.max() < 8


@some
@given(raw=st.one_of(st.binary(max_size=200), mutations(GOOD), mutations(npz([[1, 2]]))))
@example(raw=npz([[1, 2]]))
@example(raw=GOOD.replace(b"(3, 2)", b"(9**9,)"))
@example(raw=GOOD.replace(b"(3, 2), }", b"(999999999999999, 2), }"))
@example(raw=npy(np.array([[0, 1]], dtype=">i2")))
@example(raw=npy(np.array([[2**64 - 1, 1]], dtype=np.uint64)))
def test_routing_of_any_bytes(tmp_path, raw):
    path = tmp_path / "ids.npy"
    path.write_bytes(raw)
    load(path)


def test_a_routing_is_never_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    path = tmp_path / "ids.npy"
    np.save(path, np.array([[Trap(), Trap()]], dtype=object), allow_pickle=True)
    load(path)
    import pickle

    path.write_bytes(pickle.dumps(Trap()))
    load(path)
    assert not (tmp_path / "sprung").exists()


# ---- status pages (test_status.py has more) and what `top` makes of them


@some
@given(
    first=st.binary(min_size=200, max_size=400),
    second=st.binary(min_size=200, max_size=400),
    op=st.integers(0, 6),
    phase=st.integers(0, 3),
    experts=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_top_of_any_pages(tmp_path, first, second, op, phase, experts):
    pages = []
    for raw, count in zip((first, second), experts, strict=True):
        page = bytearray(raw)
        status._FORMAT.pack_into(page, 0, status._MAGIC, status._VERSION, 7, 1, 2, op, phase, 9, 5, *range(7))
        page[136:144] = count.to_bytes(8, "little")
        pages.append(status.parse(bytes(page)))
    assert None not in pages
    for now, before in ((pages[:1], ()), (pages[1:], pages[:1]), (pages, pages)):
        for line in top.lines(now, before, 1.0):
            assert all(isinstance(cell, str) for cell in line.cells())


def test_a_pipe_among_the_pages_is_not_waited_for(tmp_path):
    folder = status.folder(str(tmp_path / "pages"))
    os.mkfifo(folder / f"{os.getpid()}-0-0")
    assert status.read_all(str(folder)) == []


# ---- the record of the build


@some
@given(raw=st.binary(max_size=60))
@example(raw=b"[" * 100_000)
@example(raw=b"[]")
def test_build_record_of_any_bytes(tmp_path, monkeypatch, raw):
    (tmp_path / "_build.json").write_bytes(raw)
    monkeypatch.setattr(info, "__file__", str(tmp_path / "info.py"))
    assert isinstance(info._build_record(), dict)
