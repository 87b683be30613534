"""The table of options: defaults, variables, kinds, bounds, and what the errors say."""

import pytest

from epcy.errors import ArgumentError
from epcy.options import DTYPES, OPTIONS, resolve

REQUIRED = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_experts": 8, "num_topk": 2}


def value(name, given=None, environ=None):
    return resolve({**REQUIRED, **({} if given is None else {name: given})}, environ or {})[name]


def test_table():
    names = [option.name for option in OPTIONS]
    variables = [option.env for option in OPTIONS if option.env]
    assert len(set(names)) == len(names) and len(set(variables)) == len(variables)
    for option in OPTIONS:
        assert option.kind in ("int", "float", "bool", "str", "choice")
        assert option.help.endswith(".") and bool(option.choices) == (option.kind == "choice")
        assert option.env in ("", f"EPCY_{option.name.upper()}")
        if option.default is not None:
            assert value(option.name, option.default).value == option.default


def test_origins():
    assert (value("timeout").value, value("timeout").origin) == (60.0, "default")
    one = value("timeout", environ={"EPCY_TIMEOUT": "3"})
    assert (one.value, one.origin, type(one.value)) == (3.0, "EPCY_TIMEOUT", float)
    one = value("timeout", 5, {"EPCY_TIMEOUT": "3"})
    assert (one.value, one.origin) == (5.0, "argument")
    assert value("timeout", environ={"EPCY_TIMEOUT": ""}).origin == "default"
    assert value("status_dir", environ={"EPCY_STATUS_DIR": ""}).origin == "EPCY_STATUS_DIR"


def test_process_environment(monkeypatch):
    monkeypatch.setenv("EPCY_NUM_SMS", "3")
    assert resolve(REQUIRED)["num_sms"].value == 3


@pytest.mark.parametrize(
    "text, wanted", [("1", True), ("YES", True), (" on ", True), ("false", False), ("0", False)]
)
def test_bool_variables(text, wanted):
    assert value("preinitialize", environ={"EPCY_PREINITIALIZE": text}).value is wanted


class Whole:
    def __index__(self):
        return 12


def test_kinds_that_fit():
    import pathlib

    import numpy as np

    assert value("hidden", np.int32(16)).value == 16 and value("hidden", Whole()).value == 12
    assert value("timeout", np.float32(2)).value == 2.0 and type(value("timeout", 2).value) is float
    assert value("status_dir", pathlib.Path("/x")).value == "/x"
    for dtype in DTYPES:
        assert value("dtype", dtype).value == dtype


@pytest.mark.parametrize(
    "name, given, texts",
    [
        ("hidden", 1.5, ("whole number", "1.5")),
        ("hidden", True, ("whole number", "True")),
        ("hidden", "64", ("whole number", "'64'")),
        ("hidden", 0, ("at least 1", "0")),
        ("num_topk", 2000, ("at most 1024", "2000")),
        ("timeout", 0, ("a number", "at least 0.001")),
        ("timeout", float("nan"), ("a number", "nan")),
        ("timeout", float("inf"), ("at most", "inf")),
        ("timeout", 10**400, ("a number", "1000000")),
        ("dtype", "float64", ("'bfloat16'", "'float32'", "'float64'")),
        ("dtype", float, ("'bfloat16'", "float")),
        ("backend", "cuda", ("'host'", "'nvshmem'", "'cuda'")),
        ("preinitialize", 1, ("True or False", "1")),
        ("status_dir", 7, ("string", "7")),
    ],
)
def test_wrong_values(name, given, texts):
    with pytest.raises(ArgumentError) as caught:
        value(name, given)
    assert str(caught.value).startswith(f"{name}: expected ")
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    "variable, text",
    [
        ("EPCY_NUM_SMS", "two"),
        ("EPCY_TIMEOUT", "soon"),
        ("EPCY_PREINITIALIZE", "maybe"),
        ("EPCY_BACKEND", "x"),
    ]
    + [("EPCY_NUM_SMS", "0"), ("EPCY_SPIN_US", "-1")],
)
def test_wrong_variables(variable, text):
    with pytest.raises(ArgumentError) as caught:
        resolve(REQUIRED, {variable: text})
    assert str(caught.value).startswith(f"{variable}: expected ") and text in str(caught.value)


@pytest.mark.parametrize("name", REQUIRED)
def test_required(name):
    given = {**REQUIRED}
    del given[name]
    with pytest.raises(ArgumentError, match=f"^{name}: expected a value, got none"):
        resolve(given, {})


def test_unknown():
    with pytest.raises(ArgumentError, match="^colour: no such option; the options are .*timeout"):
        resolve({**REQUIRED, "colour": "blue"}, {})
