"""The description of faults on purpose: what it means, and that no text at all does anything but an ArgumentError."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epcy import faults
from epcy.errors import ArgumentError


def test_parse():
    assert faults.parse("") == faults.parse(" ; ") == []
    one, two = faults.parse("delay:ms=2.5,seed=7; kill:rank=1,operation=combine,phase=data,call=100")
    assert one == faults.Fault("delay", ms=2.5, seed=7)
    assert two == faults.Fault("kill", rank=1, operation="combine", phase="data", call=100)


@pytest.mark.parametrize(
    "text",
    [
        "explode",
        "delay:when=1",
        "delay:ms=x",
        "kill:rank=-1",
        "drop:operation=dance",
        "late:ms=nan",
        "drop:phase=x",
    ],
)
def test_wrong(text):
    with pytest.raises(ArgumentError) as caught:
        faults.parse(text)
    assert str(caught.value).startswith("faults: expected ") and text.split("=")[-1].split(":")[-1] in str(
        caught.value
    )


def test_when():
    drops = faults.Faults("drop:operation=combine,call=2; drop:rank=3", 0)
    assert [drops.drops("combine", "arrival") for _ in range(3)] == [False, True, False]
    assert not drops.drops("dispatch", "arrival")
    every = faults.Faults("alloc:every=2; lie:by=-3; full", 0)
    assert [every.fails("dispatch") for _ in range(4)] == [False, True, False, True]
    assert every.lie("dispatch") == -3 and every.is_full()


KEYS = st.sampled_from(["rank", "operation", "phase", "call", "every", "ms", "seed", "by", "x", ""])
VALUES = st.one_of(
    st.integers(-3, 3).map(str),
    st.sampled_from(["combine", "data", "nan", "inf", "1e999", ""]),
    st.text(max_size=5),
)
PARTS = st.tuples(st.sampled_from([*faults.KINDS, "?"]), st.lists(st.tuples(KEYS, VALUES), max_size=3)).map(
    lambda part: part[0] + ":" + ",".join("=".join(pair) for pair in part[1])
)


@settings(deadline=None, max_examples=300)
@given(text=st.one_of(st.text(), st.lists(PARTS, max_size=3).map(";".join)))
def test_any_text(text):
    try:
        found = faults.parse(text)
    except ArgumentError as error:
        assert str(error).startswith("faults: ")
    else:
        assert all(one.kind in faults.KINDS for one in found)


def test_take():
    found = faults.Faults("alloc:operation=constructor,phase=data,call=2; os:operation=constructor,call=3", 0)
    found.take("constructor", "data")
    with pytest.raises(MemoryError, match="EPCY_FAULTS"):
        found.take("constructor", "data")
    with pytest.raises(OSError, match="EPCY_FAULTS"):
        found.take("constructor", "completion")
    found.take("warmup", "arrival")
    in_mid_call = faults.Faults("alloc:operation=combine,phase=data", 0)
    in_mid_call.reach("combine", "arrival")
    assert not in_mid_call.fails("combine")
    with pytest.raises(MemoryError):
        in_mid_call.reach("combine", "data")
