"""The GPU bench's arithmetic, without a GPU: rows drawn and compared, what must come, bytes, the table, the suite."""

import dataclasses

import numpy as np
import pytest

MPI = pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from epcy import reference  # noqa: E402
from epcy.bench import (  # noqa: E402
    arguments,
    datasets,
    device_table,
    draws,
    environment,
    figures,
    nccl,
    settings,
    suites,
    table,
    works,
)
from epcy.bench.clocks import Measured  # noqa: E402
from epcy.bench.datasets import DataSet, Received, Setting  # noqa: E402
from epcy.bench.measure import Bytes, Times  # noqa: E402
from epcy.bench.workload import DTYPES, Shape  # noqa: E402
from unit.test_bench import make_row  # noqa: E402

SHAPE = Shape(num_tokens=9, hidden=272, num_topk=3, num_experts=12, dtype="bf16")


def setting(rank=1, size=3, mode="ht", layout="rank", alignment=1, reduction="rank", **shape):
    shape = dataclasses.replace(SHAPE, **shape)
    return Setting(np, shape, "random", mode, layout, alignment, reduction, rank, size)


# ---- rows


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp8"])
def test_a_row_is_the_same_wherever_it_is_drawn(dtype):
    rows = draws.draw_rows(np, 7, np.arange(20), 272, dtype)
    assert rows.dtype == DTYPES[dtype]
    again = draws.draw_rows(np, 7, np.array([13, 2]), 272, dtype)
    assert again.tobytes() == rows[[13, 2]].tobytes()
    assert draws.differ(np, rows, draws.draw_rows(np, 8, np.arange(20), 272, dtype)).all()
    assert len({row.tobytes() for row in rows}) == 20


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_values_are_finite_and_sums_round_as_the_reference(dtype):
    rows = draws.draw_rows(np, 3, np.arange(60), 520, dtype)
    wide = draws.to_float32(np, rows)
    assert np.array_equal(wide, rows.astype(np.float32))
    assert np.isfinite(wide).all()
    assert (np.abs(wide) > 0).all()
    total = wide[:30] + wide[30:]
    expected = reference.round_to(total, rows.dtype)
    assert draws.round_to(np, total, rows.dtype).tobytes() == expected.tobytes()


def test_bytes_that_are_no_number_are_not_drawn():
    payload = draws.draw_rows(np, 3, np.arange(200), 256, "fp8")
    assert not ((payload & 0x7F) == 0x7F).any()
    scales = draws.draw_scales(np, 3, np.arange(200), 272)
    assert scales.shape == (200, 3)
    assert (scales > 0).all() and np.isfinite(scales).all()


def test_rows_are_drawn_in_pieces(monkeypatch):
    whole = draws.draw_rows(np, 3, np.arange(20), 272, "bf16")
    monkeypatch.setattr(draws, "ROWS_AT_ONCE", 7)
    assert draws.draw_rows(np, 3, np.arange(20), 272, "bf16").tobytes() == whole.tobytes()


def test_rows_differ_by_bits_and_by_shape():
    rows = draws.draw_rows(np, 3, np.arange(5), 24, "bf16")
    other = rows.copy()
    other.view(np.uint16)[2, 23] ^= 1
    assert draws.differ(np, rows, other).tolist() == [False, False, True, False, False]
    assert draws.differ(np, rows, rows[:4]).all()
    assert draws.differ(np, np.arange(3), np.array([0, 1, 3])).tolist() == [False, False, True]
    assert draws.differ(np, rows[:0], rows[:0]).tolist() == []


# ---- what must come


def of_all_ranks(setting_of, **how):
    sets = [DataSet(setting_of(rank=rank, **how), 1, 2, 3) for rank in range(3)]
    return sets, [one.x if len(one.x) > 1 else one.x[0] for one in sets]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp8"])
