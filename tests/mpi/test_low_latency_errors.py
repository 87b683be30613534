"""Low-latency calls that are wrong, that do not fit together, or whose peers are late."""

import time

import numpy as np
import pytest

import epcy
from mpi.cases import DTYPES, counting, draw, mine, raised, to_device
from mpi.low_latency_cases import check_combine, check_dispatch, host_list, late_error, works

BF16 = DTYPES["bfloat16"]
X, IDX = np.ones((4, 512), BF16), np.zeros((4, 2), np.int64)
W = np.ones((4, 2), np.float32)


@pytest.fixture
def make(make_buffer):
    def build(**options):
        return make_buffer(low_latency_mode=True, **options)

    return build


@pytest.fixture
def two_ranks(comm):
    if comm.size == 1:
        pytest.skip("two ranks")


def d(*texts, x=X, idx=IDX, w=None, **options):
    """A dispatch that is wrong, and the texts that its error must hold, the argument's name first."""

    def call(buf, handle, y):
        given = {
            name: value(buf) if callable(value) else to_device(buf, value) for name, value in options.items()
        }
        return buf.low_latency_dispatch(*to_device(buf, [x, idx, w]), **given)

    return texts, call


def c(*texts, rows=None, idx=None, w=None, handle_of=None, **options):
    """A combine that is wrong; `rows` makes x out of a right one."""

    def call(buf, handle, y):
        y = y if rows is None else to_device(buf, rows(np.ones(y.shape, BF16)))
        given = {
            name: value(buf) if callable(value) else to_device(buf, value) for name, value in options.items()
        }
        h = handle if handle_of is None else handle_of(handle)
        return buf.low_latency_combine(y, *to_device(buf, [idx, w]), h, **given)

    return texts, call


WRONG = {
    "x is a pair": d("x: ", "use_fp8", x=(X, X)),
    "x is None": d("x: ", "NoneType", x=None),
    "x has another H": d("x: ", "(T, 512)", "(4, 256)", x=X[:, :256]),
    "x is wider": d("x: ", "bfloat16", "float32", x=X.astype(np.float32)),
    "x is fp8": d("x: ", "uint8", x=X.astype(np.uint8)),
    "idx is None": d("topk_idx: ", "NoneType", idx=None),
    "idx is of floats": d("topk_idx: ", "int64", "float64", idx=IDX.astype(np.float64)),
    "idx has another K": d("topk_idx: ", "(4, 2)", "(4, 3)", idx=np.zeros((4, 3), np.int64)),
    "idx has another T": d("topk_idx: ", "(4, 2)", "(5, 2)", idx=np.zeros((5, 2), np.int64)),
    "weights are float64": d("topk_weights: ", "float32", "float64", w=W.astype(np.float64)),
    "weights have another shape": d("topk_weights: ", "(4, 2)", "(4, 1)", w=W[:, :1]),
    "ue8m0 without round_scale": d("use_ue8m0: ", "round_scale", use_ue8m0=True),
    "round_scale without fp8": d("round_scale: ", "use_fp8=False", use_fp8=False, round_scale=True),
    "stats have another length": d("stats: ", "(4,)", "(3,)", stats=np.zeros(3, np.int64)),
    "stats are floats": d("stats: ", "int32", "float32", stats=np.zeros(4, np.float32)),
    "stats are a list": d("stats: ", stats=lambda buf: [0, 0, 0, 0]),
    "previous_event is a number": d("previous_event: ", "Event", previous_event=3),
    "y has two dimensions": c("x: ", "(4, ", rows=lambda y: y[0]),
    "y has another H": c("x: ", "512", "256", rows=lambda y: y[:, :, :256]),
    "y has another L": c("x: ", "(4, ", "(3, ", rows=lambda y: y[:3]),
    "y is wider": c("x: ", "bfloat16", "float32", rows=lambda y: y.astype(np.float32)),
    "y is a pair": c("x: ", "tuple", rows=lambda y: (y, y)),
    "y is ints": c("x: ", "int32", rows=lambda y: y.astype(np.int32)),
    "combine: idx of another T": c("topk_idx: ", "(4, 2)", "(3, 2)", idx=IDX[:3]),
    "combine: weights of another T": c("topk_weights: ", "(4, 2)", "(3, 2)", w=W[:3]),
    "no handle": c("handle: ", "low_latency_dispatch", "int", handle_of=lambda h: 0),
    "reduction": c("reduction: ", "'rank' or 'source'", "'sum'", reduction="sum"),
    "reduction is a number": c("reduction: ", "1", reduction=1),
    "zero_copy of another array": c("x: ", "zero_copy", zero_copy=True),
    "out has another T": c("out: ", "(4, 512)", "(3, 512)", out=X[:3]),
    "out has another dtype": c("out: ", "bfloat16", "float16", out=X.astype(np.float16)),
    "out is a list": c("out: ", "list", out=lambda buf: [1]),
}


