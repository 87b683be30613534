"""Files of recordings: whatever the bytes, a recording or an ArgumentError that names the file; and their cuts."""

import io
import json
import stat
import zipfile

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings

from epcy.errors import ArgumentError
from epcy.options import resolve
from epcy.recording import Call, Recorded, Recording, read, spread, write
from epcy.recording.checks import OPERATIONS, PLACES
from epcy.recording.cut import compact, keep_calls, with_arguments, with_hidden, with_tokens, without_lane
from epcy.recording.shrink import shrink
from epcy.recording.spread import pieces

SIZES = {"num_max_tokens_per_rank": 8, "hidden": 128, "num_experts": 8, "num_topk": 2}
DISPATCH = {
    "dtype": "bfloat16", "has_weights": True, "layout": None, "expert_alignment": None, "num_worst_tokens": 0,
    "num_sms": None, "own_output": False,
}  # fmt: skip
COMBINE = {"dtype": "bfloat16", "has_weights": False, "num_biases": 0, "num_sms": None}


def recording(payload=True):
    """Two ranks: a dispatch, its combine, a cached dispatch that rank 1 never came to."""
    options = {name: value.value for name, value in resolve(SIZES, {}).items() if name not in PLACES}
    rng = np.random.default_rng(0)
    idx = [rng.integers(-1, 8, (tokens, 2)).astype(np.int16) for tokens in (5, 3)]
    x = [rng.integers(0, 2**16, (tokens, 128)).astype(np.uint16) for tokens in (5, 3)]
    times = np.array([(1, 10), (2, 20)], np.int64)
    calls = [
        Call(0, 0, "dispatch", [DISPATCH] * 2, None, [5, 3], [0, 1], times, payload={"x": [0, 1]} if payload else {}),
        Call(0, 1, "combine", [COMBINE, {**COMBINE, "num_biases": 1}], 0, [0, 0], [-1, -1], times),
        Call(0, 2, "dispatch", [DISPATCH] * 2, 0, [5, -1], [-1, -1], times - 30, {0: "PeerTimeoutError: rank 1"}),
    ]  # fmt: skip
    return Recording(2, "host", [Recorded((0, 1), options)], calls, idx, x if payload else [], 1, "0", "now")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("recording") / "run.npz"
    write(path, recording())
    return path


def test_there_and_back(tmp_path):
    for payload in (False, True):
        path = tmp_path / f"{payload}.npz"
        want = recording(payload)
        write(path, want)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        got = read(path)
        assert got.buffers == want.buffers and len(got.calls) == 3
        for a, b in zip(got.calls, want.calls, strict=True):
            assert np.array_equal(a.times_ns, b.times_ns)
            assert {**vars(a), "times_ns": 0} == {**vars(b), "times_ns": 0}
        for name in ("routings", "payloads"):
            assert all(map(np.array_equal, getattr(got, name), getattr(want, name)))
            assert [a.dtype for a in getattr(got, name)] == [a.dtype for a in getattr(want, name)]
        assert (got.num_ranks, got.backend, got.num_dropped, got.date) == (2, "host", 1, "now")
        write(path, got)  # over itself
        assert [p.name for p in tmp_path.iterdir() if ".part" in p.name] == []
    with np.load(path, allow_pickle=False) as file:
        assert set(file) == {"header", "topk_idx", "routings", "times", "payload"}


def refused(path, data):
    path.write_bytes(data)
    try:
        found = read(path)
    except ArgumentError as error:
        assert repr(str(path)) in str(error) and len(str(error)) < 2000
        return str(error)
    assert isinstance(found, Recording)
    for call in found.calls:  # what reading let through can be used
        for rank in range(found.buffers[call.buffer].num_ranks):
            found.routing_of(call, rank)
    spread(found, 1)
    return None


FUZZ = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@FUZZ
@given(st.binary(max_size=300))
@example(b"")
@example(b"PK\x05\x06" + bytes(18))
def test_any_bytes(tmp_path, data):
    assert refused(tmp_path / "it.npz", data) is not None


@FUZZ
@given(
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6),
    st.floats(0, 1),
)
def test_changed_bytes(tmp_path, whole, changes, cut):
    data = bytearray(whole.read_bytes())
    for place, value in changes:
        data[int(place * len(data))] = value
    refused(tmp_path / "it.npz", bytes(data))
    assert refused(tmp_path / "it.npz", bytes(data[: int(cut * len(data))])) is not None or cut > 0.9


