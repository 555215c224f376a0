"""What an auditor says of a window of somebody's rounds, and what anybody else can check.

The evidence of a lie is the accused's own signed commitments from the beginning of the window up to the round
that does not follow: whoever has them, and computes alike, replays them and comes to the same verdict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from swarmnet.audits.commitment import Commitment
from swarmnet.audits.replay import Unknown
from swarmnet.audits.windows import window_of
from swarmnet.identifiers import PeerId

Verdict = Literal["agrees", "lied", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Verdict
    round: int
    """Up to which all agrees, or the first that does not."""
    reason: str = ""


def judge(
    peer: PeerId, window: Sequence[Commitment], every: int, settings: bytes,
    replay: Callable[[Sequence[Commitment]], Iterator[bytes]],
) -> Finding:  # fmt: skip
    """Of commitments that the peer has signed, all that it made from the beginning of a window on, in the
    order of their rounds. `every`: rounds of a window; `settings`: the auditor's own; `replay`: what a peer
    that did what they say contributes to each (Replay.payloads)."""
    contradiction = _contradiction(peer, window, every)
    if contradiction:
        return Finding("lied", window[-1].round, contradiction)
    last = window[0].round - 1
    if any(commitment.settings != settings for commitment in window):
        return Finding("inconclusive", last, "it computes with other settings than this auditor")
    payloads = replay(window)
    for commitment in window:
        try:
            payload = next(payloads)
        except Unknown as unknown:
            return Finding("inconclusive", last, str(unknown))
        if hashlib.sha256(payload).digest() != commitment.payload:
            return Finding(
                "lied", commitment.round, "its contribution does not follow from what it says it did"
            )
        last = commitment.round
    return Finding("agrees", last)


def _contradiction(peer: PeerId, window: Sequence[Commitment], every: int) -> str:
    """What is wrong with them before anything is computed."""
    begun = window[0].round
    if any(each.begun != begun for each in window):
        return "its commitments name different rounds as the beginning of one window"
    if window_of(begun, peer, every) != window_of(window[-1].round, peer, every):
        return f"it did not begin afresh between round {begun} and {window[-1].round}"
    if any(later.round <= sooner.round for sooner, later in pairwise(window)):
        return "two commitments for one round"
    counters = [each for commitment in window for each in commitment.stretches]
    if any(later.first < sooner.counters.stop for sooner, later in pairwise(counters)):
        return "it counts a microbatch twice"
    return ""
