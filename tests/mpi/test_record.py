"""epcy.record: what it keeps of real calls, and that they can be made again, here and on other numbers of ranks."""

import stat
import time

import ml_dtypes
import numpy as np
import pytest

import epcy
from epcy.bench import replay, replay_calls
from epcy.bench.replay_values import Values
from epcy.recording import read, spread
from mpi.cases import raised, to_device, to_host
from parallel import ROOT, launch

E, K, H = 4, 3, 512


@pytest.fixture
def path(same, tmp_path):
    return same(str(tmp_path / "run.npz"))


def inputs(buf, seed, num_tokens):
    """x, topk_idx and topk_weights of this rank, on the host."""
    rng = np.random.default_rng([seed, buf.rank])
    idx = rng.integers(-1, E * buf.size, (num_tokens, K))
    x = rng.random((num_tokens, H), np.float32).astype(ml_dtypes.bfloat16)
    return x, idx, rng.random((num_tokens, K), np.float32)


def every_call(buf, rounds=2):
    """Make calls of all kinds; return what was sent in each round."""
    sent = []
    for seed in range(rounds):
        host = inputs(buf, seed, (5 * buf.rank + 7 * seed + 1) % 17)
        x, idx, w = to_device(buf, host)
        sent.append(host)
        r = buf.dispatch(x, idx, w)
        buf.combine(r.recv_x, r.handle, r.recv_topk_weights, bias=x)
        r = buf.dispatch(to_device(buf, tuple(epcy.cast_to_fp8(host[0]))), handle=r.handle)
        buf.combine(to_device(buf, np.zeros((r.handle.num_rows, H), np.float16)), r.handle)
        r = buf.dispatch(x, idx.astype(np.int32), w, layout="expert", expert_alignment=4, num_sms=2)
        buf.combine(r.recv_x, r.handle, w)
        r = buf.dispatch(x, idx, num_worst_tokens=16 * buf.size)
        buf.combine(r.recv_x, r.handle)
        for fp8, hooks in ((False, False), (True, True)):
            _, _, handle, _, hook = buf.low_latency_dispatch(x, idx, w, use_fp8=fp8, return_recv_hook=hooks)
            hook and hook()
            for reduction in ("rank", "source"):
                y = buf.low_latency_combine_input(handle, x.dtype)
                y[...] = 1
                ways = {"zero_copy": True, "reduction": reduction, "use_logfmt": fp8}
                _, _, hook = buf.low_latency_combine(y, None, None, handle, return_recv_hook=hooks, **ways)
                hook and hook()
        buf.barrier()
    return sent


OPS = ["dispatch", "combine"] * 4 + ["low_latency_dispatch"] + ["low_latency_combine"] * 2
OPS += ["low_latency_dispatch", "hook"] + ["low_latency_combine", "hook"] * 2 + ["barrier"]


@pytest.fixture
def buf(make_buffer):
    return make_buffer(num_topk=K, hidden=H, dtype="float32", low_latency_mode=True)


@pytest.mark.parametrize("what", ["_kept_of", "_part"])
def test_no_memory_to_record_on_one_rank(comm, buf, path, what, monkeypatch):
    """Every call is made, at the end everybody hears of it, and the next recording works."""

    def refuse(*args):
        raise MemoryError("none left")

    start = time.monotonic()
    with pytest.raises(epcy.EpcyError) as caught:
        with epcy.record(path, comm) as recording:
            if comm.rank == 0:
                monkeypatch.setattr(recording, what, refuse)
            every_call(buf)
    assert time.monotonic() - start < 5
    assert type(caught.value) is (epcy.HeapError if comm.rank == 0 else epcy.PeerError), repr(caught.value)
    assert "none left" in str(caught.value) and "the end of epcy.record" in str(caught.value)
    comm.Barrier()
    assert not (ROOT / path).exists()
    with epcy.record(path, comm):
        every_call(buf)
    comm.Barrier()
    assert [call.op for call in read(path).calls] == OPS * 2


