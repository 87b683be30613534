"""Every option of every command line that takes a number refuses nonsense by its name; errors are one line."""

import argparse

import pytest

import epcy
from epcy import command_line
from epcy.__main__ import main, parser
from epcy.bench import arguments, replay

NONSENSE = ["nan", "inf", "-inf", "-1", "x", "", "1e30", "0x10", "99999999999999999999"]
NATURAL = {"--seed", "--warmup"}  # 0 is one of their values
# Options whose value is no number, and none of a few words: what they may be is tested where they are read.
TEXTS = {"CASE", "FILE", "DIR", "WORDS", "ROUTING", "NAMES", "NAME=VALUE", "COMMAND"}


def parsers():
    """All of them, by what calls them."""
    found = {"bench": arguments._make_parser(), "bench replay": replay.make_parser()}
    commands = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return found | commands.choices


def options(wanted):
    for command, one in parsers().items():
        for action in one._actions:
            if action.nargs != 0 and not action.choices and (action.type is not None) == wanted:
                yield command, one, action


NUMBERS = [
    pytest.param(one, action, id=f"{command} {action.option_strings[-1]}")
    for command, one, action in options(True)
]


def test_no_number_is_forgotten():
    assert len(NUMBERS) >= 35
    unknown = [(command, action.dest) for command, _, action in options(False) if action.metavar not in TEXTS]
    assert not unknown, "say in TEXTS what they take, or give them a type of epcy.command_line"


@pytest.mark.parametrize("one, action", NUMBERS)
def test_nonsense_is_refused_by_name(capsys, one, action):
    name = action.option_strings[-1]
    zero = [] if name in NATURAL else ["0"]
    half = ["1.5"] if isinstance(action.default, int) else []
    positionals = ["x"] if any(a.dest == "file" for a in one._actions) else []
    for text in [*NONSENSE, *zero, *half]:
        with pytest.raises(SystemExit) as left:
            one.parse_args([*positionals, f"{name}={text}"])
        assert left.value.code == 2
        told = capsys.readouterr().err.splitlines()[-1]
        assert f"error: argument {'/'.join(action.option_strings)}: expected " in told, told
        assert f"got {text!r}" in told
    good = 0 if name in NATURAL else 3
    assert getattr(one.parse_args([*positionals, f"{name}={good}"]), action.dest) == good


@pytest.mark.parametrize(
    "argv, words",
    [
        ("simulate --nodes 3 --experts 256", "num_experts: expected a multiple of the 24 ranks"),
        ("simulate --set nic_gbps=nan", "set: nic_gbps: expected a positive number, got nan"),
        ("simulate --set nic_gbps=inf", "set: nic_gbps: expected a positive number, got inf"),
        ("simulate --routing /nowhere.npz", "routing: "),
        ("replay /nowhere.npz --launcher true", "/nowhere.npz"),
    ],
)
def test_an_error_is_one_line(capsys, argv, words):
    assert main(argv.split()) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and told.startswith("epcy: ") and words in told, told


@pytest.mark.parametrize(
    "error, status",
    [
        (epcy.ArgumentError("hidden: wrong\nvery"), 2),
        (epcy.HeapError("x: none"), 2),
        (MemoryError(), 2),
        (epcy.PeerError("rank 1 refused", [1]), 2),
        (epcy.PeerTimeoutError("barrier: late", [1]), 1),
        (epcy.BackendError("CUDA: lost"), 1),
        (OSError(28, "No space left on device"), 1),
    ],
)
def test_status(capsys, error, status):
    assert command_line.report("epcy", error) == status
    told = capsys.readouterr().err
    assert told.startswith("epcy: ") and told.count("\n") == 1 and len(told) > 12