@pytest.mark.parametrize(("layout", "alignment"), [("rank", 1), ("expert", 4)])
def test_expected_rows_and_sums_are_those_of_the_reference(dtype, layout, alignment):
    sets, xs = of_all_ranks(setting, layout=layout, alignment=alignment, dtype=dtype)
    first = sets[0]
    received, routing = reference.dispatch(
        xs, first.all_idx, first.all_weights, num_experts=12, layout=layout, expert_alignment=alignment
    )
    ys = [first.output(rank, np.arange(routing.num_rows(rank))) for rank in range(3)]
    sums = reference.combine(ys, routing, first.all_weights if layout == "expert" else None)
    for rank, data in enumerate(sets):
        recv_x = received[rank].recv_x
        for part, expected in zip(
            data.received.parts, recv_x if isinstance(recv_x, tuple) else (recv_x,), strict=True
        ):
            assert part.tobytes() == expected.tobytes()
        assert np.array_equal(data.received.topk_idx, received[rank].recv_topk_idx)
        assert np.array_equal(data.received.topk_weights, received[rank].recv_topk_weights)
        assert data.sum_of_output.tobytes() == sums[rank][0].tobytes()
        if layout == "rank" and dtype != "fp8":
            back = reference.combine([r.recv_x for r in received], routing)[rank][0]
            assert data.sum_of_tokens.tobytes() == back.tobytes()


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("reduction", ["rank", "source"])
def test_expected_low_latency_rows_and_sums_are_those_of_the_reference(dtype, reduction):
    sets, xs = of_all_ranks(setting, mode="ll", reduction=reduction, dtype=dtype, hidden=256)
    first = sets[0]
    received, routing = reference.low_latency_dispatch(
        xs, first.all_idx, num_experts=12, num_max_tokens_per_rank=9, use_fp8=dtype == "fp8"
    )
    ys = [first.output(rank, np.arange(4 * 27)).reshape(4, 27, 256) for rank in range(3)]
    sums = reference.low_latency_combine(ys, routing, first.all_weights, reduction=reduction)
    for rank, data in enumerate(sets):
        recv_x = received[rank].recv_x
        parts = list(recv_x) if isinstance(recv_x, tuple) else [recv_x]
        got = Received([p.reshape(-1, p.shape[-1]) for p in parts], None, counts=received[rank].recv_count)
        assert works.wrong_rows(np, got, data.received) == 0
        assert len(data.received.parts[0]) == received[rank].recv_count.sum()
        got.parts[0].view(np.uint8)[data.received.where[-1], 5] ^= 1
        got.counts[1] += 1
        assert works.wrong_rows(np, got, data.received) == 2
        assert data.sum_of_output.tobytes() == sums[rank].tobytes()


def test_neighbouring_sets_differ_and_a_fixed_routing_stays():
    sets = datasets.draw_sets(setting(), 5, 2, 3, fixed_routing=True)
    flat = [one for generation in sets for one in generation]
    assert len({one.x[0].tobytes() for one in flat}) == 6
    assert [len({sets[g][s].topk_idx.tobytes() for g in range(2)}) for s in range(3)] == [1, 1, 1]
    sets = datasets.draw_sets(setting(), 5, 2, 3, fixed_routing=False)
    assert len({one.topk_idx.tobytes() for generation in sets for one in generation}) == 6
    assert len({one.output_seed for one in sets[0]}) == 1 != len({one[0].output_seed for one in sets})


def test_miscounted_rows_are_wrong():
    rows = np.ones((4, 8), np.float32)
    expected = Received([rows[:3]], None, np.zeros((3, 2), np.int64), np.zeros((3, 2), np.float32))
    lanes = np.array([[0, 0]] * 3 + [[-1, -1]]), np.zeros((4, 2), np.float32)
    assert works.wrong_rows(np, Received([rows], None, *lanes, 3), expected) == 0
    assert works.wrong_rows(np, Received([rows], None, *lanes, 4), expected) == 1
    assert (
        works.wrong_rows(np, Received([rows], None, np.zeros((4, 2), np.int64), lanes[1], 3), expected) == 1
    )
    assert works.wrong_rows(np, Received([rows[:2]], None, lanes[0][:2], lanes[1][:2], 2), expected) == 3


