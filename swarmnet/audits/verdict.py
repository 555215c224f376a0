"""What an auditor says of a window of somebody's rounds, and what anybody else can check.

The evidence of a lie is the accused's own signed commitments from the beginning of the window up to the round
that does not follow: whoever has them, and computes alike, replays them and comes to the same verdict. Each
names the one before it, so an accuser cannot leave out one that did not settle and make a liar of who is
honest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

from swarmnet.audits.commitment import Commitment, digest_of
from swarmnet.audits.replay import Unknown
from swarmnet.audits.windows import window_of
from swarmnet.identifiers import PeerId
from swarmnet.optimizer.index_code import ContributionError

Verdict = Literal["agrees", "lied", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Verdict
    round: int
    """Up to which all agrees, or the first that does not."""
    reason: str = ""


class Replays(Protocol):
    """Replay is one."""

    def begin(self, carried: bytes) -> None: ...

    def payloads(self, window: Sequence[Commitment]) -> Iterator[bytes | None]: ...

    def carried(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Evidence:
    """Of one window of a peer; all of it signed by the peer, or named by a digest in what it signed."""

    peer: PeerId
    window: tuple[Commitment, ...]
    """All that it made from the window's beginning on, in the order of their rounds."""
    carried: bytes
    """Into it."""
    next: Commitment | None = None
    """The one that names the last of these as before it: the first of the next window. None: not known, or
    the peer began with nothing after it."""


def judge(evidence: Evidence, every: int, settings: bytes, replay: Replays) -> Finding:
    """All of `judging` at once."""
    steps = judging(evidence, every, settings, replay)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            found: Finding = done.value
            return found


def judging(
    evidence: Evidence, every: int, settings: bytes, replay: Replays
) -> Generator[None, None, Finding]:
    """Yields whenever about a microbatch was computed. `every`: rounds of a window; `settings`: the auditor's
    own."""
    window, after = evidence.window, evidence.next
    last = window[0].round - 1
    if not is_linked(window, after):
        return Finding("inconclusive", last, "what was given is not all of a window")
    contradiction = _contradiction(evidence.peer, window, after, every)
    if contradiction:
        return Finding("lied", window[-1].round, contradiction)
    if digest_of(evidence.carried) != window[0].carried:
        return Finding("inconclusive", last, "what was given is not what it carried into the window")
    if any(commitment.settings != settings for commitment in window):
        return Finding("inconclusive", last, "it computes with other settings than this auditor")
    try:
        replay.begin(evidence.carried)
    except ContributionError as error:
        return Finding("lied", window[0].round, str(error))
    try:
        told = replay.payloads(window)
        for commitment in window:
            while (payload := next(told)) is None:
                yield
            if hashlib.sha256(payload).digest() != commitment.payload:
                return Finding("lied", commitment.round, "its contribution does not follow from its work")
            last = commitment.round
    except Unknown as unknown:
        return Finding("inconclusive", last, str(unknown))
    if after is not None and after.carried not in (digest_of(b""), digest_of(replay.carried())):
        return Finding("lied", last, "what it carried into the next window does not follow from this one")
    return Finding("agrees", last)


def is_linked(window: Sequence[Commitment], after: Commitment | None) -> bool:
    """Whether these are all of a window, from its beginning on: each names the one before it."""
    if window[0].begun != window[0].round:
        return False
    every = (*window, after) if after is not None else window
    return all(later.before == sooner.name for sooner, later in pairwise(every))


def _contradiction(
    peer: PeerId, window: Sequence[Commitment], after: Commitment | None, every: int
) -> str:
    """What is wrong with them, which the peer has signed one on the other, before anything is computed."""
    begun = window[0].round
    if any((each.begun, each.carried) != (begun, window[0].carried) for each in window):
        return "its commitments name different beginnings of one window"
    if window_of(begun, peer, every) != window_of(window[-1].round, peer, every):
        return f"it did not begin afresh between round {begun} and {window[-1].round}"
    linked = (*window, after) if after is not None else window
    if any(later.round <= sooner.round for sooner, later in pairwise(linked)):
        return "two commitments for one round"
    stretches = [each for commitment in linked for each in commitment.stretches]
    if any(later.first < sooner.counters.stop for sooner, later in pairwise(stretches)):
        return "it counts a microbatch twice"
    if any(later.first > sooner.counters.stop for sooner, later in pairwise(stretches)):
        return "it leaves microbatches out, and so could choose its text"
    return ""
