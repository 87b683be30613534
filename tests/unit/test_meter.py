"""The buckets of histograms: each time falls into one, and its middle is near enough."""

import pytest

from epcy.backends.meter import bucket_of
from epcy.stats import imbalance


def test_buckets_are_without_gaps():
    end = 0
    seen = -1
    for ns in [*range(5000), *[2**k + d for k in range(13, 40) for d in (-1, 0, 1, 12345)]]:
        bucket, first, last = bucket_of(ns)
        assert first <= ns < last
        assert bucket >= seen or ns < end
        seen, end = max(seen, bucket), max(end, ns)


@pytest.mark.parametrize("ns", [17, 100, 999, 12_345, 7_000_000, 3 * 10**9])
def test_the_middle_of_a_bucket_is_near(ns):
    _, first, last = bucket_of(ns)
    assert (last - first) / 2 / first <= 1 / 32


def test_bounds():
    assert bucket_of(-5)[0] == 0
    assert bucket_of(2**62)[0] == bucket_of(2**61)[0] == 591


def test_imbalance():
    assert imbalance([4, 4, 4, 4]) == 1
    assert imbalance([8, 0, 0, 0]) == 4
    assert imbalance([0, 0]) == imbalance([]) == 0