@pytest.mark.parametrize(
    "how",
    [
        {"round_scale": True},
        {"round_scale": True, "use_ue8m0": True},
        {"use_logfmt": True},
        {"use_logfmt": True, "reduction": "source"},
    ],
    ids=str,
)
def test_expected_rows_and_sums_of_every_low_latency_option(how):
    casts = {name: how[name] for name in ("round_scale", "use_ue8m0") if name in how}
    dtype, reduction = "fp8" if casts else "bf16", how.get("reduction", "rank")

    def setting_with(rank):
        made = setting(rank=rank, mode="ll", hidden=512, dtype=dtype, reduction=reduction)
        return dataclasses.replace(made, **how)

    sets, xs = of_all_ranks(setting_with)
    first = sets[0]
    received, routing = reference.low_latency_dispatch(
        xs, first.all_idx, num_experts=12, num_max_tokens_per_rank=9, use_fp8=dtype == "fp8", **casts
    )
    ways = {"use_logfmt": how.get("use_logfmt", False), "reduction": reduction}
    ys = [first.output(rank, np.arange(4 * 27)).reshape(4, 27, 512) for rank in range(3)]
    sums = reference.low_latency_combine(ys, routing, first.all_weights, **ways)
    for rank, data in enumerate(sets):
        recv_x = received[rank].recv_x
        parts = list(recv_x) if isinstance(recv_x, tuple) else [recv_x]
        got = Received([p.reshape(-1, p.shape[-1]) for p in parts], None, counts=received[rank].recv_count)
        assert works.wrong_rows(np, got, data.received) == 0
        assert data.sum_of_output.tobytes() == sums[rank].tobytes()


# ---- bytes


def test_rows_of_ue8m0_and_of_logfmt_are_smaller():
    made = setting(mode="ll", hidden=512, dtype="fp8")
    assert made.sent_row_bytes == 512 + 16 and made.returned_row_bytes == 1024
    assert dataclasses.replace(made, round_scale=True, use_ue8m0=True).sent_row_bytes == 512 + 4
    assert dataclasses.replace(made, use_logfmt=True).returned_row_bytes == 640 + 4


def test_bytes_are_those_of_the_host_bench():
    from epcy.bench import measure

    sets, _ = of_all_ranks(setting)
    counted = [measure.count_rows(one.topk_idx, 4, rank, 3, "rank") for rank, one in enumerate(sets)]
    away = sum(row[1] for row in counted) / 3
    for case, there, back in (("dispatch", 1, 0), ("combine", 0, 1), ("roundtrip", 1, 1)):
        assert figures.count_bytes(case, [[sets[0]]]).wire == pytest.approx(away * 544 * (there + back))
    assert figures.count_bytes("dispatch", [[sets[0]]]).moved == pytest.approx(
        2 * 544 * sum(row[0] for row in counted) / 3
    )


