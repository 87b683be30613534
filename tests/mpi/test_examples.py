"""The examples run, learn, and give the same with and without epcy, on any number of ranks."""

import json
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from mpi.cases import to_device, to_host

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_first_steps(comm, capsys, backend):
    if 8 % comm.size:
        pytest.skip("8 experts need 1, 2, 4 or 8 ranks")
    runpy.run_path(str(EXAMPLES / "first_steps.py"))
    assert ("token 0: 1 through experts" in capsys.readouterr().out) == (comm.rank == 0)


def test_overlap(comm, capsys, backend):
    import overlap

    sizes = "--tokens 16 --hidden 64 --inner 32 --experts 4 --topk 2 --runs 3 --num-sms 1 2"
    overlap.main([*sizes.split(), "--backend", backend])
    lines = capsys.readouterr().out.splitlines()
    if comm.rank:
        assert lines == []
        return
    assert [line.split()[0] for line in lines[3:5]] == ["1", "2"]
    assert "overlapped and in sequence, the results are equal to the bit" in lines
    assert ("nothing is hidden" in lines[-1]) == (backend == "host")


def test_double_batch(comm, same, tmp_path, capsys, backend):
    import double_batch

    path = same(str(tmp_path / "trace.json"))
    sizes = "--layers 2 --tokens 5 --hidden 64 --inner 16 --experts 2 --topk 2 --runs 3"
    double_batch.main([*sizes.split(), "--backend", backend, "--trace", path])
    lines = capsys.readouterr().out.splitlines()
    if comm.rank:
        assert lines == []
        return
    assert lines[2].split()[-1] == "hidden" and lines[3].split()[-1] == "%"
    assert "overlapped and in sequence, the results are equal to the bit" in lines
    assert ("as far as the ranks really run at once" in lines[-1]) == (backend == "host")
    with open(path, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == [
        f"{order}, rank {rank}" for order in ("in sequence", "overlapped") for rank in range(comm.size)
    ]
    spans = [e for e in events if e["ph"] == "X"]
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in spans)
    for rank in range(comm.size):  # two layers of two micro-batches
        by_name = {}
        for event in spans:
            if event["pid"] == comm.size + rank:
                by_name.setdefault(event["name"], []).append(event)
        assert {name: len(found) for name, found in by_name.items()} == dict.fromkeys(
            (
                f"{call} {half}"
                for call in ("dispatch", "combine")
                for half in ("send", "under way", "receive")
            ),
            4,
        ) | {"dense": 4, "experts": 4}
        b_experts = [e for e in by_name["experts"] if e["tid"] == 2]  # rows: a, a under way, b, b under way
        flights = [e for e in by_name["combine under way"] if e["tid"] == 1]
        for flight in flights:
            end = flight["ts"] + flight["dur"]
            assert any(flight["ts"] <= e["ts"] and e["ts"] + e["dur"] <= end for e in b_experts)


def test_training_with_and_without_epcy_agrees(comm, same, tmp_path, monkeypatch, capsys, backend):
    if 8 % comm.size:
        pytest.skip("8 experts need 1, 2, 4 or 8 ranks")
    import moe_lm

    argv = "--steps 8 --batch 512 --text-bytes 400000 --sample-bytes 3 --evaluate-every 4 --verify".split()
    monkeypatch.setattr(sys, "argv", ["moe_lm.py", *argv, "--backend", backend])
    moe_lm.main()
    out = capsys.readouterr().out
    if comm.rank == 0:
        assert "the runs agree" in out
        if backend == "host":  # a GPU's products sum in another order
            assert "equal to the bit in 8 of 8 steps" in out
        assert "unigram entropy" in out
    else:
        assert out == ""


@pytest.mark.parametrize(
    ("options", "text"),
    [(["--batch", "12"], "--batch"), (["--steps", "0"], "--steps"), (["--no-such"], "--no-such")],
)
def test_wrong_options_stop_every_rank(comm, monkeypatch, capsys, options, text):
    import moe_lm

    monkeypatch.setattr(sys, "argv", ["moe_lm.py", *options])
    with pytest.raises(SystemExit) as stop:
        moe_lm.main()
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert comm.rank != 0 or text in err or 8 % comm.size


def test_gradients_are_those_of_differences(comm, backend):
    """Of every kind of parameter and of the input, through both exchanges, on whatever ranks there are."""
    from moe_layer import MoELayer

    import epcy

    shards, num_tokens, hidden, inner, local, num_topk = 2, 5, 8, 12, 2, 2
    num_experts = local * comm.size
    rng = np.random.default_rng(comm.rank)
    everyones = np.random.default_rng(99)

    def draw(rng, *shape):
        return rng.standard_normal(shape, np.float32)

    h, direction = draw(rng, shards, num_tokens, hidden), draw(rng, shards, num_tokens, hidden)
    router = draw(everyones, hidden, num_experts)
    w1, w2 = draw(rng, local, hidden, inner), draw(rng, local, inner, hidden)
    with epcy.Buffer(
        comm,
        num_max_tokens_per_rank=shards * num_tokens,
        hidden=hidden,
        num_experts=num_experts,
        num_topk=num_topk,
        dtype="float32",
        backend=backend,
    ) as buf:
        xp = buf.xp
        if xp is not np:
            xp.cuda.Device(buf.options["device"]).use()
        h, direction, router, w1, w2 = to_device(buf, (h, direction, router, w1, w2))
        layer = MoELayer(buf, lambda _: nullcontext(), router, w1, w2, num_topk=num_topk, balance=0.0)

        def loss():
            return comm.allreduce(float((layer.forward(h)[0].astype(np.float64) * direction).sum()))

        grads = [xp.zeros((shards, *router.shape), np.float32), xp.zeros_like(w1), xp.zeros_like(w2)]
        dh = layer.backward(direction, layer.forward(h)[1], *grads, token_share=1.0)
        dh, *grads = map(to_host, (dh, *grads))
        grad_router = comm.allreduce(grads[0].sum(axis=0))
        checked = {"h": (h, dh), "router": (router, grad_router), "w1": (w1, grads[1]), "w2": (w2, grads[2])}
        for owner in range(comm.size):
            for name, (array, grad) in checked.items():
                # The place of steepest slope; all ranks hold the router, one rank holds each of the others.
                place = np.unravel_index(np.argmax(np.abs(grad)), grad.shape)
                if name == "router":
                    place = comm.bcast(place, root=owner)
                moves = name == "router" or comm.rank == owner
                expected = comm.bcast(float(grad[place]), root=owner)
                slopes = []
                # Within the longer one a ReLU may tip over, the shorter is less exact.
                for step in (1e-3, 5e-5):
                    there, back = np.float32(step * moves), np.float32(float(array[place]))
                    differences = []
                    for sign in (1, -1):
                        array[place] = back + sign * there
                        differences.append(sign * loss())
                    array[place] = back
                    slopes.append(sum(differences) / (2 * step))
                assert pytest.approx(expected, rel=1e-2, abs=5e-2) in slopes, (
                    f"{name} of rank {owner}: {slopes}"
                )
