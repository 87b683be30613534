"""Legal and illegal calls in any order on all ranks: the reference's bits or the error that the state calls for, and
after every error the Buffer works, or says that reset() is needed."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest

from mpi.cases import raised
from parallel import given
from property.illegal_calls import Offender

CALLS = ["dispatch", "cached", "worst", "combine", "barrier", "low_latency", "two_hooks", "hook_out_of_turn",
         "third_send", "bad_argument", "bad_id", "mismatch", "too_many", "reset", "late", "fresh", "use_after_free",
         "stale_result", "two_buffers", "foreign_handle", "wrong_rows", "combine_inputs", "unreceived_handle",
         "masked", "handle_and_ids", "late_low_latency", "refused_construction", "free_in_flight"]  # fmt: skip


@pytest.mark.host_only("timeouts and refusals are told at once")
@given(
    max_examples=30,
    story=st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 2**16)), min_size=2, max_size=14),
)
def test_any_calls(comm, make_buffer, story):
    player = Offender(make_buffer, comm)
    for name, seed in story:
        getattr(player, name)(seed)
    assert raised(player.buf.check) is None
    player.dispatch(1)
    player.low_latency(1)
    player.buf.free()


def test_every_call_is_listed():
    made = {name for name, call in vars(Offender).items() if callable(call)} | {
        name for name, call in vars(Offender.__mro__[1]).items() if callable(call)
    }
    helpers = {"__init__", "sent", "flights", "land", "culprit", "one_is_wrong", "all_are_wrong"}
    assert made - helpers == set(CALLS)
