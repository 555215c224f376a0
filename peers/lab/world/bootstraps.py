"""The bootstrap of a world: who finds whom in the directory depends on whom it has met since its start."""

from __future__ import annotations

from protocols.signed.identity import Identity
from swarmnet.identifiers import PeerId

BOOTSTRAP = Identity.from_seed(b"the bootstrap of the world").peer_id


class SimulatedBootstrap:
    """Two peers find each other once both have asked it between one start and the next."""

    def __init__(self) -> None:
        self.away = False
        self._start = 0
        self._met: dict[PeerId, set[int]] = {}
        """Peer -> the starts of the bootstrap after which it has asked."""

    def answer(self, peer: PeerId) -> bool:
        """Take a peer into the table. Returns False while the bootstrap is away."""
        if self.away:
            return False
        self._met.setdefault(peer, set()).add(self._start)
        return True

    def has_met(self, peer: PeerId) -> bool:
        """Whether the peer has joined once. Such a peer remembers others, through which it comes back."""
        return peer in self._met

    def connects(self, peer: PeerId, other: PeerId) -> bool:
        """Whether the directory shows these two to each other."""
        return not self._met.get(peer, set()).isdisjoint(self._met.get(other, set()))

    def leave(self) -> None:
        """Its process ends, and its table with it."""
        self.away = True

    def come_back(self) -> None:
        """It starts anew, with the same key and port and an empty table."""
        self.away = False
        self._start += 1