@pytest.mark.parametrize("culprit", ["one", "all"])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(comm, make, case, culprit):
    buf = make()
    texts, wrong = WRONG[case]
    x, idx, w = to_device(buf, [X, IDX, W])
    _, _, handle, _, _ = buf.low_latency_dispatch(x, idx, w)
    y = buf.xp.ones((4, comm.size * 16, 512), BF16)
    is_dispatch = case in list(WRONG)[: list(WRONG).index("y has two dimensions")]
    for _ in range(2):
        if culprit == "all" or comm.rank == comm.size - 1:
            error = raised(lambda: wrong(buf, handle, y))
            assert type(error) is epcy.ArgumentError, repr(error)
            for text in (*texts[1:], f"rank {comm.rank}"):
                assert text in str(error), error
            assert str(error).startswith(texts[0]), error
            told = comm.allgather(str(error))
        else:
            result = []
            error = late_error(
                buf,
                lambda: result.append(  # noqa: B023
                    buf.low_latency_dispatch(x, idx)
                    if is_dispatch
                    else buf.low_latency_combine(y, idx, None, handle)
                ),
            )
            told = comm.allgather("")
            assert type(error) is epcy.PeerError and error.ranks == (comm.size - 1,), repr(error)
            assert told[comm.size - 1] in str(error)
            if is_dispatch and result:
                assert host_list(result[0][1]) == [0] * 4
                assert isinstance(raised(result[0][2].check), epcy.PeerError)
        assert raised(buf.check) is None or culprit == "all"
    works(buf, use_fp8=False)


def test_fp8_of_an_odd_hidden(comm, make):
    buf = make(hidden=64)
    x, idx = to_device(buf, (X[:, :64].copy(), IDX))
    error = raised(lambda: buf.low_latency_dispatch(x, idx))
    assert type(error) is epcy.ArgumentError
    for text in ("use_fp8: ", "128", "64", "use_fp8=False"):
        assert text in str(error)
    _, _, handle, _, _ = buf.low_latency_dispatch(x, idx, use_fp8=False)
    y = buf.xp.ones((4, comm.size * 16, 64), BF16)
    error = raised(lambda: buf.low_latency_combine(y, None, None, handle, use_logfmt=True))
    assert type(error) is epcy.ArgumentError and "use_logfmt: " in str(error)
    buf = make(hidden=128)
    x = to_device(buf, X[:, :128].copy())
    error = raised(lambda: buf.low_latency_dispatch(x, idx, round_scale=True, use_ue8m0=True))
    assert type(error) is epcy.ArgumentError and "use_ue8m0: " in str(error) and "512" in str(error)
    works(buf, use_fp8=False)


@pytest.mark.parametrize("value", ["E", -2, 2**40])
def test_bad_ids(comm, make, value):
    """They count as -1, and the rank that gave them is told later."""
    buf = make()
    value = 4 * comm.size if value == "E" else value
    sent = draw(3, comm.size, 5, num_experts=4 * comm.size)
    culprit = comm.size - 1
    sent.idxs[culprit][3, 1] = sent.idxs[culprit][4, 0] = value
    handle, routing = check_dispatch(buf, sent)
    check_combine(buf, handle, routing, 3, dispatched=sent.weights)
    for error in (raised(handle.check), raised(buf.check)):
        if comm.rank != culprit:
            assert error is None
            continue
        assert type(error) is epcy.ArgumentError
        for text in (f"rank {culprit}", "token 3", "lane 1", str(value), "topk_idx"):
            assert text in str(error), error
    assert raised(buf.check) is None
    works(buf, use_fp8=False)


