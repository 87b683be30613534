"""Where a heap's regions lie: sizes by size_hint against the arithmetic written out."""

import pytest

import epcy
from epcy.errors import ArgumentError

GUARD = 128  # the last bytes of each region, for canaries


def up(value, multiple):
    return -(-value // multiple) * multiple


def rows_by_default(num_ranks, most, num_experts, num_topk):
    local = num_experts // num_ranks
    by_rank = num_ranks * most
    by_expert = min(2 * most * num_topk, by_rank * min(num_topk, local)) + 128 * local
    return max(1, by_rank, by_expert)


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 64])
@pytest.mark.parametrize(
    "most, hidden, local, num_topk", [(0, 8, 1, 1), (16, 512, 4, 2), (4096, 7168, 32, 8)]
)
@pytest.mark.parametrize("dtype, itemsize", [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize("given_rows", [None, 77])
def test_areas(num_ranks, most, hidden, local, num_topk, dtype, itemsize, given_rows):
    sizes = {"num_max_tokens_per_rank": most, "hidden": hidden, "num_experts": local * num_ranks}
    hint = epcy.Buffer.size_hint(
        num_ranks, num_topk=num_topk, dtype=dtype, num_max_recv_tokens=given_rows, **sizes
    )
    rows = given_rows or rows_by_default(num_ranks, most, local * num_ranks, num_topk)
    area = up(rows * hidden * itemsize, 128)
    area = up(area + rows * -(-hidden // 128) * 4, 128)
    area = up(area + rows * num_topk * 8, 128)
    area = up(area + rows * num_topk * 4 + GUARD, 4096)
    assert hint["receive"] == hint["combine"] == 2 * area
    assert hint["control"] % 4096 == 0 and hint["control"] >= 2 * 8 * (num_ranks + local * num_ranks)
    assert hint["total"] == hint["control"] + 4 * area


def test_numbers_beyond_32_bits():
    sizes = {"num_max_tokens_per_rank": 2**17, "hidden": 2**13, "num_experts": 1024, "num_topk": 8}
    hint = epcy.Buffer.size_hint(64, **sizes)
    assert hint["receive"] > 64 * 2**17 * 2**14 > 2**36


def test_low_latency_areas():
    sizes = {"num_max_tokens_per_rank": 4096, "hidden": 7168, "num_experts": 64, "num_topk": 8}
    plain = epcy.Buffer.size_hint(8, **sizes)
    hint = epcy.Buffer.size_hint(8, low_latency_mode=True, **sizes)
    rows = 8 * 8 * 256  # L * R * M'
    receive = up(up(up(rows * 14336, 128) + rows * 56 * 4, 128) + 8 * 8 + GUARD, 4096)
    areas = 2 * (receive + up(rows * 14336 + GUARD, 4096))
    # Slots of both calls, twice: a row of this rank's tokens, its lanes and scales.
    assert (
        plain["low_latency"] == 0 and areas + 2 * 256 * 14336 < hint["low_latency"] < areas + 2 * 256 * 16000
    )
    assert hint["total"] == hint["control"] + hint["receive"] + hint["combine"] + hint["low_latency"]
    assert hint["control"] == plain["control"]
    for options, text in (
        ({"num_max_low_latency_tokens_per_rank": 2**24, "hidden": 2**20}, "rows of"),
        ({"num_max_low_latency_tokens_per_rank": 2**24, "hidden": 8, "num_topk": 1024}, "lanes"),
    ):
        with pytest.raises(ArgumentError, match=f"num_max_low_latency_tokens_per_rank: .* {text}"):
            epcy.Buffer.size_hint(8, low_latency_mode=True, **{**sizes, **options})


def test_mirrors_of_the_ranks_that_are_reached_by_puts():
    sizes = {"num_max_tokens_per_rank": 64, "hidden": 512, "num_experts": 16, "num_topk": 4}

    def low_latency(num_ranks, allowed, backend="nvshmem", mode=True):
        return epcy.Buffer.size_hint(
            num_ranks, **sizes, low_latency_mode=mode, backend=backend, allow_nvlink_for_low_latency_mode=allowed
        )["low_latency"]  # fmt: skip

    assert low_latency(1, False) == low_latency(1, True)  # nobody is far
    areas = 4 * 16 * 64 * 1024  # two of each kind, and what rows travel through beside them
    for num_ranks in (2, 8):
        more = low_latency(num_ranks, False) - low_latency(num_ranks, True)
        wire = low_latency(num_ranks, True) - areas
        assert more > (num_ranks - 1) * wire * 0.9
    assert low_latency(8, False, mode=False) == 0
    assert low_latency(8, False, backend="host") == low_latency(8, True, backend="host")


def test_nvshmem_without_cuda():
    sizes = {"num_max_tokens_per_rank": 4096, "hidden": 7168, "num_experts": 64, "num_topk": 8}
    host = epcy.Buffer.size_hint(8, low_latency_mode=True, **sizes)
    hint = epcy.Buffer.size_hint(8, low_latency_mode=True, backend="nvshmem", **sizes)
    assert hint["receive"] == host["receive"] and hint["combine"] == host["combine"]
    # Lines of 128 bytes that carry 112 of a row: R M' rows come, M' max(R, K) rows or sums come back, LogFMT has room
    # for 5 lines each 512 bytes; two sets of each.
    lines = 8 * 256 * up(14336, 112) // 112 + 8 * 256 * 5 * 28
    wire = hint["low_latency"] - 2 * (
        up(up(up(16384 * 14336, 128) + 16384 * 56 * 4, 128) + 64, 4096) + 16384 * 14336
    )
    assert 2 * 128 * lines < wire < 2 * 128 * lines + 4 * 8 * 256 * 8 * 16 + 2**20
    assert hint["total"] == hint["control"] + hint["receive"] + hint["combine"] + hint["low_latency"]
    assert epcy.Buffer.size_hint(8, backend="nvshmem", **sizes)["low_latency"] == 0


def test_a_backend_by_its_variable(monkeypatch):
    sizes = {"num_max_tokens_per_rank": 16, "hidden": 512, "num_experts": 8, "num_topk": 2}
    by_name = epcy.Buffer.size_hint(2, backend="nvshmem", **sizes)
    assert by_name != epcy.Buffer.size_hint(2, **sizes) == epcy.Buffer.size_hint(2, backend="host", **sizes)
    monkeypatch.setenv("EPCY_BACKEND", "nvshmem")
    assert epcy.Buffer.size_hint(2, **sizes) == by_name
    with pytest.raises(ArgumentError, match="backend: "):
        epcy.Buffer.size_hint(2, backend="cuda", **sizes)


def test_more_than_an_address_space():
    sizes = {"num_max_tokens_per_rank": 2**31 - 1, "hidden": 2**20, "num_experts": 1024, "num_topk": 8}
    with pytest.raises(ArgumentError, match="num_max_recv_tokens: .* rows of 2097152 bytes"):
        epcy.Buffer.size_hint(1024, **sizes)