def test_reduction_at_the_source_brings_every_lane_home():
    by_rank, _ = of_all_ranks(setting, mode="ll", hidden=256)
    by_source, _ = of_all_ranks(setting, mode="ll", reduction="source", hidden=256)
    lanes = sum(int((one.topk_idx // 4 != rank).sum()) for rank, one in enumerate(by_source)) / 3
    assert figures.count_bytes("combine", [[by_source[0]]]).wire == pytest.approx(lanes * 512)
    assert figures.count_bytes("combine", [[by_rank[0]]]).wire < lanes * 512
    assert figures.count_bytes("dispatch", [[by_source[0]]]).wire == pytest.approx(
        figures.count_bytes("combine", [[by_rank[0]]]).wire
    )


def test_nccl_moves_what_it_says():
    sets, _ = of_all_ranks(setting)
    all_to_all = [nccl.AllToAll(None, np, one, [10, 20], 1) for one in sets]
    for send in range(3):
        for receive in range(3):
            out, into = all_to_all[send].pieces[0][0][receive], all_to_all[receive].pieces[0][1][send]
            assert out == into == 10 * sets[0].routing.counts[send, receive]
            assert all_to_all[send].pieces[1][0][receive] == all_to_all[receive].pieces[1][1][send]
            assert all_to_all[receive].pieces[1][0][send] == 20 * sets[0].routing.counts[send, receive]


# ---- figures and the table


def test_notes_say_what_is_hidden_and_what_first_calls_cost():
    assert table.notes(make_row()) == ""
    row = make_row(us_sequence_p50=130.0, us_communication_p50=40.0, hidden_share=0.75)
    assert "75 % of it hidden" in table.notes(row) and "alone 40.00" in table.notes(row)
    row = make_row(cold_us=25_000.0, warmed_us=110.0, preinitialized_us=105.0, warmup_us=3_000.0)
    cold, warmed, preinitialized, steady, itself = table.notes(row).splitlines()
    assert cold.split() == ["#", "cold", "25.0000", "ms", "25000.0", "us", "250.00", "x"]
    assert warmed.split()[-2:] == ["1.10", "x"] and preinitialized.split()[-2:] == ["1.05", "x"]
    assert steady.split()[-2:] == ["1.00", "x"] and itself.split()[-4:] == ["3.0000", "ms", "3000.0", "us"]


def test_floor_is_the_wire_at_the_rate_of_a_copy():
    measured = Measured(Times(90.0, 100.0, 120.0), 11.0, 0, 0)
    given = figures.figures(measured, Bytes(wire=20_000_000, moved=80_000_000), 400.0, None)
    assert given["gbps_wire"] == pytest.approx(200)
    assert given["peer_copy_share"] == pytest.approx(0.5)
    assert given["floor_us"] == pytest.approx(50)
    assert given["over_floor"] == pytest.approx(2)
    given = figures.figures(measured, Bytes(wire=20_000_000, moved=80_000_000), 400.0, 200.0)
    assert (given["floor_us"], given["floor_gbps"], given["peer_copy_gbps"]) == (100, 200, 400)
    alone = figures.figures(measured, Bytes(wire=0, moved=80_000_000), None, None)
    assert alone["floor_us"] is alone["over_floor"] is alone["peer_copy_share"] is None


@pytest.mark.parametrize("baselines", [(), ("cupy",), ("cupy", "nccl-alltoall")])
def test_device_table_columns_stand_under_their_headings(baselines):
    found = tuple({"name": name, "us_p50": 300.0, "speedup": 1.5, "wrong": None} for name in baselines[-1:])
    row = make_row(backend="nvshmem", num_sms=16, host_us_p50=20.0, num_late=0, baselines=found)
    above, units = device_table.heading(baselines).splitlines()
    below = device_table.line(row, baselines).rstrip("\n")
    assert len(above) == len(units) == len(below)
    assert below.split()[:3] == ["ht", "dispatch", "bf16"]
    assert ("300.0" in below) == bool(baselines)
    text = device_table.line(make_row(over_floor=None, floor_us=None, wrong=None, num_sms=None), ())
    assert text.split()[-1] == "-"


@pytest.mark.parametrize("suite", ["figures", "decoding"])
def test_every_line_says_what_it_measured(suite):
    seen = set()
    for given in suites.expand(arguments.parse(["--suite", suite], 2), 2):
        for case in given.cases:
            row = make_row(
                **settings.what_of(given, case, given.min_tokens, "nvshmem", 2),
                calls=given.num_calls,
                combine_from=None if case == "dispatch" else given.combine_from,
            )
            seen.add((device_table.what(row), given.min_tokens, given.num_sms))
            assert len(device_table.what(row)) <= 56
    assert len(seen) == sum(
        len(one.cases) for one in suites.expand(arguments.parse(["--suite", suite], 2), 2)
    )


def test_the_suite_takes_runs_and_seed_from_the_command_line():
    given = arguments.parse(["--suite", "figures", "-n", "7", "--seed", "3", "--no-check"], 2)
    expanded = suites.expand(given, 2)
    assert {(one.runs, one.seed, one.check) for one in expanded} == {(7, 3, False)}
    assert suites.expand(arguments.parse([], 2), 2) == (arguments.parse([], 2),)


def test_a_buffer_has_room_for_what_comes():
    given = arguments.parse(["--layout", "expert", "--expert-alignment", "128", "--experts", "256"], 2)
    options = settings.buffer_options(given, Shape(4096, 7168, 8, 256, "bf16"), 2)
    assert options["num_max_recv_tokens"] == 2 * 4096 * 8 + 128 * 127
    given = arguments.parse(["--mode", "ll"], 2)
    options = settings.buffer_options(given, Shape(128, 7168, 8, 256, "fp8"), 2)
    assert options["num_max_low_latency_tokens_per_rank"] == 128 and options["low_latency_mode"]


def test_baselines_by_name():
    given = arguments.parse(["--baseline"], 2)
    assert (given.baselines("host"), given.baselines("nvshmem")) == (("alltoallv",), ("cupy",))
    given = arguments.parse(["--baseline", "cupy,nccl-alltoall", "dispatch"], 2)
    assert given.baselines("nvshmem") == ("cupy", "nccl-alltoall")
    assert arguments.parse([], 2).baselines("host") == ()


def test_versions_of_cuda():
    assert (environment.cuda_version(13000), environment.cuda_version(12080)) == ("13.0", "12.8")


def test_json_of_baselines_is_plain():
    row = make_row(baselines=({"name": "cupy", "us_p50": 123.456, "wrong": None},)).as_json()
    assert row["baselines"] == [{"name": "cupy", "us_p50": 123.5, "wrong": None}]