def test_too_many_tokens(comm, make):
    buf = make(num_max_tokens_per_rank=300, num_max_low_latency_tokens_per_rank=8)
    x, idx = to_device(
        buf, (np.ones((9, 512), BF16), np.zeros((9, 2), np.int64)) if comm.rank == 0 else (X, IDX)
    )
    start = time.monotonic()
    error = late_error(buf, lambda: buf.low_latency_dispatch(x, idx))
    assert time.monotonic() - start < 2
    assert type(error) is (epcy.CapacityError if comm.rank == 0 else epcy.PeerError)
    for text in ("9 tokens", "num_max_low_latency_tokens_per_rank=8"):
        assert text in str(error)
    works(buf, use_fp8=False)


FIELDS = ["x.dtype", "use_fp8", "round_scale", "use_ue8m0", "topk_weights"]
FIELDS += ["reduction", "use_logfmt", "handle", "combine: topk_weights"]


@pytest.mark.parametrize("what", FIELDS)
@pytest.mark.usefixtures("two_ranks")
def test_calls_differ(comm, make, what):
    buf = make(timeout=5)
    x, idx, w = to_device(buf, [X, IDX, W])
    other = comm.rank == comm.size - 1
    _, _, first, _, _ = buf.low_latency_dispatch(x, idx)
    _, _, handle, _, _ = buf.low_latency_dispatch(x, idx)
    y = buf.xp.ones((4, comm.size * 16, 512), BF16)
    dispatch, combine = buf.low_latency_dispatch, buf.low_latency_combine
    calls = {
        "x.dtype": lambda: dispatch(x.astype(np.float16) if other else x, idx),
        "use_fp8": lambda: dispatch(x, idx, use_fp8=other),
        "round_scale": lambda: dispatch(x, idx, round_scale=other),
        "use_ue8m0": lambda: dispatch(x, idx, round_scale=True, use_ue8m0=other),
        "topk_weights": lambda: dispatch(x, idx, w if other else None),
        "reduction": lambda: combine(y, None, None, handle, reduction="source" if other else "rank"),
        "use_logfmt": lambda: combine(y, None, None, handle, use_logfmt=other),
        "handle": lambda: combine(y, None, None, first if other else handle),
        "combine: topk_weights": lambda: combine(y, None, w if other else None, handle),
    }
    for _ in range(3):
        error = late_error(buf, calls[what])
        assert isinstance(error, epcy.MismatchError), repr(error)
        for text in (what.removeprefix("combine: "), "rank 0: ", f"rank {comm.size - 1}: "):
            assert text in str(error), error
        assert len(set(comm.allgather(str(error)))) == 1
    works(buf, use_fp8=False)


@pytest.mark.parametrize(
    "one, two",
    [("low_latency_dispatch", other) for other in ("low_latency_combine", "dispatch", "barrier")]
    + [("low_latency_combine", "barrier")],
)
@pytest.mark.usefixtures("two_ranks")
def test_operations_differ(comm, make, one, two, backend):
    buf = make(timeout=5 if backend == "host" else 1)
    x, idx = to_device(buf, [X, IDX])
    _, _, handle, _, _ = buf.low_latency_dispatch(x, idx)
    y = buf.xp.ones((4, comm.size * 16, 512), BF16)
    calls = {
        "low_latency_dispatch": lambda: buf.low_latency_dispatch(x, idx),
        "low_latency_combine": lambda: buf.low_latency_combine(y, None, None, handle),
        "dispatch": lambda: buf.dispatch(x, idx),
        "barrier": buf.barrier,
    }
    for turn in range(4):
        mine_, others = (one, two) if turn % 2 else (two, one)
        start = time.monotonic()
        error = late_error(buf, calls[mine_ if comm.rank == 0 else others])
        assert isinstance(error, epcy.MismatchError), repr(error)
        for text in ("operation", f"rank 0: in {mine_}", f"rank 1: in {others}"):
            assert text in str(error), error
        assert time.monotonic() - start < 3
        comm.Barrier()
        if backend == "nvshmem":  # operations of different kinds have epochs of their own
            assert not buf and "reset()" in str(error)
            buf.reset()
    for seed in range(3):
        works(buf, seed, use_fp8=False)
        buf.low_latency_combine_input(handle)
        y = buf.low_latency_combine_input(handle)
        buf.low_latency_combine(y, None, None, handle)
        buf.reset()


def test_unequal_tokens_simply_work(comm, make):
    buf = make(num_max_tokens_per_rank=128)
    sent = draw(
        7, comm.size, [1 if rank == 0 else 128 for rank in range(comm.size)], num_experts=4 * comm.size
    )
    handle, routing = check_dispatch(buf, sent)
    check_combine(buf, handle, routing, 7, dispatched=sent.weights)


