"""What goes wrong on one rank is told as such, and no test run hangs."""

import pytest

from parallel import launch, merge

CASES = {
    "": (0, ["3 passed"]),
    "one": (1, ["[rank 2]", "assert 2 != 2", "1 failed, 3 passed"]),
    "all": (1, ["[ranks 0, 1, 2]", "1 failed, 3 passed"]),
    "diverge": (
        None,
        ["rank 1 leaves", "ranks that did not come: [0, 2]", "[rank 0] stands at:", "in test_diverge"],
    ),
    "stuck": (None, ["ranks that did not come: [2]", "[rank 2] stands at:", "in test_stuck"]),
    "timeout": (None, ["Timeout", "in test_timeout"]),
    "skip": (1, ["skipped on some ranks only", "1 failed, 2 passed"]),
    "shrink": (1, ["[rank 1]", "n=38", "1 failed, 2 passed"]),
    "example": (None, ["test_given on {'n': ", "rank 1 leaves", "ranks that did not come: [0, 2]"]),
    "import": (None, ["[rank 1] 0 tests, 1 errors", "rank 1 alone"]),
}


@pytest.mark.parametrize("probe", CASES)
def test_probe(probe):
    code, texts = CASES[probe]
    env = {"PROBE": probe, "EPCY_TEST_GRACE": "1", "EPCY_TEST_LIMIT": "3", "EPCY_TEST_BACKENDS": "host"}
    done = launch(3, ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/rank_probe.py"], env=env)
    told = done.stdout + done.stderr
    assert (done.returncode == code) if code is not None else done.returncode != 0, told
    for text in texts:
        assert text in told, told


def test_merge_tells_equal_texts_once():
    assert merge(["x at 0x12", "x at 0x34", None]) == "[ranks 0, 1] x at 0x12"
    assert merge([None, "a", "b"]) == "[rank 1] a\n[rank 2] b"
