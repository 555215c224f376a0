"""What an auditor says of a window of somebody's rounds, and what anybody else can check.

Who computes with the same settings says that it agrees, to the bit, or that it is a lie. Who has other
settings does it all the same and says how alike it is: a number that is no proof of anything, and means
something only over several windows (standing.py).

The evidence of a lie is the accused's own signed commitments from the beginning of the window up to the round
that does not follow: whoever has them, and computes alike, replays them and comes to the same verdict. Each
names the one before it, so an accuser cannot leave out one that did not settle and make a liar of who is
honest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean
from typing import Literal, Protocol

from swarmnet.audits.commitment import WHOLLY_ALIKE, Commitment, digest_of, read_alike
from swarmnet.audits.replay import Unknown
from swarmnet.audits.windows import window_of
from swarmnet.identifiers import PeerId
from swarmnet.optimizer.index_code import ContributionError

Verdict = Literal["agrees", "lied", "alike", "inconclusive"]
NOTHING = digest_of(b"")


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Verdict
    round: int
    """Up to which all agrees, or the first that does not."""
    reason: str = ""
    likeness: int = 0
    """Where it is "alike", more or less: of what it told in the window's rounds and carried on after them,
    the mean, in whole thousandths (likeness.py)."""


class Replays(Protocol):
    """Replay is one."""

    def begin(self, carried: bytes) -> None: ...

    def payloads(self, window: Sequence[Commitment]) -> Iterator[bytes | None]: ...

    def carried(self) -> bytes: ...

    def tells_alike(self, one: bytes, other: bytes) -> float: ...

    def carries_alike(self, carried: bytes) -> float: ...


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
    told: Mapping[bytes, bytes] = field(default_factory=dict)
    """By its SHA-256, what was contributed, as far as it is known: who has other settings needs it ..."""
    onward: bytes = b""
    """... and what was carried into the next window."""


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
    seen = at_sight(evidence, every)
    if seen is not None:
        return seen
    if digest_of(evidence.carried) != window[0].carried:
        return Finding("inconclusive", last, "what was given is not what it carried into the window")
    if not all(read_alike(commitment.settings, settings) for commitment in window):
        return Finding("inconclusive", last, "it reads another text than this auditor")
    is_exact = all(commitment.settings == settings for commitment in window)
    alike: list[float] = []
    try:
        replay.begin(evidence.carried)
    except ContributionError as error:
        return Finding("lied", window[0].round, str(error))
    try:
        told = replay.payloads(window)
        for commitment in window:
            while (payload := next(told)) is None:
                yield
            if hashlib.sha256(payload).digest() == commitment.payload:
                alike.append(1.0)
            elif is_exact:
                return Finding("lied", commitment.round, "its contribution does not follow from its work")
            elif commitment.payload in evidence.told:
                alike.append(_alike(replay, evidence.told[commitment.payload], payload))
            last = commitment.round
    except Unknown as unknown:
        return Finding("inconclusive", last, str(unknown))
    if not is_exact and not alike:
        return Finding("inconclusive", last, "what it contributed is not known here")
    if after is not None and after.carried != NOTHING:
        if after.carried == digest_of(replay.carried()):
            alike.append(1.0)
        elif is_exact:
            return Finding("lied", last, "what it carried into the next window does not follow from this one")
        elif digest_of(evidence.onward) != after.carried:
            return Finding("inconclusive", last, "what was given is not what it carried into the next window")
        else:
            alike.append(_carried_alike(replay, evidence.onward))
    if is_exact:
        return Finding("agrees", last)
    return Finding("alike", last, likeness=int(WHOLLY_ALIKE * max(0.0, mean(alike))))


def at_sight(evidence: Evidence, every: int) -> Finding | None:
    """What anybody sees in it, without computing anything."""
    window, after = evidence.window, evidence.next
    if not is_linked(window, after):
        return Finding("inconclusive", window[0].round - 1, "what was given is not all of a window")
    contradiction = _contradiction(evidence.peer, window, after, every)
    return Finding("lied", window[-1].round, contradiction) if contradiction else None


def _alike(replay: Replays, told: bytes, replayed: bytes) -> float:
    try:
        return replay.tells_alike(told, replayed)
    except ContributionError:  # Nothing came of it here, or of it there.
        return 0.0


def _carried_alike(replay: Replays, onward: bytes) -> float:
    try:
        return replay.carries_alike(onward)
    except ContributionError:
        return 0.0


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
