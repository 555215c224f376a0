"""What a peer holds of a round, and what it knows of a neighbour's rounds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.manifest import Rounds
from swarmnet.round_events import OpenSet, Reference


def set_digest(ids: Iterable[ContributionId]) -> bytes:
    """First 8 bytes of SHA-256 over the sorted ids: names a set of contributions."""
    return hashlib.sha256(b"".join(sorted(ids))).digest()[:8]


def kept_rounds(rules: Rounds) -> int:
    """How many settled sets, with their contributions, a peer keeps: what comes after an old snapshot."""
    return 2 * rules.snapshot_rounds + 2 * rules.window


@dataclass(slots=True)
class RoundSet:
    """The contributions of one round, and where it stands here. Times: infinite until it happens."""

    held: dict[PeerId, Reference] = field(default_factory=dict)
    closed_at: float = float("inf")
    sealed: bool = False
    sealed_at: float = float("inf")
    digest: bytes = field(default_factory=lambda: set_digest(()))

    def update_digest(self) -> None:
        self.digest = set_digest(reference.id for reference in self.held.values())


@dataclass(slots=True)
class NeighbourView:
    """The newest Progress of one neighbour; rounds of -1 until the first came."""

    round: int = -1
    tokens: int = 0
    contributed: frozenset[int] = frozenset()
    settled: int = -1
    in_step: bool = False
    sets: dict[int, OpenSet] = field(default_factory=dict)
    differs_since: dict[int, float] = field(default_factory=dict)
    """Round -> since when its set there is another one than here."""
