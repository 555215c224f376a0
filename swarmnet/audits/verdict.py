"""What an auditor says of a window of somebody's rounds, and what anybody else can check.

The evidence of a lie is the accused's own signed commitments from the beginning of the window up to the round
that does not follow: whoever has them, and computes alike, replays them and comes to the same verdict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
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

    def payloads(self, window: Sequence[Commitment]) -> Iterator[bytes]: ...

    def carried(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Evidence:
    """Of one window of a peer; all of it signed by the peer, or named by a digest in what it signed."""

    peer: PeerId
    window: tuple[Commitment, ...]
    """All that it made from the window's beginning on, in the order of their rounds."""
    carried: bytes
    """Into it."""
    next_carried: bytes | None = None
    """What the first commitment of the next window says was carried into that. None: the window is not
    over."""


def judge(evidence: Evidence, every: int, settings: bytes, replay: Replays) -> Finding:
    """`every`: rounds of a window; `settings`: the auditor's own."""
    window = evidence.window
    last = window[0].round - 1
    contradiction = _contradiction(evidence.peer, window, every)
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
        for commitment, payload in zip(window, replay.payloads(window), strict=True):
            if hashlib.sha256(payload).digest() != commitment.payload:
                return Finding("lied", commitment.round, "its contribution does not follow from its work")
            last = commitment.round
    except Unknown as unknown:
        return Finding("inconclusive", last, str(unknown))
    if evidence.next_carried not in (None, digest_of(b""), digest_of(replay.carried())):
        return Finding("lied", last, "what it carried into the next window does not follow from this one")
    return Finding("agrees", last)


def _contradiction(peer: PeerId, window: Sequence[Commitment], every: int) -> str:
    """What is wrong with them before anything is computed."""
    begun = window[0].round
    if any((each.begun, each.carried) != (begun, window[0].carried) for each in window):
        return "its commitments name different beginnings of one window"
    if window_of(begun, peer, every) != window_of(window[-1].round, peer, every):
        return f"it did not begin afresh between round {begun} and {window[-1].round}"
    if any(later.round <= sooner.round for sooner, later in pairwise(window)):
        return "two commitments for one round"
    counters = [each for commitment in window for each in commitment.stretches]
    if any(later.first < sooner.counters.stop for sooner, later in pairwise(counters)):
        return "it counts a microbatch twice"
    return ""