def test_what_is_kept(comm, buf, path):
    every_call(buf)  # before
    with epcy.record(path, comm):
        sent = every_call(buf)
        buf.warmup()
    every_call(buf)  # after
    comm.Barrier()
    found = read(path)
    assert stat.S_IMODE((ROOT / path).stat().st_mode) == 0o600
    assert [call.op for call in found.calls] == OPS * 2 and found.num_dropped == 0
    assert found.num_ranks == comm.size and found.backend == buf.backend and found.payloads == []
    assert found.buffers[0].options["hidden"] == H and "device" not in found.buffers[0].options
    per_round = len(OPS)
    for number, call in enumerate(found.calls):
        x, idx, _ = sent[number // per_round]
        if call.op in ("dispatch", "low_latency_dispatch"):
            assert call.num_tokens[comm.rank] == len(x)
            root = found.calls[call.refers] if call.refers is not None else call
            assert np.array_equal(found.routing_of(root, comm.rank), idx)
        assert (call.times_ns > 0).all() and not call.errors
    assert len(found.routings) <= 2 * comm.size  # the same ids are kept once
    cached, expert, worst = found.calls[2], found.calls[4], found.calls[6]
    assert cached.refers == 0 and cached.args[0]["dtype"] == "fp8"
    assert (expert.args[0]["layout"], expert.args[0]["expert_alignment"], expert.args[0]["num_sms"]) == (
        "expert",
        4,
        2,
    )
    assert worst.args[0]["num_worst_tokens"] == 16 * comm.size and not worst.args[0]["has_weights"]
    assert found.calls[1].args[0] == {
        "dtype": "bfloat16", "has_weights": True, "num_biases": 1, "num_sms": None,
    }  # fmt: skip
    comm.Barrier()


@pytest.mark.parametrize("payload", [False, True])
def test_replay_here(comm, buf, backend, path, payload):
    with epcy.record(path, comm, payload=payload):
        every_call(buf)
    comm.Barrier()
    found = spread(read(path), comm.size)
    outcome = replay.play(comm, found, backend)
    assert outcome.failure is None, outcome.failure
    assert outcome.wrong == [0] * len(found.calls) and not np.isnan(outcome.us).any()
    rows = replay.table(found, outcome.us, outcome.wrong, len(found.calls))
    assert [row["op"] for row in rows] == list(dict.fromkeys(OPS))
    assert all(row["us_first"] <= row["us_last"] <= row["us_p99"] for row in rows)
    comm.Barrier()


def test_payload_is_what_was_sent(comm, buf, path):
    with epcy.record(path, comm, payload=True):
        sent = every_call(buf, rounds=1)[0]
    comm.Barrier()
    values = Values(read(path))
    x, scales = epcy.cast_to_fp8(sent[0])
    got = values.sent(0, comm.rank)[0]
    assert got.dtype == sent[0].dtype and np.array_equal(got.view(np.uint16), sent[0].view(np.uint16))
    assert all(map(np.array_equal, values.sent(2, comm.rank), (x, scales)))
    assert np.array_equal(values.weights(0, comm.rank, len(x)), sent[2])
    comm.Barrier()


def test_replay_sees_wrong_rows(comm, buf, backend, path, monkeypatch):
    with epcy.record(path, comm):
        every_call(buf, rounds=1)
    comm.Barrier()
    found = spread(read(path), comm.size)
    make = {"combine": replay_calls.Player._combine, "dispatch": replay_calls.Player._dispatch}
    for op, spoiled in (("combine", 1), ("dispatch", 0), ("combine", 5)):

        def other(self, number, call, args, op=op, spoiled=spoiled):
            run = make[op](self, number, call, args)
            if number != spoiled or comm.rank:
                return run

            def spoil():
                result = run()
                rows = result.combined_x if op == "combine" else result.recv_x
                rows[:1] += 1
                return result

            return spoil

        monkeypatch.setattr(replay_calls.Player, f"_{op}", other)
        outcome = replay.play(comm, found, backend)
        monkeypatch.undo()
        num_rows = len(found.routing_of(found.calls[0], 0))
        if num_rows == 0:
            continue
        assert outcome.failure is not None and outcome.failure.kind == "wrong rows"
        assert outcome.failure.call == spoiled and list(outcome.failure.texts) == [0]
        assert not outcome.failure.recorded and (outcome.wrong[spoiled] or 0) == (comm.rank == 0)
    comm.Barrier()


def test_a_call_that_one_rank_cannot_make(comm, buf, backend, path, monkeypatch):
    """The others learn of it before the call, and wait for nobody in it."""
    with epcy.record(path, comm):
        every_call(buf, rounds=1)
    comm.Barrier()
    found, culprit, played = spread(read(path), comm.size), comm.size - 1, []
    prepare = replay_calls.Player.prepare

    def other(self, number):
        if number == 2 and comm.rank == culprit:
            raise epcy.ArgumentError("mine")
        played.append(number)
        return prepare(self, number)

    monkeypatch.setattr(replay_calls.Player, "prepare", other)
    outcome = replay.play(comm, found, backend)
    assert outcome.failure == replay.Failure(
        "ArgumentError", 2, "dispatch", {culprit: "ArgumentError: mine"}, False
    )
    assert played == ([0, 1] if comm.rank == culprit else [0, 1, 2])
    assert not np.isnan(outcome.us[:, :2]).any() and np.isnan(outcome.us[:, 2:]).all()
    comm.Barrier()


def fails(comm, buf, path):
    """Record a good call, and one that brings more rows than there is room for; return this rank's error."""
    x, _, _ = inputs(buf, 3, 4)
    good, bad = np.zeros((1, K), np.int64), np.zeros((4, K), np.int64)
    with epcy.record(path, comm):
        x = to_device(buf, x)
        r = buf.dispatch(x[:1], *to_device(buf, (good,)))
        buf.combine(r.recv_x, r.handle)
        buf.dispatch(x, *to_device(buf, (bad,)))


def test_a_recording_that_fails(comm, make_buffer, backend, path):
    buf = make_buffer(num_topk=K, hidden=H, num_max_recv_tokens=3 * comm.size)
    error = raised(lambda: fails(comm, buf, path))
    assert isinstance(error, epcy.CapacityError if comm.rank == 0 else epcy.PeerError)
    comm.Barrier()
    found = read(path)  # of the parts
    assert [call.op for call in found.calls] == ["dispatch", "combine", "dispatch"]
    assert sorted(found.calls[2].errors) == list(range(comm.size))
    assert found.calls[2].errors[0].startswith("CapacityError: ") and found.date
    assert (found.calls[2].times_ns[:, 1] == -1).all()
    outcome = replay.play(comm, spread(found, comm.size), backend)
    assert outcome.failure is not None and outcome.failure.recorded
    assert (outcome.failure.kind, outcome.failure.call) == ("CapacityError", 2)
    assert sorted(outcome.failure.texts) == list(range(comm.size))
    comm.Barrier()


def test_wrong_arguments_are_the_calls_own(comm, buf, path):
    with epcy.record(path, comm):
        for call in (lambda: buf.dispatch("x", None), lambda: buf.combine(None, None)):
            assert isinstance(raised(call), epcy.ArgumentError)
        every_call(buf, rounds=1)
    comm.Barrier()
    found = read(path)
    assert found.num_dropped == 2 and [call.op for call in found.calls] == OPS
    comm.Barrier()


def test_handles_from_before(comm, buf, path):
    x, idx, _ = to_device(buf, inputs(buf, 1, 4))
    r = buf.dispatch(x, idx, out=True)
    with epcy.record(path, comm):
        buf.combine(r.recv_x, r.handle)
        buf.dispatch(x, handle=r.handle)
        buf.barrier()
    comm.Barrier()
    found = read(path)
    assert [call.op for call in found.calls] == ["barrier"] and found.num_dropped == 2
    comm.Barrier()


def test_the_last_calls_are_kept(comm, buf, path):
    with epcy.record(path, comm, num_calls=2):
        every_call(buf, rounds=1)
        x, idx, _ = to_device(buf, inputs(buf, 1, 4))
        r = buf.dispatch(x, idx)
        buf.combine(r.recv_x, r.handle)
    comm.Barrier()
    found = read(path)
    assert [(call.op, call.at) for call in found.calls] == [
        ("dispatch", len(OPS)),
        ("combine", len(OPS) + 1),
    ]
    assert found.num_dropped == len(OPS)
    comm.Barrier()


@pytest.mark.host_only("Buffers of a part of the ranks, on both backends alike")
def test_buffers_of_parts(comm, make_buffer, subcomm, backend, path):
    part = subcomm((comm.size + 1) // 2)
    whole = make_buffer(num_topk=K, hidden=H, low_latency_mode=True, dtype="float32")
    with epcy.record(path, comm):
        every_call(whole, rounds=1)
        if part:
            sizes = {"num_max_tokens_per_rank": 16, "hidden": H, "num_experts": E * part.size, "num_topk": K}
            with epcy.Buffer(part, backend=backend, **sizes) as buf:
                x, idx, _ = inputs(buf, 5, 9)
                for _ in range(2):
                    r = buf.dispatch(x, idx)
                    buf.combine(r.recv_x, r.handle)
    comm.Barrier()
    found = read(path)
    sizes = sorted(buffer.num_ranks for buffer in found.buffers)
    assert sizes == sorted([comm.size, (comm.size + 1) // 2])
    small = min(range(2), key=lambda n: (found.buffers[n].num_ranks, -n))
    experts = found.buffers[small].options["num_experts"]
    if comm.size == 1 or experts % comm.size == 0:
        outcome = replay.play(comm, spread(found, comm.size), backend)
        assert outcome.failure is None and sum(outcome.wrong) == 0
    comm.Barrier()


def test_refusals(comm, path):
    for number in (0, True, 1.5):
        with pytest.raises(epcy.ArgumentError, match="num_calls"):
            epcy.record(path, comm, num_calls=number)
    with epcy.record(path, comm) as recording:
        with pytest.raises(epcy.StateError, match="under way"), epcy.record(path, comm):
            pass
    with pytest.raises(epcy.StateError, match="entered before"), recording:
        pass
    comm.Barrier()
    assert read(path).calls == []
    with (
        pytest.raises(epcy.ArgumentError, match="could not write"),
        epcy.record("/proc/nowhere/run.npz", comm),
    ):
        pass
    comm.Barrier()


def test_a_rank_that_leaves_alone(comm, buf, path):
    """One rank raises, the others wait for it no longer than `timeout`; all of them leave their parts."""
    if comm.size == 1:
        pytest.skip("two ranks")

    def job(num_barriers, leaving):
        with epcy.record(path, comm, timeout=1):
            for _ in range(num_barriers):
                buf.barrier()
            if comm.rank in leaving:
                raise KeyError("mine")

    last = comm.size - 1
    error = raised(lambda: job(1, {last}))
    assert isinstance(error, KeyError if comm.rank == last else epcy.PeerTimeoutError)
    assert comm.rank == last or str(error).startswith(
        "timeout: the end of epcy.record did not end within 1 s"
    )
    comm.Barrier()
    for num_barriers, leaving in ((1, None), (2, ()), (3, range(comm.size)), (4, ())):
        if leaving is not None:  # what was written last is what is read
            raised(lambda: job(num_barriers, leaving))  # noqa: B023
            comm.Barrier()
        found = read(path)
        assert [call.op for call in found.calls] == ["barrier"] * num_barriers
        comm.Barrier()


def test_results_are_those_of_the_calls(comm, buf, path):
    x, idx, w = to_device(buf, inputs(buf, 1, 6))
    want = to_host(buf.dispatch(x, idx, w, out=True).recv_x)
    with epcy.record(path, comm):
        assert np.array_equal(to_host(buf.dispatch(x, idx, w, out=True).recv_x), want)
    comm.Barrier()


# ---- the commands: from one rank, which starts jobs of its own


@pytest.fixture
def one_rank(comm, backend):
    if comm.size > 1 or backend != "host":
        pytest.skip("run with one rank on the host backend")


JOB = """
import sys
sys.path.insert(0, "tests")
import epcy
from mpi4py import MPI
from mpi.test_record import E, H, K, every_call, fails
from mpi.cases import raised
comm = MPI.COMM_WORLD
sizes = dict(num_max_tokens_per_rank=16, hidden=H, num_experts=4 * comm.size, num_topk=K, backend="host")
if sys.argv[1] == "good":
    with epcy.Buffer(comm, dtype="float32", low_latency_mode=True, **sizes) as buf, epcy.record(sys.argv[2]):
        every_call(buf)
else:
    with epcy.Buffer(comm, num_max_recv_tokens=3 * comm.size, **sizes) as buf:
        raised(lambda: fails(comm, buf, sys.argv[2]))
"""
ENV = {"PYTHONPATH": str(ROOT)}


def test_other_numbers_of_ranks(one_rank, path):
    assert launch(2, ["-c", JOB, "good", path], env=ENV).returncode == 0
    for num_ranks in (1, 2, 4):
        done = launch(num_ranks, ["-m", "mpi4py", "-m", "epcy.bench", "replay", path], env=ENV)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
        assert [row[0] for row in rows[1:]] == list(dict.fromkeys(OPS)), done.stdout
        assert all(row[-1] == "0" for row in rows[1:]), done.stdout
        assert f"replayed on {num_ranks}" in done.stdout
    done = launch(3, ["-m", "mpi4py", "-m", "epcy.bench", "replay", path], env=ENV)
    assert done.returncode == 2 and "divides the 8 experts of Buffer 0, got 3" in done.stderr


@pytest.mark.timeout(300)
def test_shrink(one_rank, path):
    assert launch(2, ["-c", JOB, "bad", path], env=ENV).returncode == 0
    done = launch(1, ["-m", "epcy", "replay", path], env=ENV)
    assert done.returncode == 1 and "CapacityError" in done.stdout, done.stdout + done.stderr
    done = launch(1, ["-m", "epcy", "replay", "--shrink", path, "--timeout", "5"], env=ENV, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    smallest = read(path.replace(".npz", ".shrunk.npz"))
    (call,) = smallest.calls
    assert call.op == "dispatch" and sum(call.num_tokens) == 7  # one more than there is room for
    assert smallest.buffers[0].options["hidden"] < H
    lanes = sum((smallest.routing_of(call, rank) >= 0).sum() for rank in range(2))
    assert lanes == 7  # one expert a token
    assert "fails in call 2: CapacityError" in done.stdout and "replays in" in done.stdout


def test_nothing_to_shrink(one_rank, path):
    assert launch(1, ["-c", JOB, "good", path], env=ENV).returncode == 0
    done = launch(1, ["-m", "epcy", "replay", "--shrink", path], env=ENV)
    assert done.returncode == 1 and "nothing to shrink" in done.stdout
    done = launch(1, ["-m", "epcy", "replay", path + ".not"], env=ENV)
    assert done.returncode == 2 and "no such file" in done.stderr