def repacked(members, **changes):
    """The file with other members: arrays, or the bytes of one."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, value in {**members, **changes}.items():
            if isinstance(value, np.ndarray):
                buffer = io.BytesIO()
                np.lib.format.write_array(buffer, value, allow_pickle=True)
                value = buffer.getvalue()
            if value is not None:
                file.writestr(f"{name}.npy", value)
    return out.getvalue()


@pytest.fixture(scope="module")
def members(whole):
    with np.load(whole) as file:
        return dict(file)


@FUZZ
@given(st.sampled_from(["header", "topk_idx", "routings", "times", "payload"]), st.data())
def test_changed_members(tmp_path, members, name, data):
    """Inside a whole zip, where no checksum helps."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, members[name])
    changed = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    refused(tmp_path / "it.npz", repacked(members, **{name: bytes(changed)}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
    | st.sampled_from(OPERATIONS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@FUZZ
@given(st.data())
def test_changed_header(tmp_path, members, data):
    """Any value anywhere in the JSON."""
    header = json.loads(members["header"].tobytes())
    at = header
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(at[key], (dict, list)) and at[key] and data.draw(st.booleans()):
            at = at[key]
            continue
        at[key] = data.draw(JSON)
        break
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    refused(tmp_path / "it.npz", repacked(members, header=text))


def changed_header(members, change):
    header = json.loads(members["header"].tobytes())
    change(header)
    return np.frombuffer(json.dumps(header).encode(), np.uint8)


def setting(*path, value):
    def change(header):
        at = header
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return change


WRONG = [
    (setting("format", value="something"), "expected the format 'epcy recording'"),
    (setting("version", value=99), "expected version 1, got 99"),
    (setting("backend", value="pigeon"), "backend: expected one of"),
    (setting("num_ranks", value=0), "num_ranks: expected 1 to"),
    (setting("buffers", 0, "ranks", value=[0, 7]), "ranks of 2"),
    (setting("buffers", 0, "options", "hidden", value=-1), "hidden: expected a whole number"),
    (setting("buffers", 0, "options", "num_experts", value=7), "7 experts on 2 ranks"),
    (setting("calls", 0, "op", value="fly"), "calls[0].op"),
    (setting("calls", 1, "refers", value=1), "expected an earlier call than 1"),
    (setting("calls", 1, "refers", value=None), "calls[1].refers"),
    (setting("calls", 0, "tokens", value=[5]), "expected 2 entries, got 1"),
    (setting("calls", 0, "routing", value=[0, 9]), "routing 9 on rank 1"),
    (setting("calls", 0, "args", 0, "layout", value="heap"), "layout: expected one of"),
    (setting("calls", 0, "args", 0, "colour", value="blue"), "a dispatch has no 'colour'"),
    (setting("calls", 2, "errors", value={"5": "x"}), "expected ranks below 2"),
    (setting("payloads", 0, "dtype", value="|O"), "payloads[0].dtype"),
    (setting("payloads", 0, "shape", value=[10**9, 128]), "payload 0"),
    (setting("calls", 0, "payload", "x", value=[5, 0]), "payload 5 is no x"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[one[1] for one in WRONG])
def test_what_is_wrong_is_named(tmp_path, members, number):
    change, text = WRONG[number]
    said = refused(tmp_path / "it.npz", repacked(members, header=changed_header(members, change)))
    assert said is not None and text in said, said


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"times": None}, "times is missing"),
        ({"more": np.zeros(1)}, "got a member 'more.npy'"),
        ({"topk_idx": np.array([{}])}, "topk_idx: "),  # a pickle
        ({"times": np.zeros((1, 2), np.int64)}, "call 0: times of 2 ranks"),
        ({"times": np.zeros((9, 2), np.int64)}, "times of 9 rows"),
        ({"times": np.zeros((6, 2), np.float64)}, "times: expected an array of <i8"),
        ({"routings": np.array([[0, 99, 2], [10, 3, 2]])}, "routing 0"),
        ({"routings": np.array([[-1, 1, 2], [10, 3, 2]])}, "routing 0"),
        ({"header": np.frombuffer(b"{" * 100_000, np.uint8)}, "header: no JSON"),
        ({"header": np.frombuffer(b"[" * 100_000, np.uint8)}, "header: no JSON"),
    ],
)  # fmt: skip
def test_wrong_members(tmp_path, members, changes, text):
    said = refused(tmp_path / "it.npz", repacked(members, **changes))
    assert said is not None and text in said, said


