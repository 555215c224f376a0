"""Who is there, as one peer sees it: records are hints, beats are proof, silence is suspicion.

A peer is *live* while its link to us or ours to it stands and something was heard of it within
SILENT_SECONDS. A lost link or silence ends that at once; the record stays as an address to try again.
Times in seconds on the caller's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from swarmnet.identifiers import PeerId

BEAT_SECONDS = 1.0
SILENT_SECONDS = 4.0
"""A frozen peer is noticed after this; the network itself needs 39 s or for ever (hivemind 1.1.12)."""
FIRST_REDIAL_SECONDS = 0.5
LONGEST_REDIAL_SECONDS = 8.0
"""libp2p's own dial back-off grows with attempts: after a partition frequent retries take longer."""
FORGET_SECONDS = 600.0
MOST_PEERS = 4096
"""Keys cost nothing to make: beyond this many, whoever is not linked and was met longest ago is forgotten."""


@dataclass(slots=True)
class Known:
    """One other peer. `sequence` orders its records; `ready` says that it takes part in its stage."""

    stage: int
    role: str
    addresses: tuple[str, ...]
    sequence: int
    record: bytes
    recorded_at: float
    heard_at: float = float("-inf")
    linked: bool = False
    ready: bool = False
    round: int = 0
    service_seconds: float = 0.0
    failures: int = 0
    dial_at: float = 0.0
    dialing: bool = False


class Membership:
    def __init__(self, me: PeerId, stage: int, chance: Random) -> None:
        self.me = me
        self.stage = stage
        self.chance = chance
        self.peers: dict[PeerId, Known] = {}
        self._left: dict[PeerId, int] = {}
        """Sequence of the last record of peers that said Bye: the directory keeps it for a while."""

    # -- what happens ---------------------------------------------------------------------------------

    def recorded(
        self, peer: PeerId, stage: int, role: str, addresses: tuple[str, ...], sequence: int, record: bytes,
        now: float,
    ) -> bool:  # fmt: skip
        """A verified record; True if it is news. An older sequence never replaces a newer one."""
        known = self.peers.get(peer)
        if peer == self.me or (known is not None and known.sequence >= sequence):
            return False
        if self._left.get(peer, -1) >= sequence:
            return False
        if known is None:
            if len(self.peers) >= MOST_PEERS and not self._make_room():
                return False
            self.peers[peer] = Known(stage, role, addresses, sequence, record, now)
        else:
            known.stage, known.role, known.addresses = stage, role, addresses
            known.sequence, known.record, known.recorded_at = sequence, record, now
        return True

    def heard(self, peer: PeerId, now: float) -> None:
        known = self.peers.get(peer)
        if known is not None:
            known.heard_at = now

    def beat(
        self, peer: PeerId, stage: int, ready: bool, round: int, service_seconds: float, now: float
    ) -> None:
        known = self.peers.get(peer)
        if known is not None:
            known.heard_at, known.stage, known.ready = now, stage, ready
            known.round, known.service_seconds = round, service_seconds

    def dialing(self, peer: PeerId, now: bool) -> None:
        """A dial has begun, or has ended: there is never a second one beside it."""
        if peer in self.peers:
            self.peers[peer].dialing = now

    def linked(self, peer: PeerId, now: float) -> None:
        known = self.peers[peer]
        known.linked, known.failures, known.heard_at = True, 0, now

    def unlinked(self, peer: PeerId, now: float) -> None:
        """A dial failed, a link broke, or it fell silent: try again later, with growing patience."""
        known = self.peers.get(peer)
        if known is None:
            return
        known.linked = known.ready = False
        pause = min(LONGEST_REDIAL_SECONDS, FIRST_REDIAL_SECONDS * 2**known.failures)
        known.dial_at = now + pause * self.chance.uniform(0.8, 1.2)
        known.failures += 1

    def left(self, peer: PeerId) -> None:
        """It said Bye: nothing to wait for, until it signs a newer record."""
        known = self.peers.pop(peer, None)
        if known is not None:
            self._left[peer] = known.sequence
            if len(self._left) > MOST_PEERS:
                del self._left[next(iter(self._left))]

    # -- what follows ---------------------------------------------------------------------------------

    def concerns_us(self, stage: int) -> bool:
        """Our own group and the stages next to it."""
        return stage >= 0 and abs(stage - self.stage) <= 1

    def live(self, stage: int) -> list[PeerId]:
        """Peers of a stage that are linked and take part."""
        return [
            peer
            for peer, known in self.peers.items()
            if known.stage == stage and known.linked and known.ready
        ]

    def to_dial(self, now: float) -> list[PeerId]:
        return [
            peer
            for peer, known in self.peers.items()
            if not known.linked
            and not known.dialing
            and known.dial_at <= now
            and self.concerns_us(known.stage)
        ]

    def silent(self, now: float) -> list[PeerId]:
        """Linked peers of which nothing was heard for SILENT_SECONDS."""
        return [
            peer
            for peer, known in self.peers.items()
            if known.linked and known.heard_at + SILENT_SECONDS <= now
        ]

    def next_silence(self, now: float) -> float:
        """When the next linked peer would fall silent."""
        heard = [known.heard_at for known in self.peers.values() if known.linked]
        return max(now, min(heard, default=now) + SILENT_SECONDS)

    def forget_old(self, now: float) -> None:
        for peer, known in list(self.peers.items()):
            if not known.linked and max(known.recorded_at, known.heard_at) + FORGET_SECONDS <= now:
                del self.peers[peer]

    def _make_room(self) -> bool:
        unlinked = [(known.heard_at, known.recorded_at, peer) for peer, known in self.peers.items()
                    if not known.linked and not known.dialing]  # fmt: skip
        if not unlinked:
            return False
        del self.peers[min(unlinked)[2]]
        return True

    def records(self, most: int) -> list[bytes]:
        """Records to tell a newcomer: those heard last come first."""
        newest = sorted(self.peers.values(), key=lambda known: -known.heard_at)
        return [known.record for known in newest if known.record][:most]


def choose_stage(stages: int, counts: dict[int, int], capacity: dict[int, float], chance: Random) -> int:
    """The stage that needs a newcomer most: fewest peers, then least capacity (tokens/second), then chance.

    The first of an empty swarm starts at stage 0. SWARM's rule (queue lengths) comes with moving.
    """
    fewest = min(counts.get(stage, 0) for stage in range(stages))
    thin = [stage for stage in range(stages) if counts.get(stage, 0) == fewest]
    weakest = min(capacity.get(stage, 0.0) for stage in thin)
    return chance.choice([stage for stage in thin if capacity.get(stage, 0.0) <= weakest * 1.05])