# ---- waiting


@pytest.mark.parametrize("operation", ["low_latency_dispatch", "low_latency_combine", "hook"])
@pytest.mark.host_only("a GPU tells of it later")
@pytest.mark.usefixtures("two_ranks")
def test_a_rank_that_comes_too_late(comm, make, operation):
    buf = make(timeout=0.5)
    x, idx = to_device(buf, [X, IDX])
    _, _, handle, _, _ = buf.low_latency_dispatch(x, idx)
    y = buf.xp.ones((4, comm.size * 16, 512), BF16)
    calls = {
        "low_latency_dispatch": lambda: buf.low_latency_dispatch(x, idx),
        "low_latency_combine": lambda: buf.low_latency_combine(y, None, None, handle),
        "hook": lambda: buf.low_latency_dispatch(x, idx, return_recv_hook=True)[4](),
    }
    late = comm.size - 1
    start = time.monotonic()
    if comm.rank != late:
        error = raised(calls[operation])
        assert time.monotonic() - start < 1.5
        assert type(error) is epcy.PeerTimeoutError and error.ranks == (late,), error
        assert error.phase == "arrival" and error.epoch == 2
        for text in (
            f"rank {late}",
            "timeout=0.5",
            f"rank {comm.rank}",
            "(call 2)",
            "reset()",
            "low_latency_",
        ):
            assert text in str(error), error
        assert not buf and isinstance(raised(calls[operation]), epcy.StateError)
    comm.Barrier()
    if comm.rank == late:
        error = raised(calls[operation])
        assert type(error) is epcy.PeerTimeoutError and "gave up" in str(error)
    buf.reset()
    works(buf, use_fp8=False)


@pytest.mark.host_only("the host waits for a slot")
@pytest.mark.usefixtures("two_ranks")
def test_a_rank_that_does_not_receive(comm, make):
    """A slot is free again when everybody has received what it held; that wait is bounded too."""
    buf = make(timeout=0.5)
    x, idx = to_device(buf, [X, IDX])
    hooks = [buf.low_latency_dispatch(x, idx, return_recv_hook=True)[4] for _ in range(2)]
    late = comm.size - 1
    if comm.rank != late:
        hooks[0]()
        error = raised(lambda: buf.low_latency_dispatch(x, idx, return_recv_hook=True))
        assert type(error) is epcy.PeerTimeoutError and error.ranks == (late,) and error.phase == "receipt", (
            error
        )
    comm.Barrier()
    buf.reset()
    works(buf, use_fp8=False)


@pytest.mark.usefixtures("two_ranks")
def test_a_rank_that_comes_late_but_in_time(comm, make):
    buf = make(timeout=10)
    sent = draw(3, comm.size, 6, num_experts=4 * comm.size)
    for late in (0, comm.size - 1):
        if comm.rank == late:
            time.sleep(0.4)
        handle, routing = check_dispatch(buf, sent, hook=late == 0)
        if comm.rank == late:
            time.sleep(0.2)
        check_combine(buf, handle, routing, 3, dispatched=sent.weights)


@pytest.mark.usefixtures("two_ranks")
def test_sending_does_not_wait(comm, make):
    """With a hook, a rank goes on although another one is late."""
    buf = make(timeout=20)
    sent = draw(3, comm.size, 6, num_experts=4 * comm.size)
    x, idx, weights = mine(buf, sent)
    buf.low_latency_dispatch(x, idx, weights)
    comm.Barrier()
    if comm.rank == comm.size - 1:
        time.sleep(0.6)
    start = time.monotonic()
    hooks = [buf.low_latency_dispatch(x, idx, weights, return_recv_hook=True)[4] for _ in range(2)]
    assert time.monotonic() - start < 0.3
    for hook in hooks:
        hook()


@pytest.mark.host_only("the host waits")
@pytest.mark.usefixtures("two_ranks")
def test_other_threads_run_during_a_wait(comm, make):
    buf = make(timeout=20)
    x, idx = to_device(buf, [X, IDX])
    buf.barrier()
    if comm.rank == comm.size - 1:
        time.sleep(1)
    with counting() as counts:
        start = time.monotonic()
        buf.low_latency_dispatch(x, idx)
        waited, reached = time.monotonic() - start, counts[0]
    if comm.rank == 0:
        assert waited > 0.7 and reached > 100