def test_a_bomb(tmp_path, members):
    """A member that claims to be far larger than what is there."""
    data = bytearray(repacked(members))
    at = data.rindex(b"PK\x01\x02")
    data[at + 24 : at + 28] = (2**31 - 1).to_bytes(4, "little")
    said = refused(tmp_path / "it.npz", bytes(data))
    assert said is not None and "cannot hold" in said


def test_no_file(tmp_path):
    with pytest.raises(ArgumentError, match="no such file"):
        read(tmp_path / "not.npz")
    with pytest.raises(ArgumentError, match="cannot be read"):
        read(tmp_path)


# ---- on other numbers of ranks, and cut


@settings(deadline=None)
@given(st.lists(st.integers(-1, 40), min_size=1, max_size=9), st.integers(1, 9))
def test_tokens_keep_their_order(num_tokens, num_ranks):
    cut = pieces(num_tokens, num_ranks)
    assert len(cut) == num_ranks
    order = [(rank, t) for parts in cut for rank, first, end in parts for t in range(first, end)]
    assert order == [(rank, t) for rank, count in enumerate(num_tokens) for t in range(count)]
    if num_ranks == len(num_tokens):
        assert all(rank == new for new, parts in enumerate(cut) for rank, _, _ in parts)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_spread(num_ranks):
    old = recording()
    new = spread(old, num_ranks)
    ids = [np.concatenate([r.routing_of(r.calls[0], k) for k in range(r.num_ranks)]) for r in (old, new)]
    assert np.array_equal(*ids) and new.num_ranks == num_ranks
    rows = [[r.payloads[p] for p in r.calls[0].payload["x"] if p >= 0] for r in (old, new)]
    assert np.array_equal(*map(np.concatenate, rows))
    options = new.buffers[0].options
    assert max(max(call.num_tokens) for call in new.calls) <= options["num_max_tokens_per_rank"]
    if num_ranks == 2:
        assert options == old.buffers[0].options
    elif num_ranks == 1:
        assert options["num_max_recv_tokens"] == (ids[0] >= 0).any(1).sum()
    with pytest.raises(ArgumentError, match="divides the 8 experts"):
        spread(old, 3)


def test_cuts(tmp_path):
    def check(made):
        write(tmp_path / "cut.npz", made)
        return read(tmp_path / "cut.npz")

    old = recording()
    assert [c.op for c in check(keep_calls(old, {0, 1})).calls] == ["dispatch", "combine"]
    assert check(keep_calls(old, {1, 2})).calls == []  # their handle is gone
    one = check(with_tokens(old, 0, 1, [0, 2]))
    assert [call.num_tokens for call in one.calls if call.op == "dispatch"] == [[5, 2], [5, 2]]
    assert np.array_equal(one.routing_of(one.calls[0], 1), old.routing_of(old.calls[0], 1)[[0, 2]])
    assert np.array_equal(one.payloads[one.calls[0].payload["x"][1]], old.payloads[1][[0, 2]])
    lane = check(without_lane(old, 0, 1))
    assert (lane.routing_of(lane.calls[0], 0)[:, 1] == -1).all() and old.routings[0][:, 1].max() >= 0
    short = check(with_hidden(old, 64))
    assert short.buffers[0].options["hidden"] == 64 and not short.payloads
    assert check(with_arguments(old, 0, {"has_weights": False})).calls[0].args[1]["has_weights"] is False
    assert len(compact(keep_calls(old, ())).buffers) == 0


def test_shrink_finds_the_smallest():
    """Fails where rank 0 sends something to expert 6 in a first call: one token, one lane are enough."""
    old = recording()
    old.routings[0][3] = (1, 6)

    def fails(one):
        return one.calls[0].op == "dispatch" and any((r == 6).any() for r in one.routings)

    said = []
    one = shrink(old, fails, say=said.append)
    (call,) = one.calls
    assert one.num_ranks == 1 and call.num_tokens == [1] and one.routings[0].tolist() == [[-1, 6]]
    assert one.buffers[0].options["hidden"] == 8 and call.args[0]["has_weights"] is False
    assert said[-1] == "1 call, 1 rank, 1 token, 1 lane, H 8"


def test_shrink_is_bounded_in_time():
    old = recording()
    assert shrink(old, lambda one: True, seconds=-1) is old
