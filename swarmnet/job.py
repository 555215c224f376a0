"""One microbatch on one peer, from its ACT, or its start, to its answer. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from swarmnet.identifiers import PeerId

Phase = Literal["door", "forward", "unrouted", "waiting", "backward", "done"]


@dataclass(slots=True)
class Job:
    """One microbatch on this peer."""

    phase: Phase
    deadline: float
    own: bool = False
    """Started here."""
    above: dict[PeerId, int] = field(default_factory=dict)
    """Who waits for its answer, and that peer's attempt."""
    next: PeerId | None = None
    attempt: int = 0
    failures: int = 0
    cancelled: bool = False
    """Nobody wants it any more, but it is being computed: what comes of that decides."""
    sent_at: float = 0.0
    next_deadline: float = float("inf")
    tried: dict[PeerId, float] = field(default_factory=dict)
    """Peers that it was sent to, and when first: an answer may be to that, whatever was sent since."""
    answered_by: PeerId | None = None
    """Whose gradient goes through here now."""
    answer_seconds: float | None = None
    """What that took, if it answers the newest attempt."""
    spoilt: set[PeerId] = field(default_factory=set)
    """Whose gradient was no good: no other one of theirs is taken."""
    rerouted: str = ""
    """Why the peer that was tried last did not do it (peers/reasons.py)."""
    retry_at: float = float("inf")
    done_at: float = float("inf")
