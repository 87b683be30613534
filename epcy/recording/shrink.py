"""From a recording that fails to the smallest one that still does, by trying."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from epcy.recording.calls import Recording
from epcy.recording.checks import ROUTED
from epcy.recording.cut import keep_calls, with_arguments, with_hidden, with_tokens, without_lane
from epcy.recording.spread import spread

__all__ = ["describe", "shrink"]

# Arguments that a call may do without, and what stands in.
PLAIN = {"has_weights": False, "num_biases": 0, "num_sms": None, "own_output": False, "use_logfmt": False}

Try = Callable[[Recording], bool]


def shrink(
    recording: Recording,
    fails: Try,
    *,
    seconds: float = 300.0,
    say: Callable[[str], None] = lambda text: None,
) -> Recording:
    """Return the smallest recording found that still fails.

    Local, blocking: it tries fewer ranks, calls, tokens, lanes, shorter tokens and plainer arguments in turn.

    Parameters
    ----------
    recording : Recording
        One that fails.
    fails : function of a Recording
        Whether it fails in the same way.
    seconds : float
        Time for it all; what is smallest by then is returned.
    say : function of str
        Told of every step that made it smaller.
    """
    search = _Search(recording, fails, time.monotonic() + seconds, say)
    search.ranks()
    before = None
    while before is not search.best and not search.is_late:
        search.calls()
        search.tokens()
        before = search.best  # fewer lanes may make calls and tokens superfluous; what follows seldom does
        search.lanes()
    search.hidden()
    search.arguments()
    return search.best


class _Search:
    def __init__(self, best: Recording, fails: Try, deadline: float, say: Callable[[str], None]) -> None:
        self.best, self.fails, self.deadline, self.say = best, fails, deadline, say

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def attempt(self, candidate: Recording) -> bool:
        if self.is_late or not candidate.calls or not self.fails(candidate):
            return False
        self.best = candidate
        self.say(describe(candidate))
        return True

    def ranks(self) -> None:
        for fewer in range(1, self.best.num_ranks):
            if all(b.options["num_experts"] % fewer == 0 for b in self.best.buffers):
                if self.attempt(spread(self.best, fewer)):
                    return

    def calls(self) -> None:
        """Leave out ever smaller runs of calls."""
        size = (len(self.best.calls) + 1) // 2
        while size >= 1 and not self.is_late:
            at = 0
            while at < len(self.best.calls):
                rest = {n for n in range(len(self.best.calls)) if not at <= n < at + size}
                if not self.attempt(keep_calls(self.best, rest)):
                    at += size
            size //= 2

    def _roots(self) -> Iterator[int]:
        yield from (n for n, call in enumerate(self.best.calls) if call.op in ROUTED and call.refers is None)

    def tokens(self) -> None:
        for root in list(self._roots()):
            for rank in range(len(self.best.calls[root].num_tokens)):
                self._tokens_of(root, rank)

    def _tokens_of(self, root: int, rank: int) -> None:
        """Leave out all tokens of a rank, then ever smaller runs of them."""
        count = max(self.best.calls[root].num_tokens[rank], 0)
        if count and self.attempt(with_tokens(self.best, root, rank, ())):
            return
        size = (count + 1) // 2
        while size >= 1 and not self.is_late:
            at = 0
            while at < self.best.calls[root].num_tokens[rank]:
                count = self.best.calls[root].num_tokens[rank]
                rest = [t for t in range(count) if not at <= t < at + size]
                if not rest or not self.attempt(with_tokens(self.best, root, rank, rest)):
                    at += size
            size //= 2

    def lanes(self) -> None:
        for root in list(self._roots()):
            num_topk = self.best.buffers[self.best.calls[root].buffer].options["num_topk"]
            for lane in reversed(range(num_topk)):
                used = [r for r in self.best.calls[root].routing if r >= 0]
                if any((self.best.routings[place][:, lane] != -1).any() for place in used):
                    self.attempt(without_lane(self.best, root, lane))

    def hidden(self) -> None:
        while not self.is_late:
            most = max(b.options["hidden"] for b in self.best.buffers)
            for shorter in (512, 128, 8):
                if shorter < most and self.attempt(with_hidden(self.best, shorter)):
                    break
            else:
                return

    def arguments(self) -> None:
        for number, call in enumerate(self.best.calls):
            for name, value in PLAIN.items():
                if any(args.get(name) not in (None, value) for args in call.args) and name in call.args[0]:
                    self.attempt(with_arguments(self.best, number, {name: value}))


def describe(recording: Recording) -> str:
    """Say how large a recording is. Local."""
    tokens = sum(max(t, 0) for call in recording.calls for t in call.num_tokens)
    lanes = sum(int((recording.routings[p] >= 0).sum()) for c in recording.calls for p in c.routing if p >= 0)
    hidden = max((b.options["hidden"] for b in recording.buffers), default=0)
    numbers = (
        (len(recording.calls), "call"),
        (recording.num_ranks, "rank"),
        (tokens, "token"),
        (lanes, "lane"),
    )
    return (
        ", ".join(f"{number} {noun}{'' if number == 1 else 's'}" for number, noun in numbers)
        + f", H {hidden}"
    )
